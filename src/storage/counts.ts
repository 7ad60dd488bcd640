// The exact totals of history pages: how the additions of works merge before they are written, and how a
// total is read. A total is the sum of its shards; a row that has come down to zero stays, since the usual
// ones (status pending, running) would only be deleted and inserted again.
import { and, eq, sql } from "drizzle-orm";
import type { CountDimension } from "../../db/schema.ts";
import { bind, prepared, type Reader } from "./store.ts";

/** Postgres spreads the additions to one total over this many rows. */
export const COUNT_SHARDS = 16;

export interface Count {
  readonly tenant: string;
  readonly dimension: CountDimension;
  readonly value: string;
  readonly delta: number;
}

export type Counts = Map<string, Count>;

/** Adds one count to the others. The key leaves no two totals alike, whatever characters a tenant holds. */
export function addCount(counts: Counts, count: Count): void {
  const key = `${count.tenant.length} ${count.tenant} ${count.dimension} ${count.value}`;
  const known = counts.get(key);
  counts.set(key, known === undefined ? count : { ...known, delta: known.delta + count.delta });
}

/** What has to be written, always in the same order, so that two transactions never wait for each other. */
export function changedCounts(counts: Counts): Count[] {
  return [...counts]
    .filter(([, count]) => count.delta !== 0)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([, count]) => count);
}

const total = prepared(({ db, tables: { invocationCounts: c } }: Reader) =>
  db
    .select({ total: sql`coalesce(sum(${c.count}), 0)`.mapWith(Number) })
    .from(c)
    .where(
      and(
        eq(c.tenant, bind(c.tenant, "tenant")),
        eq(c.dimension, bind(c.dimension, "dimension")),
        eq(c.value, bind(c.value, "value")),
      ),
    ),
);

/** The total as committed: a work does not see the additions of its own. */
export async function counted(
  reader: Reader,
  tenant: string,
  dimension: CountDimension,
  value: string,
): Promise<number> {
  const [row] = await total(reader).execute({ tenant, dimension, value });
  return row?.total ?? 0;
}
