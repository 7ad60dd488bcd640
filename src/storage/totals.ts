// Exact totals of what a tenant keeps in its catalog. A write learns the new totals, with all works before it in its group
// included, which the totals of invocations (counts.ts) do not tell. So a quota holds under concurrency, on all replicas.
// On Postgres the row of a total is locked until its transaction ends, so a work adds to totals last of all.
import { and, eq, inArray, lte, sql } from "drizzle-orm";
import type { Reader, Tx } from "./store.ts";

/** Returns the new totals. One that comes to zero is removed: callers choose the tags that name lists. */
export async function addToTotals(
  tx: Tx,
  tenant: string,
  deltas: ReadonlyMap<string, number>,
): Promise<Map<string, number>> {
  const { catalogTotals: t } = tx.tables;
  // Always in the same order, so that two transactions never wait for each other.
  const changed = [...deltas].sort(([a], [b]) => (a < b ? -1 : 1));
  if (changed.length === 0) return new Map();
  const totals = await tx.db
    .insert(t)
    .values(changed.map(([list, count]) => ({ tenant, list, count })))
    .onConflictDoUpdate({ target: [t.tenant, t.list], set: { count: sql`${t.count} + excluded.count` } })
    .returning({ list: t.list, count: t.count });
  const empty = totals.flatMap(({ list, count }) => (count <= 0 ? [list] : []));
  if (empty.length > 0) {
    await tx.db.delete(t).where(and(eq(t.tenant, tenant), inArray(t.list, empty), lte(t.count, 0)));
  }
  return new Map(totals.map(({ list, count }) => [list, count]));
}

/** As committed. */
export async function totalOf(reader: Reader, tenant: string, list: string): Promise<number> {
  const { catalogTotals: t } = reader.tables;
  const [row] = await reader.db
    .select({ count: t.count })
    .from(t)
    .where(and(eq(t.tenant, tenant), eq(t.list, list)));
  return row?.count ?? 0;
}
