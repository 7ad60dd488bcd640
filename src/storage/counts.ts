// The exact totals of history pages: how the additions of works are merged before they are written, and how a total is
// read. A total is the sum of its rows: one for each hour whose calls it counts, so that calls are dropped together with their
// part of it, and in that hour one for each shard. Clean-up makes one row of those of many hours (total-periods.ts).
import { and, eq, inArray, sql } from "drizzle-orm";
import type { CountDimension } from "../../db/schema.ts";
import { idTime } from "../core/id.ts";
import { HOUR_MS } from "../core/time.ts";
import type { LoggedTotals } from "./sqlite-totals.ts";
import { bind, prepared, type Reader } from "./store.ts";

/** Postgres spreads the additions to one total over this many rows, and over more of them only when so many write at once. */
const COUNT_SHARDS = 16;
const SHARDS_MAX = 64;
/** Of the locks on shards, among others that somebody may have in the database: any number. */
const SHARD_LOCKS = 1_952_541_795;

export const anyShard = (): number => Math.floor(Math.random() * COUNT_SHARDS);

/**
 * At the beginning of a transaction: has it a shard to itself, for all of its additions? Its statements lock totals of many
 * tenants in no common order, so two transactions on one shard would come to wait for each other until the server undoes
 * one of them after a second. Three replicas did so once a second: 2,300 works in 8 s instead of 13,000 (measured). It costs
 * a transaction 6 µs of the server and 4 of this process.
 */
export const takeShard = (shard: number): string =>
  `select pg_try_advisory_xact_lock(${SHARD_LOCKS}, ${shard}) as is_taken`;

/** When another has that one. Of none at all any will do. */
export const TAKE_FREE_SHARD = `select shard from generate_series(0, ${SHARDS_MAX - 1}) as shard
  where pg_try_advisory_xact_lock(${SHARD_LOCKS}, shard) limit 1`;

/** The hour, since the epoch, in which a call with this ID was accepted. A call is counted under it until it is removed. */
export const periodOf = (id: string): number => Math.floor(idTime(id) / HOUR_MS);

export interface Count {
  readonly tenant: string;
  readonly period: number;
  readonly dimension: CountDimension;
  readonly value: string;
  readonly delta: number;
}

/** Additions by period, tenant, dimension and value, which are looked up and never joined, for this is a hot path. */
export type Counts = Map<number, Map<string, Map<CountDimension, Map<string, number>>>>;

/** Adds one count to the others. */
export function addCount(
  counts: Counts,
  tenant: string,
  period: number,
  dimension: CountDimension,
  value: string,
  delta: number,
): void {
  const values = at(at(at(counts, period), tenant), dimension);
  values.set(value, (values.get(value) ?? 0) + delta);
}

/** Adds counts to the others, and forgets those that come to nothing. */
export function addCounts(counts: Counts, added: Counts): void {
  for (const [period, tenants] of added) {
    for (const [tenant, dimensions] of tenants) {
      const own = at(at(counts, period), tenant);
      for (const [dimension, values] of dimensions) addDeltas(own, dimension, values);
      if (own.size === 0) counts.get(period)?.delete(tenant);
    }
    if (counts.get(period)?.size === 0) counts.delete(period);
  }
}

function addDeltas<D>(dimensions: Map<D, Map<string, number>>, dimension: D, added: ReadonlyMap<string, number>): void {
  const values = at(dimensions, dimension);
  for (const [value, delta] of added) {
    const sum = (values.get(value) ?? 0) + delta;
    if (sum === 0) values.delete(value);
    else values.set(value, sum);
  }
  if (values.size === 0) dimensions.delete(dimension);
}

/** The map under a key, made if it is missing. */
function at<K, V extends Map<unknown, unknown>>(map: Map<K, V>, key: K): V {
  const known = map.get(key);
  if (known !== undefined) return known;
  const made = new Map() as V;
  map.set(key, made);
  return made;
}

/** What has to be written, always in the same order, so that two transactions never wait for each other. */
export const changedCounts = (counts: Counts): Count[] => [...inOrder(counts)];

/** The same one by one: what lies behind is put in order when it is asked for. What has been given may be taken away. */
export function* inOrder(counts: Counts): Generator<Count, undefined> {
  for (const [period, tenants] of sorted(counts)) {
    for (const [tenant, dimensions] of sorted(tenants)) {
      for (const [dimension, values] of sorted(dimensions)) {
        for (const [value, delta] of sorted(values)) {
          if (delta !== 0) yield { tenant, period, dimension, value, delta };
        }
      }
    }
  }
}

/** Without a function that compares, 8,192 models take 1 ms instead of 14 (measured). */
function* sorted<K extends string | number, V>(map: ReadonlyMap<K, V>): Generator<[K, V]> {
  for (const key of [...map.keys()].sort()) {
    const value = map.get(key);
    if (value !== undefined) yield [key, value];
  }
}

/** The rows that one total is the sum of. */
const ofOneTotal = (c: Reader["tables"]["invocationCounts"]) =>
  and(
    eq(c.tenant, bind(c.tenant, "tenant")),
    eq(c.dimension, bind(c.dimension, "dimension")),
    eq(c.value, bind(c.value, "value")),
  );

const total = prepared(({ db, tables: { invocationCounts: c } }: Reader) =>
  db
    .select({ total: sql`coalesce(sum(${c.count}), 0)`.mapWith(Number) })
    .from(c)
    .where(ofOneTotal(c)),
);

/** The total as committed: a work does not see the additions of its own. */
export async function counted(
  reader: Reader,
  tenant: string,
  dimension: CountDimension,
  value: string,
): Promise<number> {
  const rows = () => total(reader).execute({ tenant, dimension, value });
  return totalOf(reader, rows, ({ of }) => of(tenant, dimension, value));
}

const reach = prepared(({ db, tables: { invocationCounts: c } }: Reader) => {
  const periods = db
    .select({
      period: c.period,
      count: sql`sum(${c.count})`.as("period_count"),
      reached: sql`sum(sum(${c.count})) over (order by ${c.period} desc)`.as("reached"),
    })
    .from(c)
    .where(ofOneTotal(c))
    .groupBy(c.period)
    .as("periods");
  const isEnough = sql`${periods.reached} >= ${sql.placeholder("wanted")}`;
  return db
    .select({
      total: sql`coalesce(sum(${periods.count}), 0)`.mapWith(Number),
      period: sql`coalesce(max(case when ${isEnough} then ${periods.period} end), 0)`.mapWith(Number),
    })
    .from(periods);
});

/** The total, and the hour since the epoch from which on there are as many calls as wanted; 0 when there never are. */
export async function countedWithReach(
  reader: Reader,
  tenant: string,
  [dimension, value]: readonly [CountDimension, string],
  wanted: number,
): Promise<{ readonly total: number; readonly period: number }> {
  // Where totals are kept apart, the history is in one piece, and it is no matter how far back a page begins.
  if (reader.logged !== undefined) return { total: await counted(reader, tenant, dimension, value), period: 0 };
  const [row] = await reach(reader).execute({ tenant, dimension, value, wanted });
  return row ?? { total: 0, period: 0 };
}

const OPEN = ["pending", "running"];

const openTotal = prepared(({ db, tables: { invocationCounts: c } }: Reader) =>
  db
    .select({ total: sql`coalesce(sum(${c.count}), 0)`.mapWith(Number) })
    .from(c)
    .where(and(eq(c.tenant, bind(c.tenant, "tenant")), eq(c.dimension, "status"), inArray(c.value, OPEN))),
);

/** How many calls of a tenant have not ended. */
export async function openCalls(reader: Reader, tenant: string): Promise<number> {
  const rows = () => openTotal(reader).execute({ tenant });
  return totalOf(reader, rows, ({ of }) => OPEN.reduce((sum, status) => sum + of(tenant, "status", status), 0));
}

/** What stands in the table, and what is to be added to it. Between the two looks nothing may move from one to the other. */
async function totalOf(
  { logged }: Reader,
  inTable: () => PromiseLike<{ total: number }[]>,
  inLog: (logged: LoggedTotals) => number,
): Promise<number> {
  for (;;) {
    const version = logged?.version();
    const [row] = await inTable();
    if (version === logged?.version()) return (row?.total ?? 0) + (logged === undefined ? 0 : inLog(logged));
  }
}
