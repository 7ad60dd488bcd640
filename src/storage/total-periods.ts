// Brings totals together. They are written under the hour of their calls, so that each piece of the history has its own
// part of them; read, they are summed up. So the hours of a piece become one row, under its first hour, when hardly anything
// changes in them any more. A row that has come down to zero says nothing.
import { and, eq, gt, gte, inArray, lt, or, type SQL, sql } from "drizzle-orm";
import type { Clock } from "../core/clock.ts";
import { HOUR_MS } from "../core/time.ts";
import type { Count } from "./counts.ts";
import type { Store, Tx } from "./store.ts";

const ROWS_AT_ONCE = 500;
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
  }
}

interface Piece {
  readonly from: number;
  readonly to: number;
}

async function joinSome(tx: Tx, { from, to }: Piece): Promise<number> {
  const { invocationCounts: t } = tx.tables;
  const isApart = or(gt(t.period, from), gt(t.shard, 0), eq(t.count, 0));
  const rows = await removeRows(tx, and(gte(t.period, from), lt(t.period, to), isApart));
  const sums = new Map<string, Omit<Count, "delta"> & { count: number }>();
  for (const { tenant, dimension, value, count } of rows) {
    const key = JSON.stringify([tenant, dimension, value]);
    const sum = sums.get(key) ?? { tenant, dimension, value, period: from, count: 0 };
    sum.count += count;
    sums.set(key, sum);
  }
  const changed = [...sums].sort(([a], [b]) => (a < b ? -1 : 1)).flatMap(([, sum]) => (sum.count === 0 ? [] : [sum]));
  if (changed.length > 0) {
    await tx.db
      .insert(t)
      .values(changed.map((sum) => ({ ...sum, shard: 0 })))
      .onConflictDoUpdate({
        target: [t.tenant, t.dimension, t.value, t.period, t.shard],
        set: { count: sql`${t.count} + excluded.count` },
      });
  }
  return rows.length;
}

/** Some of these rows: what they counted when they were removed. */
async function removeRows({ db, tables: { invocationCounts: t } }: Tx, condition: SQL | undefined) {
  const place = sql`(${t.tenant}, ${t.dimension}, ${t.value}, ${t.period}, ${t.shard})`;
  const some = db
    .select({ tenant: t.tenant, dimension: t.dimension, value: t.value, period: t.period, shard: t.shard })
    .from(t)
    .where(condition)
    .orderBy(t.period)
    .limit(ROWS_AT_ONCE);
  return await db
    .delete(t)
    .where(inArray(place, some))
    .returning({ tenant: t.tenant, dimension: t.dimension, value: t.value, count: t.count });
}
