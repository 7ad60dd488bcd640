// Finds a page of agents. Every combination of status, protocol and tag has a list of agents, with a stored total, so a page
// with such filters is a scan of one index. A text filter needs a search, which runs in steps of bounded size. Every write of
// an agent must call `moveBetweenLists` in the same transaction.
import { and, type Column, desc, eq, gte, inArray, lt, type SQL, sql } from "drizzle-orm";
import { oneOf } from "../../../db/schema.ts";
import { type AgentStatus, agentStatus, type Protocol } from "../../core/states.ts";
import { inStoreTurns } from "../../kernel/turns.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import { addToTotals, totalOf } from "../../storage/totals.ts";
import { type AgentRow, decodeTags, tagNeedle } from "./model.ts";

/** The name of a list. @param status null for all agents that are not inactive */
const listOf = (status: AgentStatus | null, protocol: Protocol | null, tag: string | null): string =>
  `${status ?? "live"}/${protocol ?? "any"}${tag === null ? "" : `/${tag}`}`;

/** The list of all agents that are not inactive. Its total is what the quota limits. */
export const LIVE = listOf(null, null, null);

function listsOf(row: AgentRow): Set<string> {
  const status = agentStatus(row);
  const lists = new Set<string>();
  for (const tag of [null, ...(decodeTags(row.tags) ?? [])]) {
    for (const protocol of [row.protocol, null]) {
      lists.add(listOf(status, protocol, tag));
      if (status !== "inactive") lists.add(listOf(null, protocol, tag));
    }
  }
  return lists;
}

/** Updates an agent's lists and search entry; returns the new totals of its lists. @param before null for a new agent */
export async function moveBetweenLists(tx: Tx, before: AgentRow | null, after: AgentRow) {
  const { agentLists: t } = tx.tables;
  const { tenant, id } = after;
  const [from, to] = [before === null ? new Set<string>() : listsOf(before), listsOf(after)];
  const [left, entered] = [[...from.difference(to)], [...to.difference(from)]];
  if (left.length > 0) await tx.db.delete(t).where(and(eq(t.tenant, tenant), inArray(t.list, left), eq(t.id, id)));
  if (entered.length > 0) await tx.db.insert(t).values(entered.map((list) => ({ tenant, list, id })));
  await writeSearch(tx, before, after);
  const deltas = [...left.map((list) => [list, -1] as const), ...entered.map((list) => [list, 1] as const)];
  return addToTotals(tx, tenant, new Map(deltas));
}

async function writeSearch(tx: Tx, before: AgentRow | null, after: AgentRow): Promise<void> {
  const { agentSearch: t } = tx.tables;
  const next = searchEntry(after);
  if (before === null) {
    await tx.db.insert(t).values(next);
    return;
  }
  const last = searchEntry(before);
  if (Bun.deepEquals(last, next)) return;
  const { tenant, inactive, id } = last;
  await tx.db
    .update(t)
    .set(next)
    .where(and(eq(t.tenant, tenant), eq(t.inactive, inactive), eq(t.id, id)));
}

function searchEntry(row: AgentRow) {
  const { tenant, id, protocol, tags } = row;
  const status = agentStatus(row);
  const text = searchText(row);
  const size = Buffer.byteLength(text) + Buffer.byteLength(tags ?? "");
  return { tenant, inactive: status === "inactive", id, status, protocol, size, tags, text };
}

// Case folding for the search in names and descriptions. SQLite folds only ASCII and Postgres folds by locale, so the stored
// text and the searched text are both folded here and compared byte by byte.

/** Prevents a match that spans the name and the description. */
const SEPARATOR = "\u0001";

/** Lower case first turns ẞ into ß; upper case then turns ß into SS. */
export const fold = (text: string): string => text.replaceAll(SEPARATOR, "").toLowerCase().toUpperCase();

export const searchText = (agent: { readonly name: string; readonly description: string }): string =>
  `${fold(agent.name)}${SEPARATOR}${fold(agent.description)}`;

export interface AgentFilter {
  /** Null for all agents that are not inactive. */
  readonly status: AgentStatus | null;
  readonly protocol: Protocol | null;
  readonly tag: string | null;
  /** A part of the name or the description, ignoring case. */
  readonly q: string | null;
  readonly limit: number;
  readonly offset: number;
}

/** Agents that one step along a list skips, which takes less than a millisecond. */
const SKIPPED_MAX = 5_000;
/** Entries of one search step, of at most 256 KiB of text. The slowest search takes 2 ms for a step. */
const SEARCHED_MAX = 512;
/** Whole agents read at once. An agent may have hundreds of KiB, which take a millisecond. */
const ROWS_AT_ONCE = 4;

/** A bound above every agent ID. */
const LAST_ID = "agt_~";

/** Finds a page, newest first. @param callerSignal stops a search at its next step when the caller has gone */
export function findAgents(reader: Reader, tenant: string, filter: AgentFilter, callerSignal?: AbortSignal) {
  const { q } = filter;
  return q === null || q === "" ? inList(reader, tenant, filter) : bySearch(reader, tenant, filter, q, callerSignal);
}

async function inList(reader: Reader, tenant: string, filter: AgentFilter) {
  const { status, protocol, tag, limit, offset } = filter;
  const list = listOf(status, protocol, tag);
  const total = await totalOf(reader, tenant, list);
  if (offset >= total) return { ids: [], total };
  let below = LAST_ID;
  let left = offset;
  for (; left > SKIPPED_MAX; left -= SKIPPED_MAX) {
    const skipped = { below, offset: SKIPPED_MAX - 1, limit: 1 };
    const [last] = await inStoreTurns(tenant, () => idsBelow(reader, tenant, list, skipped));
    if (last === undefined) return { ids: [], total };
    below = last;
  }
  const ids = await idsBelow(reader, tenant, list, { below, offset: left, limit });
  // The page may hold agents that were created after the total was read.
  return { ids, total: ids.length === 0 ? total : Math.max(total, offset + ids.length) };
}

async function idsBelow(
  { db, tables: { agentLists: t } }: Reader,
  tenant: string,
  list: string,
  { below, limit, offset }: { readonly below: string; readonly limit: number; readonly offset: number },
): Promise<string[]> {
  const rows = await db
    .select({ id: t.id })
    .from(t)
    .where(and(eq(t.tenant, tenant), eq(t.list, list), lt(t.id, below)))
    .orderBy(desc(t.id))
    .limit(limit)
    .offset(offset);
  return rows.map(({ id }) => id);
}

async function bySearch(reader: Reader, tenant: string, filter: AgentFilter, q: string, callerSignal?: AbortSignal) {
  const { status, protocol, tag, limit, offset } = filter;
  const { agentSearch: t } = reader.tables;
  // The entries to search: all inactive agents, or all others.
  const along = and(eq(t.tenant, tenant), eq(t.inactive, status === "inactive"));
  const wanted = and(
    status === null ? undefined : eq(t.status, status),
    protocol === null ? undefined : eq(t.protocol, protocol),
    tag === null ? undefined : contains(t.tags, tagNeedle(tag)),
    contains(t.text, fold(q)),
  );
  const ids: string[] = [];
  let total = 0;
  for (let below: string | null = LAST_ID; below !== null && !callerSignal?.aborted; ) {
    const from: string = below;
    const { matches, last } = await inStoreTurns(tenant, () => searchStep(reader, along, wanted, from));
    const skipped = Math.max(offset - total, 0);
    ids.push(...matches.slice(skipped, skipped + limit - ids.length));
    total += matches.length;
    below = last;
  }
  return { ids, total };
}

/** `like` has wildcards and differs between the databases in case sensitivity; replace() compares bytes in both. */
const contains = (column: Column, needle: string): SQL => sql`replace(${column}, ${needle}, '') <> ${column}`;

/** Searches the next entries, up to the bounds of a step. `last` is where the next step begins; null at the end. */
async function searchStep(reader: Reader, along: SQL | undefined, wanted: SQL | undefined, below: string) {
  const { agentSearch: t } = reader.tables;
  const next = await reader.db
    .select({ id: t.id, size: t.size })
    .from(t)
    .where(and(along, lt(t.id, below)))
    .orderBy(desc(t.id))
    .limit(SEARCHED_MAX);
  let bytes = 0;
  const taken = next.findIndex(({ size }) => {
    bytes += size;
    return bytes > 256 * 1024;
  });
  const entries = taken === -1 ? next : next.slice(0, Math.max(taken, 1));
  const last = entries.at(-1);
  if (last === undefined) return { matches: [], last: null };
  const found = await reader.db
    .select({ id: t.id })
    .from(t)
    .where(and(along, lt(t.id, below), gte(t.id, last.id), wanted))
    .orderBy(desc(t.id));
  const isEnd = entries.length === next.length && next.length < SEARCHED_MAX;
  return { matches: found.map(({ id }) => id), last: isEnd ? null : last.id };
}

/** Reads the agents of these IDs, in their order, a few at a time as they are consumed. */
export async function* readAgents({ db, tables: { agents: t } }: Reader, tenant: string, ids: readonly string[]) {
  for (let at = 0; at < ids.length; at += ROWS_AT_ONCE) {
    yield* await db
      .select()
      .from(t)
      .where(and(eq(t.tenant, tenant), oneOf(t.id, ids.slice(at, at + ROWS_AT_ONCE))))
      .orderBy(desc(t.id));
  }
}
