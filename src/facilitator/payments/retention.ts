// Removes old rows: refusals, the usage of past days, signed transactions whose wallet nonce is certainly used, and payments
// that ended and expired so long ago that the chain can't collect them and nobody asks for them. Rows are removed in small
// groups, each in its own write, so that settlements can proceed in between.
import { and, eq, inArray, lt, sql } from "drizzle-orm";
import { oneOf } from "../../../db/schema.ts";
import type { Log } from "../../core/log.ts";
import { type Clock, DAY_MS } from "../../core/time.ts";
import { deleteSome, removeInGroups } from "../../storage/cleanup.ts";
import type { Store, Tx } from "../../storage/store.ts";
import { utcDay } from "./guardrails.ts";

/** Refusals count from the last one; payments both from their end and from the end of their validity. */
const RECORD_DAYS = 90;
/** Far longer than any reorganisation, which could make a transaction needed again. */
const TRANSACTION_DAYS = 7;
const CEILING_DAYS = 35;

export async function cleanUpFacilitator(store: Store, clock: Clock, log: Log): Promise<void> {
  const now = clock.now();
  const old = now - RECORD_DAYS * DAY_MS;
  const oldDays = utcDay(now - CEILING_DAYS * DAY_MS);
  const { facilitatorRefusals: refusal, facilitatorDays: day } = store.read.tables;
  const refusals = await removeInGroups(store, (tx, limit) =>
    deleteSome(tx, refusal, [refusal.account, refusal.payer, refusal.nonce], lt(refusal.updated_at, old), limit),
  );
  // An open payment from a removed day has no row left to give its share back to, which does no harm.
  const days = await removeInGroups(store, (tx, limit) =>
    deleteSome(tx, day, [day.account, day.day], lt(day.day, oldDays), limit),
  );
  const oldTransactions = now - TRANSACTION_DAYS * DAY_MS;
  const transactions = await removeInGroups(store, (tx, limit) => removeTransactions(tx, oldTransactions, limit));
  const payments = await removeInGroups(store, (tx, limit) => removePayments(tx, old, limit));
  log.debug("cleaned_up", { refusals, days, transactions, payments });
}

async function removeTransactions({ db, tables }: Tx, before: number, limit: number): Promise<number> {
  const { facilitatorTransactions: t, facilitatorTransactionPayments: part } = tables;
  const isOld = and(lt(t.created_at, before), eq(t.open, false));
  const old = db.select({ hash: t.hash }).from(t).where(isOld).limit(limit);
  const rows = await db.delete(t).where(inArray(t.hash, old)).returning({ hash: t.hash });
  const hashes = rows.map(({ hash }) => hash);
  if (hashes.length > 0) await db.delete(part).where(oneOf(part.hash, hashes));
  return rows.length;
}

/** A failed payment that is still valid stays: without its record it could be collected, although its caller was told otherwise. */
function removePayments(tx: Tx, before: number, limit: number): Promise<number> {
  const { facilitatorPayments: t } = tx.tables;
  const seconds = String(Math.floor(before / 1000));
  const isOver = sql`(length(${t.valid_before}) < ${seconds.length} or (length(${t.valid_before}) = ${seconds.length} and ${t.valid_before} < ${seconds}))`;
  const isOld = and(lt(t.ended_at, before), isOver);
  return deleteSome(tx, t, [t.chain_id, t.token, t.payer, t.nonce], isOld, limit);
}
