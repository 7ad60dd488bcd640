// Where the calls of a tenant stand, newest first: the open ones along the index of their tenant, the ended ones along that of
// one filter. Said once for all who look for calls: walks with the values of a request, and prepared queries with names for
// them.
import { and, desc, eq, gte, is, isNotNull, lt, type Placeholder, type SQL, type SQLWrapper, sql } from "drizzle-orm";
import { SQLiteTable } from "drizzle-orm/sqlite-core";
import type { CountDimension } from "../../../db/schema.ts";
import type { Reader } from "../../storage/store.ts";
import type { InvocationRow } from "./service.ts";

/** Entries of one step: about 5 ms of SQLite when it has to look at every row. */
export const ENTRIES_MAX = 5_000;
/** Entries of one kind in the range of a step: so many there are when all of its open calls have ended since it was looked at. */
export const STEP_MAX = 2 * ENTRIES_MAX;

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
export interface IdRange {
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
export function isOfEnded([dimension, value]: readonly [CountDimension, Given]): boolean {
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
export function endedAlong(t: Reader["tables"]["endedInvocations"], { tenant, along }: Calls, range: IdRange) {
  // Postgres leaves out the partitions above and below, and does so by this condition alone.
  const inRange = and(eq(t.tenant, tenant), gte(t.id, range.floor), lt(t.id, range.below));
  if (along === undefined) return { where: inRange, order: [desc(t.id)] };
  const [dimension, value] = along;
  const column = t[COLUMNS[dimension]];
  const from = sql`(${column}, ${t.id}) >= (${value}, ${range.floor})`;
  const to = sql`(${column}, ${t.id}) < (${value}, ${range.below})`;
  return { where: and(inRange, from, to, isNotNull(column)), order: [desc(column), desc(t.id)] };
}

/** The IDs of the ended calls in a range, and which of them match. Without other filters nothing but the index is read. */
export function endedIn({ db, tables: { endedInvocations: t } }: Reader, calls: Calls, range: IdRange) {
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
export function openIn(
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
export function idsAt(reader: Reader, calls: Calls, range: IdRange, { limit, offset, most }: PlaceOf) {
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
