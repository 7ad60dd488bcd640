// In one file, since all of it is one question to two tables.
// How a page of the history is found: the open calls and the ended ones are walked side by side, newest first, in windows
// of a bounded number of entries, so that a page costs no more than the entries it passes. The ended ones are walked along
// one index, the open ones by ID. Other requests go on between two windows: SQLite answers on the event loop, and a long
// walk in one piece would hold up every tenant.
import { and, desc, eq, gte, inArray, is, isNotNull, lt, type SQL, type SQLWrapper, sql } from "drizzle-orm";
import { SQLiteTable } from "drizzle-orm/sqlite-core";
import type { CountDimension } from "../../../db/schema.ts";
import { inStoreTurns } from "../../concurrency/store-turns.ts";
import { openCalls } from "../../storage/counts.ts";
import { prepared, type Reader } from "../../storage/store.ts";
import type { InvocationRow } from "./service.ts";

/** Entries of one step: about 5 ms of SQLite when it has to look at every row. */
const ENTRIES_MAX = 5_000;

/** Below and above every ID of an invocation. */
export const FIRST_ID = "inv_";
export const LAST_ID = "inv_~";

export type Filter = readonly [CountDimension, string];

/** Calls of a tenant, newest first. */
export interface ScanPath {
  readonly tenant: string;
  /** The filter whose index is walked; undefined for all calls. */
  readonly along: Filter | undefined;
  /** What else a call has to match. */
  readonly others: readonly Filter[];
  /** IDs: from this one on, and below that one. */
  readonly floor: string;
  readonly ceiling: string;
}

export interface PageRange {
  readonly limit: number;
  readonly offset: number;
}

/** When the caller has gone, the scan ends at its next step. */
type ScanSignal = AbortSignal | undefined;

export interface ScannedPage {
  readonly rows: InvocationRow[];
  readonly total: number;
}

const COLUMNS = {
  all: "tenant",
  agent: "agent_id",
  status: "status",
  mode: "mode",
  error_class: "error_class",
  model: "model",
  settlement: "settlement_status",
} as const satisfies Record<CountDimension, keyof InvocationRow>;

/** Whether no open call can match: it has no error class yet, and no status of an end. */
function isOfEnded([dimension, value]: Filter): boolean {
  return dimension === "error_class" || (dimension === "status" && value !== "pending" && value !== "running");
}

function openColumn(t: Reader["tables"]["openInvocations"], dimension: CountDimension): SQLWrapper {
  return dimension === "error_class" ? sql`null` : t[COLUMNS[dimension]];
}

/** IDs: from `floor` on, and below `below`. */
interface IdRange {
  readonly floor: string;
  readonly below: string;
}

/**
 * The ended calls of a path in a range. The value of the filter stands in a comparison of rows and in the order, where
 * equality would do, so that only the filter's own index gives that order. A planner with a choice takes the primary
 * key for a tenant with few calls in its statistics, which are outdated for a new tenant, and then scans all its calls.
 */
function endedIn({ db, tables: { endedInvocations: t } }: Reader, path: ScanPath, { floor, below }: IdRange) {
  const ofTenant = eq(t.tenant, path.tenant);
  // Without other filters nothing but the index is read.
  const others = path.others.map(([dimension, value]) => sql`${t[COLUMNS[dimension]]} = ${value}`);
  const calls = db.select({ id: t.id, matches: (and(...others) ?? sql`true`).as("matches") }).from(t);
  if (path.along === undefined) {
    return calls.where(and(ofTenant, gte(t.id, floor), lt(t.id, below))).orderBy(desc(t.id));
  }
  const [dimension, value] = path.along;
  const column = t[COLUMNS[dimension]];
  const from = sql`(${column}, ${t.id}) >= (${value}, ${floor})`;
  const to = sql`(${column}, ${t.id}) < (${value}, ${below})`;
  return calls.where(and(ofTenant, from, to, isNotNull(column))).orderBy(desc(column), desc(t.id));
}

/** In the order of their index: on SQLite open calls stand in batches, which have the order of IDs too. */
function newestOpenFirst(t: Reader["tables"]["openInvocations"]): SQL[] {
  return [...(is(t, SQLiteTable) ? [sql`batch desc`] : []), desc(t.id)];
}

/** The open calls of the tenant in a range, and which of them match. */
function openIn({ db, tables: { openInvocations: t } }: Reader, path: ScanPath, { floor, below }: IdRange) {
  const filters = path.along === undefined ? path.others : [path.along, ...path.others];
  // A walk that can find nothing is none.
  const isNone = filters.some(isOfEnded) ? sql`false` : undefined;
  const matches = and(...filters.map(([dimension, value]) => sql`${openColumn(t, dimension)} = ${value}`));
  return db
    .select({ id: t.id, matches: (matches ?? sql`true`).as("matches") })
    .from(t)
    .where(and(eq(t.tenant, path.tenant), gte(t.id, floor), lt(t.id, below), isNone))
    .orderBy(...newestOpenFirst(t));
}

/** What was passed of one of the two. */
interface Passed {
  readonly entries: number;
  readonly matches: number;
  /** The ID of its last entry. */
  readonly last: string | null;
}

/** Entries of each that are passed at most. */
interface Most {
  readonly open: number;
  readonly ended: number;
}

/** Passes the next entries of both, in one statement: a call that ends just now is in one of them. */
async function pass(reader: Reader, path: ScanPath, range: IdRange, most: Most): Promise<[Passed, Passed]> {
  const summary = (calls: ReturnType<typeof openIn> | ReturnType<typeof endedIn>, name: string, entries: number) => {
    const passed = calls.limit(entries).as(`${name}_passed`);
    return reader.db
      .select({
        entries: sql`count(*)`.mapWith(Number).as(`${name}_entries`),
        matches: sql`count(*) filter (where ${passed.matches})`.mapWith(Number).as(`${name}_matches`),
        last: sql<string | null>`min(${passed.id})`.as(`${name}_last`),
      })
      .from(passed)
      .as(name);
  };
  const open = summary(openIn(reader, path, range), "open", most.open);
  const ended = summary(endedIn(reader, path, range), "ended", most.ended);
  const [row] = await reader.db
    .select({
      open: { entries: open.entries, matches: open.matches, last: open.last },
      ended: { entries: ended.entries, matches: ended.matches, last: ended.last },
    })
    .from(open)
    .innerJoin(ended, sql`true`);
  const nothing: Passed = { entries: 0, matches: 0, last: null };
  return [row?.open ?? nothing, row?.ended ?? nothing];
}

/** A part of a path in which all entries of both have been passed. */
interface Window {
  readonly range: IdRange;
  readonly open: Passed;
  readonly ended: Passed;
  /** Whether it reaches the end of the path. */
  readonly isLast: boolean;
}

async function windowBelow(reader: Reader, path: ScanPath, below: string, most: Most): Promise<Window> {
  const [open, ended] = await pass(reader, path, { floor: path.floor, below }, most);
  const depth = ({ entries, last }: Passed, limit: number) => (entries < limit ? null : last) ?? path.floor;
  const [openDepth, endedDepth] = [depth(open, most.open), depth(ended, most.ended)];
  const floor = [openDepth, endedDepth].sort().at(-1) ?? path.floor;
  const isLast = open.entries < most.open && ended.entries < most.ended;
  const range = { floor, below };
  const isBeyond = ({ last }: Passed) => last !== null && last < floor;
  if (!isBeyond(open) && !isBeyond(ended)) return { range, open, ended, isLast };
  const [openWithin, endedWithin] = await pass(reader, path, range, most);
  return { range, open: openWithin, ended: endedWithin, isLast };
}

/** IDs of matches of a window at a place, newest first. */
async function matchesAt(
  { db }: Reader,
  calls: ReturnType<typeof openIn> | ReturnType<typeof endedIn>,
  { limit, offset }: PageRange,
  isFiltered: boolean,
): Promise<string[]> {
  if (!isFiltered) return (await calls.limit(limit).offset(offset)).map(({ id }) => id);
  const passed = calls.limit(ENTRIES_MAX).as("passed");
  const rows = await db
    .select({ id: passed.id })
    .from(passed)
    .where(sql`${passed.matches}`)
    .orderBy(desc(passed.id))
    .limit(limit)
    .offset(offset);
  return rows.map(({ id }) => id);
}

/** The IDs at a place among all matches of a window. */
async function idsAt(
  reader: Reader,
  path: ScanPath,
  window: Window,
  { limit, offset }: PageRange,
  tries = 1,
): Promise<string[]> {
  const { range, open } = window;
  const before = { limit: open.matches, offset: 0 };
  const openNow = () => matchesAt(reader, openIn(reader, path, range), before, true);
  const openIds = open.matches === 0 ? [] : await openNow();
  // As many more of the ended ones as there may be open ones among them.
  const skipped = Math.max(offset - openIds.length, 0);
  const place = { limit: offset - skipped + limit, offset: skipped };
  const endedIds = await matchesAt(reader, endedIn(reader, path, range), place, path.others.length > 0);
  const isSteady = skipped === 0 || openIds.length === 0 || areAmong(openIds, await openNow());
  if (!isSteady && tries < TRIES_MAX) return idsAt(reader, path, window, { limit, offset }, tries + 1);
  const newestFirst = [...new Set([...openIds, ...endedIds])].sort((a, b) => (a < b ? 1 : -1));
  return newestFirst.slice(offset - skipped, offset - skipped + limit);
}

/** The order by ID makes every planner take the primary key. */
async function rowsOf({ db, tables: { invocations: t } }: Reader, tenant: string, ids: readonly string[]) {
  const rows: InvocationRow[] = await db
    .select()
    .from(t)
    .where(and(eq(t.tenant, tenant), inArray(t.id, [...ids])))
    .orderBy(desc(t.id));
  return rows;
}

interface PageWanted extends PageRange {
  /** Whether the rest of the path is to be counted as well. */
  readonly isCounted: boolean;
}

/** A page, and how many matches there are on the path as far as it was walked. */
export async function pageOf(
  reader: Reader,
  path: ScanPath,
  { limit, offset, isCounted }: PageWanted,
  callerSignal: ScanSignal,
): Promise<ScannedPage> {
  const rows: InvocationRow[] = [];
  let total = 0;
  let below: string | null = path.ceiling;

  /** Gives where the next window begins, if there is one. */
  async function passWindow(from: string): Promise<string | null> {
    // Without other filters every ended call on the path is a match, so it is known how many a page needs.
    const needed =
      isCounted || path.others.length > 0 ? ENTRIES_MAX : Math.max(offset - total, 0) + limit - rows.length;
    const most = { open: ENTRIES_MAX, ended: Math.min(needed, ENTRIES_MAX) };
    const window = await windowBelow(reader, path, from, most);
    const matches = window.open.matches + window.ended.matches;
    const skipped = Math.max(offset - total, 0);
    if (rows.length < limit && matches > skipped) {
      const ids = await idsAt(reader, path, window, { limit: limit - rows.length, offset: skipped });
      if (ids.length > 0) rows.push(...(await rowsOf(reader, path.tenant, ids)));
    }
    total += matches;
    return window.isLast || (!isCounted && rows.length >= limit) ? null : window.range.floor;
  }

  while (below !== null && callerSignal?.aborted !== true) {
    const from: string = below;
    below = await inStoreTurns(path.tenant, () => passWindow(from));
  }
  return { rows, total };
}

/** One prepared query for each of the filters. */
function byFilter<Q>(
  build: (handle: Reader, dimension: CountDimension) => { prepare(name?: string): Q },
): Record<CountDimension, (reader: Reader) => Q> {
  const of = (dimension: CountDimension) => prepared((handle: Reader) => build(handle, dimension));
  return {
    all: of("all"),
    agent: of("agent"),
    status: of("status"),
    mode: of("mode"),
    settlement: of("settlement"),
    error_class: of("error_class"),
    model: of("model"),
  };
}

const tenantParameter = sql.placeholder("tenant");
const valueParameter = sql.placeholder("value");
const floorParameter = sql.placeholder("floor");

const newestEndedBy = byFilter(({ db, tables: { endedInvocations: t } }, dimension) => {
  const page = (condition: SQL | undefined, ...order: SQL[]) =>
    db
      .select()
      .from(t)
      .where(and(eq(t.tenant, tenantParameter), condition))
      .orderBy(...order)
      .limit(sql.placeholder("limit"))
      .offset(sql.placeholder("offset"));
  // Postgres leaves out the partitions below the floor, and does so by this condition alone.
  const fromFloor = gte(t.id, floorParameter);
  if (dimension === "all") return page(and(fromFloor, lt(t.id, LAST_ID)), desc(t.id));
  const column = t[COLUMNS[dimension]];
  const from = sql`(${column}, ${t.id}) >= (${valueParameter}, ${floorParameter})`;
  const to = sql`(${column}, ${t.id}) < (${valueParameter}, ${LAST_ID})`;
  return page(and(fromFloor, from, to, isNotNull(column)), desc(column), desc(t.id));
});

const newestOpenBy = byFilter(({ db, tables: { openInvocations: t } }, dimension) =>
  db
    .select({ id: t.id })
    .from(t)
    .where(
      and(
        eq(t.tenant, tenantParameter),
        dimension === "all" ? undefined : sql`${openColumn(t, dimension)} = ${valueParameter}`,
      ),
    )
    .orderBy(...newestOpenFirst(t))
    .limit(sql.placeholder("limit")),
);

/** So often a page is read anew because calls have ended meanwhile. */
const TRIES_MAX = 8;

/**
 * Whether the calls that were open still are. One that has ended between the two looks is among the ended ones too, and
 * would be passed over twice on the way to a place behind it.
 */
function areAmong(openIds: readonly string[], now: readonly string[]): boolean {
  const still = new Set(now);
  return openIds.every((id) => still.has(id));
}

/** So many open calls are put among the ended ones without a walk. */
const OPEN_MAX = 200;

/**
 * The newest calls of a tenant that match a filter, by prepared queries: what most pages are.
 *
 * @param range `floor` is an ID below which no call of the page stands
 * @returns null for a place that has to be walked to: far behind, or where there are many open calls
 */
export async function newestCalls(
  reader: Reader,
  tenant: string,
  filter: Filter,
  { limit, offset, floor }: PageRange & { readonly floor: string },
  tries = 1,
): Promise<InvocationRow[] | null> {
  const [dimension, value] = filter;
  const openTotal = isOfEnded(filter) ? 0 : await openCalls(reader, tenant);
  if (offset + limit > ENTRIES_MAX || openTotal > ENTRIES_MAX) return null;
  // A call that ends between the two looks is found by both.
  const openNow = async () =>
    (await newestOpenBy[dimension](reader).execute({ tenant, value, limit: OPEN_MAX + 1 })).map(({ id }) => id);
  const openIds = isOfEnded(filter) ? [] : await openNow();
  if (openIds.length > OPEN_MAX) return null;
  const skipped = Math.max(offset - openIds.length, 0);
  const most = offset - skipped + limit;
  const ended = await newestEndedBy[dimension](reader).execute({ tenant, value, floor, limit: most, offset: skipped });
  const isSteady = skipped === 0 || openIds.length === 0 || areAmong(openIds, await openNow());
  if (!isSteady && tries < TRIES_MAX) return newestCalls(reader, tenant, filter, { limit, offset, floor }, tries + 1);
  const rows = new Map(ended.map((row) => [row.id, row]));
  const ids = [...new Set([...openIds, ...rows.keys()])].sort((a, b) => (a < b ? 1 : -1));
  const onPage = ids.slice(offset - skipped, offset - skipped + limit);
  const missing = onPage.filter((id) => !rows.has(id));
  const others = missing.length === 0 ? [] : await rowsOf(reader, tenant, missing);
  for (const row of others) rows.set(row.id, row);
  return onPage.flatMap((id) => rows.get(id) ?? []);
}
