// Brings totals together. They are written under the hour of their calls, so that each piece of the history has its own
// part of them; read, they are summed up. So the hours of a piece become one row, under its first hour, when hardly anything
// changes in them any more. A row that has come down to zero says nothing.
import { and, eq, gt, lt, or, type SQL, sql } from "drizzle-orm";
import { type CountDimension, oneOf } from "../../db/schema.ts";
import type { Clock } from "../core/clock.ts";
import { HOUR_MS } from "../core/time.ts";
import type { Store, Tx } from "./store.ts";

/** Each may be of another tenant: 200 then held the event loop for 80 to 130 ms on SQLite (measured). */
const ROWS_AT_ONCE = 40;
/** Values that are looked at in one go: to read them takes 2 ms on SQLite. A tenant may have named any number of models. */
const LOOKED_AT_ONCE = 1_000;
const PAUSE_MS = 4;
/** Most calls have ended by then. Those that have not add rows, which are brought together the next time. */
const QUIET_HOURS = 2;

/** Whoever moves totals from one period to another holds this lock. */
export const TOTALS_LOCK = "totals:periods";

/** @param starts of the pieces, in hours since the epoch */
export async function joinTotals(store: Store, clock: Clock, starts: readonly number[]): Promise<void> {
  await store.settle();
  const quiet = Math.floor(clock.now() / HOUR_MS) - QUIET_HOURS;
  for (const [place, from] of starts.entries()) {
    const to = Math.min(starts[place + 1] ?? quiet, quiet);
    if (to <= from) return;
    let moved = ROWS_AT_ONCE;
    while (moved === ROWS_AT_ONCE) {
      moved = await store.write(async (tx) => {
        await tx.lock(TOTALS_LOCK);
        return joinSome(tx, { from, to });
      });
    }
    await joinFirst(store, from);
  }
}

interface Piece {
  readonly from: number;
  readonly to: number;
}

/** Gives how many rows it has found behind the first hour, of at most as many as it looks for. */
async function joinSome(tx: Tx, { from, to }: Piece): Promise<number> {
  const { invocationCounts: t } = tx.tables;
  const isBehind = and(gt(t.period, from), lt(t.period, to));
  const some = await tx.db
    .select({ tenant: t.tenant, dimension: t.dimension, value: t.value })
    .from(t)
    .where(isBehind)
    .orderBy(t.period)
    .limit(ROWS_AT_ONCE);
  await joinTotalsOf(tx, some, from, isBehind);
  return some.length;
}

type Total = Pick<Values, "tenant" | "dimension"> & { readonly value: string };

/** Joins the rows of the first hour itself, and removes those that say nothing. Step by step along all of them. */
async function joinFirst(store: Store, from: number): Promise<void> {
  const { db, tables } = store.read;
  const { invocationCounts: t } = tables;
  const isApart = (own: Tx["tables"]["invocationCounts"]) =>
    and(eq(own.period, from), or(gt(own.shard, 0), eq(own.count, 0)));
  for (let last: Total | undefined, isMore = true; isMore; ) {
    const behind =
      last && sql`(${t.tenant}, ${t.dimension}, ${t.value}) > (${last.tenant}, ${last.dimension}, ${last.value})`;
    const looked = await db
      .select({
        tenant: t.tenant,
        dimension: t.dimension,
        value: t.value,
        isApart: sql`max(${t.shard}) > 0 or min(abs(${t.count})) = 0`.mapWith(Boolean),
      })
      .from(t)
      .where(and(eq(t.period, from), behind))
      .groupBy(t.tenant, t.dimension, t.value)
      .orderBy(t.tenant, t.dimension, t.value)
      .limit(LOOKED_AT_ONCE);
    const apart = looked.filter((row) => row.isApart);
    for (let at = 0; at < apart.length; at += ROWS_AT_ONCE) {
      await store.write(async (tx) => {
        await tx.lock(TOTALS_LOCK);
        await joinTotalsOf(tx, apart.slice(at, at + ROWS_AT_ONCE), from, isApart(tx.tables.invocationCounts));
      });
    }
    last = looked.at(-1);
    isMore = looked.length === LOOKED_AT_ONCE;
    // Others go on meanwhile.
    if (isMore) await Bun.sleep(PAUSE_MS);
  }
}

async function joinTotalsOf(tx: Tx, totals: readonly Total[], from: number, isApart: SQL | undefined): Promise<void> {
  for (const [tenant, own] of Map.groupBy(totals, (row) => row.tenant)) {
    for (const [dimension, rows] of Map.groupBy(own, (row) => row.dimension)) {
      const values = [...new Set(rows.map(({ value }) => value))];
      await joinValues(tx, { tenant, dimension, values, from }, isApart);
    }
  }
}

interface Values {
  readonly tenant: string;
  readonly dimension: CountDimension;
  readonly values: readonly string[];
  readonly from: number;
}

/** All rows of these values at once, along the primary key. */
async function joinValues(
  tx: Tx,
  { tenant, dimension, values, from }: Values,
  isApart: SQL | undefined,
): Promise<void> {
  const { invocationCounts: t } = tx.tables;
  const rows = await tx.db
    .delete(t)
    .where(and(eq(t.tenant, tenant), eq(t.dimension, dimension), oneOf(t.value, values), isApart))
    // As they are when they go: others may have added to them since they were found.
    .returning({ value: t.value, count: t.count });
  const sums = new Map<string, number>();
  for (const { value, count } of rows) sums.set(value, (sums.get(value) ?? 0) + count);
  const changed = [...sums].filter(([, count]) => count !== 0).sort(([a], [b]) => (a < b ? -1 : 1));
  if (changed.length === 0) return;
  await tx.db
    .insert(t)
    .values(changed.map(([value, count]) => ({ tenant, dimension, value, period: from, shard: 0, count })))
    .onConflictDoUpdate({
      target: [t.tenant, t.dimension, t.value, t.period, t.shard],
      set: { count: sql`${t.count} + excluded.count` },
    });
}
