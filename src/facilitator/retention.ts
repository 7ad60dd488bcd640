// Clean-up by age of what only an operator looks at: refusals, and the ceilings of days long past. Payments stay, since a
// retry may come at any time. Rows are removed in small groups, each its own write, so that settlements pass between them.

import { inArray, lt, sql } from "drizzle-orm";
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { DAY_MS } from "../core/time.ts";
import { removeInGroups } from "../storage/batch-delete.ts";
import type { Store, Tx } from "../storage/store.ts";
import { utcDay } from "./payments/daily-limits.ts";

const REFUSAL_DAYS = 90;
const CEILING_DAYS = 35;

export async function cleanUpFacilitator(store: Store, clock: Clock, log: Log): Promise<void> {
  const now = clock.now();
  const oldRefusals = now - REFUSAL_DAYS * DAY_MS;
  const oldDays = utcDay(now - CEILING_DAYS * DAY_MS);
  const refusals = await removeInGroups(store, (tx, limit) => removeRefusals(tx, oldRefusals, limit));
  const days = await removeInGroups(store, (tx, limit) => removeDays(tx, oldDays, limit));
  log.debug("cleaned_up", { refusals, days });
}

async function removeRefusals(tx: Tx, before: number, limit: number): Promise<number> {
  const { facilitatorRefusals: t } = tx.tables;
  const key = sql`(${t.account}, ${t.payer}, ${t.nonce})`;
  const old = tx.db
    .select({ account: t.account, payer: t.payer, nonce: t.nonce })
    .from(t)
    .where(lt(t.updated_at, before))
    .limit(limit);
  const rows = await tx.db.delete(t).where(inArray(key, old)).returning({ nonce: t.nonce });
  return rows.length;
}

/** An open payment of such a day has no ceiling left to give its share back to, which harms nobody. */
async function removeDays(tx: Tx, before: string, limit: number): Promise<number> {
  const { facilitatorDays: t } = tx.tables;
  const key = sql`(${t.account}, ${t.day})`;
  const old = tx.db.select({ account: t.account, day: t.day }).from(t).where(lt(t.day, before)).limit(limit);
  const rows = await tx.db.delete(t).where(inArray(key, old)).returning({ day: t.day });
  return rows.length;
}
