// How a page of the history is found. The open calls stand along the index of their tenant, the ended ones along that of one
// filter, newest first: said once for walks with the values of a request, and for prepared queries with names for them.
//
// Most pages need no walk: prepared queries find them. For the others the open calls and the ended ones are walked side by
// side in windows of a bounded number of entries, so that a page costs no more than the entries it passes. Other requests go on
// between two windows: SQLite answers on the event loop, and a long walk in one piece would hold up every tenant.
import { and, desc, eq, gte, is, isNotNull, lt, type Placeholder, type SQL, type SQLWrapper, sql } from "drizzle-orm";
import { SQLiteTable } from "drizzle-orm/sqlite-core";
import { type CountDimension, oneOf } from "../../../db/schema.ts";
import { inStoreTurns } from "../../kernel/turns.ts";
import { bind, prepared, type Reader } from "../../storage/store.ts";
import type { InvocationRow } from "./service.ts";

/** Entries of one step: about 5 ms of SQLite when it has to look at every row. */
const ENTRIES_MAX = 5_000;
/** Entries of one kind in the range of a step: so many there are when all of its open calls have ended since it was looked at. */
const STEP_MAX = 2 * ENTRIES_MAX;

/** Below and above every ID of an invocation. */
export const FIRST_ID = "inv_";
export const LAST_ID = "inv_~";

/** What is given when a query is run, or known before. */
type Given = string | Placeholder;

export type Filter = readonly [CountDimension, string];

/** Calls of a tenant, newest first. */
interface Calls {
  readonly tenant: Given;
  /** The filter whose index is walked; undefined for all calls. */
  readonly along: readonly [CountDimension, Given] | undefined;
  /** What else a call has to match. */
  readonly others: readonly Filter[];
}

/** IDs: from `floor` on, and below `below`. */
interface IdRange {
  readonly floor: Given;
  readonly below: Given;
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
function isOfEnded([dimension, value]: readonly [CountDimension, Given]): boolean {
  if (dimension === "error_class") return true;
  return dimension === "status" && typeof value === "string" && value !== "pending" && value !== "running";
}

function openColumn(t: Reader["tables"]["openInvocations"], dimension: CountDimension): SQLWrapper {
  return dimension === "error_class" ? sql`null` : t[COLUMNS[dimension]];
}

/**
 * Which ended calls those of a range are, and their order. The value of the filter stands in a comparison of rows and in the
 * order, where equality would do, so that only the filter's own index gives that order. A planner with a choice takes the
 * primary key for a tenant with few calls in its statistics, which are outdated for a new tenant, and then scans all its calls.
 */
function endedAlong(t: Reader["tables"]["endedInvocations"], { tenant, along }: Calls, range: IdRange) {
  const ofTenant = eq(t.tenant, tenant);
  if (along === undefined) {
    return { where: and(ofTenant, gte(t.id, range.floor), lt(t.id, range.below)), order: [desc(t.id)] };
  }
  const [dimension, value] = along;
  const column = t[COLUMNS[dimension]];
  const from = sql`(${column}, ${t.id}) >= (${value}, ${range.floor})`;
  const to = sql`(${column}, ${t.id}) < (${value}, ${range.below})`;
  return { where: and(ofTenant, from, to, isNotNull(column)), order: [desc(column), desc(t.id)] };
}

/** The IDs of the ended calls in a range, and which of them match. Without other filters nothing but the index is read. */
function endedIn({ db, tables: { endedInvocations: t } }: Reader, calls: Calls, range: IdRange) {
  const { where, order } = endedAlong(t, calls, range);
  const others = calls.others.map(([dimension, value]) => sql`${t[COLUMNS[dimension]]} = ${value}`);
  const matches = and(...others) ?? sql`true`;
  return db
    .select({ id: t.id, matches: matches.as("matches") })
    .from(t)
    .where(where)
    .orderBy(...order);
}

/** In the order of their index: on SQLite open calls stand in batches, which have the order of IDs too. */
function newestOpenFirst(t: Reader["tables"]["openInvocations"]): SQL[] {
  return [...(is(t, SQLiteTable) ? [sql`batch desc`] : []), desc(t.id)];
}

/**
 * The IDs of the open calls of the tenant in a range, and which of them match.
 *
 * @param which whether to leave out those that do not
 */
function openIn(
  { db, tables: { openInvocations: t } }: Reader,
  calls: Calls,
  range: IdRange,
  which: "all" | "matching" = "all",
) {
  const filters = calls.along === undefined ? calls.others : [calls.along, ...calls.others];
  // A walk that can find nothing is none.
  const isNone = filters.some(isOfEnded) ? sql`false` : undefined;
  const equal = filters.map(([dimension, value]) => sql`${openColumn(t, dimension)} = ${value}`);
  const matches = and(...equal) ?? sql`true`;
  const isWanted = which === "all" ? undefined : matches;
  return db
    .select({ id: t.id, matches: matches.as("matches") })
    .from(t)
    .where(and(eq(t.tenant, calls.tenant), gte(t.id, range.floor), lt(t.id, range.below), isNone, isWanted))
    .orderBy(...newestOpenFirst(t));
}

interface PlaceOf {
  readonly limit: number | Placeholder;
  readonly offset: number | Placeholder;
  /** `offset` and `limit` together. */
  readonly most: number | Placeholder;
}

/**
 * The IDs of the calls that match at a place among all that do, in one statement: each call is in one of the two at the moment
 * at which it is run. With other filters there are no more entries in the range than one step has, or had of open calls that
 * have ended since.
 */
function idsAt(reader: Reader, calls: Calls, range: IdRange, { limit, offset, most }: PlaceOf) {
  const some = (ids: ReturnType<typeof openIn> | ReturnType<typeof endedIn>, name: string) =>
    reader.db.select({ id: sql<string>`id` }).from(ids.limit(most).as(name));
  // Other filters beside the one that is walked along would make a planner walk along them, but for the limit.
  const passed = endedIn(reader, calls, range).limit(STEP_MAX).as("passed");
  const matching = reader.db
    .select({ id: passed.id, matches: passed.matches })
    .from(passed)
    .where(sql`${passed.matches}`);
  const ended = calls.others.length === 0 ? endedIn(reader, calls, range) : matching.orderBy(desc(passed.id));
  return some(openIn(reader, calls, range, "matching"), "open")
    .unionAll(some(ended as ReturnType<typeof endedIn>, "ended"))
    .orderBy(sql`1 desc`)
    .limit(limit)
    .offset(offset);
}

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

/** A range whose IDs are known before the query is built. */
interface WalkedRange extends IdRange {
  readonly floor: string;
  readonly below: string;
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
async function pass(reader: Reader, path: ScanPath, range: WalkedRange, most: Most): Promise<[Passed, Passed]> {
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
  readonly range: WalkedRange;
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
  // Open calls may have ended since.
  const [openWithin, endedWithin] = await pass(reader, path, range, { open: STEP_MAX, ended: STEP_MAX });
  return { range, open: openWithin, ended: endedWithin, isLast };
}

/** The order by ID makes every planner take the primary key. */
async function rowsOf(
  { db, tables: { invocations: t } }: Reader,
  tenant: string,
  calls: readonly { readonly id: string }[],
) {
  const ids = calls.map(({ id }) => id);
  const rows: InvocationRow[] = await db
    .select()
    .from(t)
    .where(and(eq(t.tenant, tenant), oneOf(t.id, ids)))
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
      const place = { limit: limit - rows.length, offset: skipped, most: skipped + limit - rows.length };
      const ids = await idsAt(reader, path, window.range, place);
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

/** The calls of a prepared query. */
const callsBy = (dimension: CountDimension) => ({
  tenant: sql.placeholder("tenant"),
  along: dimension === "all" ? undefined : ([dimension, sql.placeholder("value")] as const),
  others: [],
});
const ALL_IDS = { floor: FIRST_ID, below: LAST_ID };
const [LIMIT, OFFSET] = [sql.placeholder("limit"), sql.placeholder("offset")];

const newestEndedBy = byFilter(({ db, tables: { endedInvocations: t } }, dimension) => {
  const { where, order } = endedAlong(t, callsBy(dimension), ALL_IDS);
  return db
    .select()
    .from(t)
    .where(where)
    .orderBy(...order)
    .limit(LIMIT)
    .offset(OFFSET);
});

const newestOpenBy = byFilter((reader, dimension) =>
  openIn(reader, callsBy(dimension), ALL_IDS, "matching").limit(LIMIT),
);

const idsBy = byFilter((reader, dimension) =>
  idsAt(reader, callsBy(dimension), ALL_IDS, {
    limit: LIMIT,
    offset: OFFSET,
    most: sql.placeholder("most"),
  }),
);

const totalBy = byFilter((reader, dimension) => {
  const { invocationCounts: c } = reader.tables;
  const open = openIn(reader, callsBy(dimension), ALL_IDS).limit(sql.placeholder("most")).as("open");
  const counted = reader.db
    .select({
      entries: sql`count(*)`.mapWith(Number).as("entries"),
      matches: sql`count(*) filter (where ${open.matches})`.mapWith(Number).as("matching"),
      last: sql<string | null>`min(${open.id})`.as("last"),
    })
    .from(open)
    .as("counted");
  const ended = reader.db
    .select({ calls: sql`coalesce(sum(${c.count}), 0)`.mapWith(Number).as("calls") })
    .from(c)
    .where(
      and(
        eq(c.tenant, sql.placeholder("tenant")),
        eq(c.dimension, dimension),
        eq(c.value, dimension === "all" ? "" : bind(c.value, "value")),
      ),
    )
    .as("ended");
  return reader.db
    .select({ ended: ended.calls, entries: counted.entries, matches: counted.matches, last: counted.last })
    .from(counted)
    .innerJoin(ended, sql`true`);
});

export interface CallCount {
  readonly total: number;
  /** How many calls of the tenant are open, with or without the filter; no more than one step passes. */
  readonly open: number;
}

/**
 * How many calls of a tenant match a filter. Of most tenants by one statement, in which each call is open or has ended; many open
 * calls are walked along in steps.
 */
export async function matchingCalls(reader: Reader, tenant: string, filter: Filter): Promise<CallCount> {
  const [dimension, value] = filter;
  const path: ScanPath = {
    tenant,
    along: dimension === "all" ? undefined : filter,
    others: [],
    floor: FIRST_ID,
    ceiling: LAST_ID,
  };
  const most = isOfEnded(filter) ? 0 : ENTRIES_MAX;
  const [row] = await totalBy[dimension](reader).execute({ tenant, value, most });
  if (row === undefined) return { total: 0, open: 0 };
  let { matches: total, entries, last } = row;
  while (entries === ENTRIES_MAX && last !== null) {
    const range = { floor: FIRST_ID, below: last };
    const [open] = await inStoreTurns(tenant, () => pass(reader, path, range, { open: ENTRIES_MAX, ended: 0 }));
    total += open.matches;
    ({ entries, last } = open);
  }
  return { total: total + row.ended, open: row.entries };
}

/**
 * The newest calls of a tenant that match a filter, by prepared queries: what most pages are.
 *
 * @param openCount of the tenant, as `matchingCalls` gives it
 * @returns null for a place that has to be walked to: far behind, or where there are many open calls
 */
export async function newestCalls(
  reader: Reader,
  tenant: string,
  filter: Filter,
  { limit, offset }: PageRange,
  openCount: number,
): Promise<InvocationRow[] | null> {
  const [dimension, value] = filter;
  // To find those of a filter, all open calls may have to be passed.
  if (offset + limit > ENTRIES_MAX || (openCount === ENTRIES_MAX && dimension !== "all")) return null;
  const place = { tenant, value, limit, offset };
  if (openCount === 0) return newestEndedBy[dimension](reader).execute(place);
  if (offset > 0) {
    return rowsOf(reader, tenant, await idsBy[dimension](reader).execute({ ...place, most: offset + limit }));
  }
  // A call that ends between the two looks is found by both.
  const open = await newestOpenBy[dimension](reader).execute(place);
  const rows = new Map((await newestEndedBy[dimension](reader).execute(place)).map((row) => [row.id, row]));
  const newest = [...new Set([...open.map(({ id }) => id), ...rows.keys()])].sort((a, b) => (a < b ? 1 : -1));
  const onPage = newest.slice(0, limit);
  const missing = onPage.filter((id) => !rows.has(id)).map((id) => ({ id }));
  for (const row of missing.length === 0 ? [] : await rowsOf(reader, tenant, missing)) rows.set(row.id, row);
  return onPage.flatMap((id) => rows.get(id) ?? []);
}
