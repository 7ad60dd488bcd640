// Exact totals: of a tenant's history, and of what it keeps in its catalog.
//
// A total of the history is the sum of its rows: one for each hour whose calls it counts, so that calls are dropped together
// with their part of it, and in that hour one for each shard. The additions of works are merged before they are written.
// Clean-up makes one row of those of many hours, so that each piece of the history keeps its own part.
import { and, eq, gt, inArray, lt, lte, or, type SQL, sql } from "drizzle-orm";
import { type CountDimension, oneOf } from "../../db/schema.ts";
import { idTime } from "../core/id.ts";
import type { Clock } from "../core/time.ts";
import { HOUR_MS } from "../core/time.ts";
import { bind, type LoggedTotals, prepared, type Reader, type Store, type Tx } from "./store.ts";

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

/** As `changedCounts`, one by one: what lies behind is put in order when it is asked for. What has been given may be removed. */
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
  return tableAndLog(reader, rows, ({ of }) => of(tenant, dimension, value));
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
  return tableAndLog(reader, rows, ({ of }) => OPEN.reduce((sum, status) => sum + of(tenant, "status", status), 0));
}

/** What stands in the table, and what is to be added to it. Between the two looks nothing may move from one to the other. */
async function tableAndLog(
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

/** Each may be of another tenant: 200 then held the event loop for 80 to 130 ms on SQLite (measured). */
const ROWS_AT_ONCE = 40;
/** Values that are looked at in one go: to read them takes 2 ms on SQLite. A tenant may have named any number of models. */
const LOOKED_AT_ONCE = 1_000;
/** Most calls have ended by then. Those that have not add rows, which are brought together the next time. */
const QUIET_HOURS = 2;

/** What moves totals from one period to another holds this lock. */
const TOTALS_LOCK = "totals:periods";

/**
 * Makes all hours one row, under the first, when hardly anything changes in them any more. A row that has come down to zero is
 * removed.
 */
export async function joinTotals(store: Store, clock: Clock): Promise<void> {
  await store.flushTotals();
  const [from, to] = [0, Math.floor(clock.now() / HOUR_MS) - QUIET_HOURS];
  let moved = ROWS_AT_ONCE;
  while (moved === ROWS_AT_ONCE) {
    moved = await store.write(async (tx) => {
      await tx.lock(TOTALS_LOCK);
      return joinSome(tx, { from, to });
    });
  }
  await joinFirst(store, from);
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
    if (isMore) await Bun.sleep(4);
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

/**
 * Adds to totals of a tenant's catalog, and gives the new ones, with all works before this one in its group included, which
 * the totals of the history do not tell. So a quota holds under concurrency, on all replicas. On Postgres the row of a total
 * is locked until its transaction ends, so a work adds to totals last of all. A total that comes to zero is removed, since
 * callers choose the tags that name lists.
 */
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

/** A total of a tenant's catalog, as committed. */
export async function totalOf(reader: Reader, tenant: string, list: string): Promise<number> {
  const { catalogTotals: t } = reader.tables;
  const [row] = await reader.db
    .select({ count: t.count })
    .from(t)
    .where(and(eq(t.tenant, tenant), eq(t.list, list)));
  return row?.count ?? 0;
}
