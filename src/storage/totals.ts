// Exact totals: for each tenant's history, how many calls have ended by each value of each filter; and for its catalog. Open calls
// have no totals and are counted by a query: a total would change three times for each call, which cost an accept of one of a
// thousand tenants 10 of 31 µs on SQLite (measured).
import { and, eq, gt, inArray, lte, or, sql } from "drizzle-orm";
import type { CountDimension } from "../../db/schema.ts";
import { bindAll, prepared, type Reader, type Store, type Tx } from "./store.ts";

/**
 * How many rows a total has on Postgres for the ends of calls, in addition to shard 0 for all other writes. A row is locked
 * until the commit, and with this many two transactions rarely meet in one.
 */
const SHARDS = 32;

/** A random shard, one for all additions of a statement. */
export const ANY_SHARD = `(select 1 + floor(random() * ${SHARDS})::bigint)`;

export interface Count {
  readonly tenant: string;
  readonly dimension: CountDimension;
  readonly value: string;
  readonly delta: number;
}

/** Additions by tenant, dimension and value. Nested, since joining keys would cost too much on this hot path. */
export type Counts = Map<string, Map<CountDimension, Map<string, number>>>;

export function addCount(counts: Counts, tenant: string, dimension: CountDimension, value: string, delta: number) {
  const dimensions = counts.getOrInsertComputed(tenant, () => new Map());
  const values = dimensions.getOrInsertComputed(dimension, () => new Map());
  values.set(value, (values.get(value) ?? 0) + delta);
}

/** The additions to write, always in one order, so that two transactions never deadlock. */
export function changedCounts(counts: Counts): Count[] {
  const changed: Count[] = [];
  for (const [tenant, dimensions] of sorted(counts)) {
    for (const [dimension, values] of sorted(dimensions)) {
      for (const [value, delta] of sorted(values)) if (delta !== 0) changed.push({ tenant, dimension, value, delta });
    }
  }
  return changed;
}

/** Entries by key. Sorting without a comparison function takes 1 ms for 8,192 models instead of 14 (measured). */
function* sorted<K extends string, V>(map: ReadonlyMap<K, V>): Generator<[K, V]> {
  for (const key of [...map.keys()].sort()) {
    const value = map.get(key);
    if (value !== undefined) yield [key, value];
  }
}

const ended = prepared(({ db, tables: { invocationCounts: c } }: Reader) => {
  const { tenant, dimension, value } = bindAll(c, ["tenant", "dimension", "value"]);
  const total = sql`coalesce(sum(${c.count}), 0)`.mapWith(Number);
  const isTotal = and(eq(c.tenant, tenant), eq(c.dimension, dimension), eq(c.value, value));
  return db.select({ total }).from(c).where(isTotal);
});

/** How many calls have ended, as committed: a write does not see its own additions. */
export async function endedTotal(reader: Reader, tenant: string, dimension: CountDimension, value: string) {
  const [row] = await ended(reader).execute({ tenant, dimension, value });
  return row?.total ?? 0;
}

type Total = Omit<Count, "delta">;

/** Totals that one write folds. If each is another tenant's, 200 held the event loop for 80 to 130 ms on SQLite (measured). */
const TOTALS_AT_ONCE = 40;
/** Totals that one query reads, in 2 ms on SQLite. A tenant may have named any number of models. */
const READ_AT_ONCE = 1_000;

/** Folds the shards of each total into one row, and removes totals that are zero; page by page over all of them. */
export async function joinTotals({ read, write }: Store): Promise<void> {
  const { invocationCounts: t } = read.tables;
  for (let last: Total | undefined, isMore = true; isMore; ) {
    const isNext =
      last && sql`(${t.tenant}, ${t.dimension}, ${t.value}) > (${last.tenant}, ${last.dimension}, ${last.value})`;
    const totals = await read.db
      .select({
        tenant: t.tenant,
        dimension: t.dimension,
        value: t.value,
        isApart: sql`max(${t.shard}) > 0 or min(abs(${t.count})) = 0`.mapWith(Boolean),
      })
      .from(t)
      .where(isNext)
      .groupBy(t.tenant, t.dimension, t.value)
      .orderBy(t.tenant, t.dimension, t.value)
      .limit(READ_AT_ONCE);
    const apart = totals.filter((row) => row.isApart);
    for (let first = 0; first < apart.length; first += TOTALS_AT_ONCE) {
      await write((tx) => joinSome(tx, apart.slice(first, first + TOTALS_AT_ONCE)));
    }
    last = totals.at(-1);
    isMore = totals.length === READ_AT_ONCE;
    // A pause, so that other work goes on.
    if (isMore) await Bun.sleep(4);
  }
}

async function joinSome(tx: Tx, totals: readonly Total[]): Promise<void> {
  const { invocationCounts: t } = tx.tables;
  for (const { tenant, dimension, value } of totals) {
    const isTotal = and(eq(t.tenant, tenant), eq(t.dimension, dimension), eq(t.value, value));
    const isApart = and(isTotal, or(gt(t.shard, 0), eq(t.count, 0)));
    // The counts at the time of deletion, since other transactions may have added to them.
    const rows = await tx.db.delete(t).where(isApart).returning({ count: t.count });
    const delta = rows.reduce((sum, { count }) => sum + count, 0);
    tx.count(tenant, dimension, value, delta);
  }
}

/**
 * Adds to totals of a tenant's catalog, and returns the new totals, which include earlier writes of the same group (totals of
 * the history don't). So a quota holds under concurrency, on all replicas. On Postgres the row of a total is locked until its
 * transaction ends, so a write adds to totals last of all. Callers choose the tags that name lists, so zero totals are removed.
 */
export async function addToTotals(tx: Tx, tenant: string, deltas: ReadonlyMap<string, number>) {
  const { catalogTotals: t } = tx.tables;
  // Always in one order, so that two transactions never deadlock.
  const changed = [...deltas].sort(([a], [b]) => (a < b ? -1 : 1));
  if (changed.length === 0) return new Map();
  const totals = await tx.db
    .insert(t)
    .values(changed.map(([list, count]) => ({ tenant, list, count })))
    .onConflictDoUpdate({ target: [t.tenant, t.list], set: { count: sql`${t.count} + excluded.count` } })
    .returning({ list: t.list, count: t.count });
  const empty = totals.flatMap(({ list, count }) => (count <= 0 ? [list] : []));
  if (empty.length > 0) await tx.db.delete(t).where(and(eq(t.tenant, tenant), inArray(t.list, empty), lte(t.count, 0)));
  return new Map(totals.map(({ list, count }) => [list, count]));
}

/** A total of a tenant's catalog, as committed. */
export async function totalOf(reader: Reader, tenant: string, list: string): Promise<number> {
  const { catalogTotals: t } = reader.tables;
  const isTotal = and(eq(t.tenant, tenant), eq(t.list, list));
  const [row] = await reader.db.select({ count: t.count }).from(t).where(isTotal);
  return row?.count ?? 0;
}
