// How a page of the history is found: along one index, newest first, in steps of a bounded number of entries, so
// that it costs no more than the entries it passes. Other requests go on between two steps: SQLite answers on the
// event loop, and a long walk in one piece would hold up every tenant.
import { and, desc, eq, gte, isNotNull, lt, type SQL, type SQLWrapper, sql } from "drizzle-orm";
import type { CountDimension } from "../../../db/schema.ts";
import { inStoreTurns } from "../../concurrency/store-turns.ts";
import type { Reader } from "../../storage/store.ts";
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

type FilteredColumns = Record<(typeof COLUMNS)[CountDimension], SQLWrapper>;

function holds(calls: FilteredColumns, [dimension, value]: Filter): SQL {
  return sql`${calls[COLUMNS[dimension]]} = ${value}`;
}

/**
 * The calls of a path below an ID. The value of the filter stands in a comparison of rows and in the order, where
 * equality would do, so that only the filter's own index gives that order. A planner with a choice takes the primary
 * key for a tenant with few calls in its statistics, which are outdated for a new tenant, and then scans all its calls.
 */
function callsBelow({ tables: { invocations: t } }: Reader, path: ScanPath, below: string) {
  const ofTenant = eq(t.tenant, path.tenant);
  if (path.along === undefined) return and(ofTenant, gte(t.id, path.floor), lt(t.id, below));
  const [dimension, value] = path.along;
  const column = t[COLUMNS[dimension]];
  return and(
    ofTenant,
    sql`(${column}, ${t.id}) >= (${value}, ${path.floor})`,
    sql`(${column}, ${t.id}) < (${value}, ${below})`,
    isNotNull(column),
  );
}

function newestFirst(calls: FilteredColumns & { id: SQLWrapper }, { along }: ScanPath): SQL[] {
  const byId = desc(calls.id);
  return along === undefined ? [byId] : [desc(calls[COLUMNS[along[0]]]), byId];
}

interface ScanStep {
  readonly entries: number;
  readonly matches: number;
  /** The ID of its last entry. */
  readonly last: string | null;
}

/** Passes the next entries. The limit inside keeps the other filters out of the choice of the index. */
async function step(reader: Reader, path: ScanPath, below: string, entries: number): Promise<ScanStep> {
  const { invocations: t } = reader.tables;
  // Without other filters nothing but the index is read.
  const matches = path.others.length === 0 ? sql`true` : and(...path.others.map((each) => holds(t, each)));
  const passed = reader.db
    .select({ id: t.id, matches: sql`${matches}`.as("matches") })
    .from(t)
    .where(callsBelow(reader, path, below))
    .orderBy(...newestFirst(t, path))
    .limit(entries)
    .as("passed");
  const [found] = await reader.db
    .select({
      entries: sql`count(*)`.mapWith(Number),
      matches: sql`count(*) filter (where ${passed.matches})`.mapWith(Number),
      last: sql<string | null>`min(${passed.id})`,
    })
    .from(passed);
  return found ?? { entries: 0, matches: 0, last: null };
}

/** The calls at a place among the matches of the step that begins below an ID. */
async function rowsAt(
  reader: Reader,
  path: ScanPath,
  below: string,
  { limit, offset }: PageRange,
): Promise<InvocationRow[]> {
  const { invocations: t } = reader.tables;
  const calls = reader.db
    .select()
    .from(t)
    .where(callsBelow(reader, path, below))
    .orderBy(...newestFirst(t, path));
  // Matches after this step belong to the next one.
  if (path.others.length === 0) return calls.limit(Math.min(limit, ENTRIES_MAX - offset)).offset(offset);
  const passed = calls.limit(ENTRIES_MAX).as("passed");
  return reader.db
    .select()
    .from(passed)
    .where(and(...path.others.map((each) => holds(passed, each))))
    .orderBy(...newestFirst(passed, path))
    .limit(limit)
    .offset(offset);
}

/** A page whose total is known: no further than to the end of the page. Without other filters. */
export async function pageAt(
  reader: Reader,
  path: ScanPath,
  { limit, offset }: PageRange,
  callerSignal: ScanSignal,
): Promise<InvocationRow[]> {
  let below = path.ceiling;
  for (let left = offset; left > 0; ) {
    const from = below;
    const most = Math.min(left, ENTRIES_MAX);
    const { entries, last } = await inStoreTurns(path.tenant, () => step(reader, path, from, most));
    left -= entries;
    if (last === null || callerSignal?.aborted) return [];
    below = last;
  }
  return rowsAt(reader, path, below, { limit, offset: 0 });
}

/** A page, and how many matches there are, which takes a look at the whole path. */
export async function pageAndTotal(
  reader: Reader,
  path: ScanPath,
  { limit, offset }: PageRange,
  callerSignal: ScanSignal,
): Promise<ScannedPage> {
  const rows: InvocationRow[] = [];
  let total = 0;
  let below: string | null = path.ceiling;

  /** Gives where the next step begins, if there is one. */
  async function pass(from: string): Promise<string | null> {
    const { entries, matches, last } = await step(reader, path, from, ENTRIES_MAX);
    const skipped = Math.max(offset - total, 0);
    if (rows.length < limit && matches > skipped) {
      const place = { limit: limit - rows.length, offset: skipped };
      rows.push(...(await rowsAt(reader, path, from, place)));
    }
    total += matches;
    return entries < ENTRIES_MAX ? null : last;
  }

  while (below !== null && callerSignal?.aborted !== true) {
    const from: string = below;
    below = await inStoreTurns(path.tenant, () => pass(from));
  }
  return { rows, total };
}
