// The payments that are under way, for those who resume or count them.
import { and, asc, count, eq } from "drizzle-orm";
import type { Reader } from "../../storage/store.ts";
import { isOpen } from "./held-funds.ts";
import type { FacilitatorPayment } from "./payments.ts";

/** Claims for which nothing was ever broadcast, the oldest first. */
export function claimedWithoutTransaction(reader: Reader, limit: number): Promise<FacilitatorPayment[]> {
  const { facilitatorPayments: t } = reader.tables;
  return reader.db
    .select()
    .from(t)
    .where(and(isOpen(t), eq(t.status, "claimed")))
    .orderBy(asc(t.created_at))
    .limit(limit)
    .execute();
}

/** The number of open payments of each account that has any, in one walk along their index. */
export async function openByAccount(reader: Reader): Promise<ReadonlyMap<string, number>> {
  const { facilitatorPayments: t } = reader.tables;
  const rows = await reader.db
    .select({ account: t.account, open: count() })
    .from(t)
    .where(isOpen(t))
    .groupBy(t.account);
  return new Map(rows.map(({ account, open }) => [account, Number(open)]));
}

/** Payments whose outcome is open: claimed and sent ones. */
export function openPayments(reader: Reader): Promise<FacilitatorPayment[]> {
  const { facilitatorPayments: t } = reader.tables;
  return reader.db.select().from(t).where(isOpen(t)).orderBy(asc(t.created_at)).execute();
}
