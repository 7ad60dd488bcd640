// Clean-up by age: refusals, the ceilings of days long past, signed transactions whose nonce is used for certain, and payments
// that can't be collected any more, on the chain either, and that nobody asks for after so long. Rows are removed in small
// groups, each its own write, so that settlements pass between them.
import { and, eq, inArray, lt, sql } from "drizzle-orm";
import { oneOf } from "../../../db/schema.ts";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { DAY_MS } from "../../core/time.ts";
import { removeInGroups } from "../../storage/cleanup.ts";
import type { Store, Tx } from "../../storage/store.ts";
import { utcDay } from "./guardrails.ts";

/** Of refusals; of payments since their end, and since the end of their time. */
const RECORD_DAYS = 90;
/** Far longer than any reorganisation, after which a transaction would be needed again. */
const TRANSACTION_DAYS = 7;
const CEILING_DAYS = 35;

export async function cleanUpFacilitator(store: Store, clock: Clock, log: Log): Promise<void> {
  const now = clock.now();
  const old = now - RECORD_DAYS * DAY_MS;
  const oldDays = utcDay(now - CEILING_DAYS * DAY_MS);
  const refusals = await removeInGroups(store, (tx, limit) => removeRefusals(tx, old, limit));
  const days = await removeInGroups(store, (tx, limit) => removeDays(tx, oldDays, limit));
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

/** A failed one that is still valid could be collected if its record were gone, and its caller was told that it can't. */
async function removePayments({ db, tables: { facilitatorPayments: t } }: Tx, before: number, limit: number) {
  const { chain_id, token, payer, nonce } = t;
  const seconds = String(Math.floor(before / 1000));
  const isOver = sql`(length(${t.valid_before}) < ${seconds.length} or (length(${t.valid_before}) = ${seconds.length} and ${t.valid_before} < ${seconds}))`;
  const isOld = and(lt(t.ended_at, before), isOver);
  const old = db.select({ chain_id, token, payer, nonce }).from(t).where(isOld).limit(limit);
  const isAmong = inArray(sql`(${chain_id}, ${token}, ${payer}, ${nonce})`, old);
  return (await db.delete(t).where(isAmong).returning({ nonce })).length;
}

async function removeRefusals({ db, tables: { facilitatorRefusals: t } }: Tx, before: number, limit: number) {
  const { account, payer, nonce } = t;
  const old = db.select({ account, payer, nonce }).from(t).where(lt(t.updated_at, before)).limit(limit);
  const isAmong = inArray(sql`(${account}, ${payer}, ${nonce})`, old);
  return (await db.delete(t).where(isAmong).returning({ nonce })).length;
}

/** An open payment of such a day has no ceiling left to give its share back to, which harms nobody. */
async function removeDays({ db, tables: { facilitatorDays: t } }: Tx, before: string, limit: number) {
  const { account, day } = t;
  const old = db.select({ account, day }).from(t).where(lt(day, before)).limit(limit);
  const isAmong = inArray(sql`(${account}, ${day})`, old);
  return (await db.delete(t).where(isAmong).returning({ day })).length;
}
