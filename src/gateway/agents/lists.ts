// The lists in which an agent stands, one for each answer to "which status, protocol and tag", so that a page of agents
// is a scan of one index, and its total is kept. Also the texts that a search reads. Every write of an agent must call
// this module in the same write.
import { and, eq, inArray } from "drizzle-orm";
import { type AgentStatus, agentStatus, type Protocol } from "../../core/states.ts";
import type { Tx } from "../../storage/store.ts";
import { addToTotals } from "../../storage/totals.ts";
import { type AgentRow, decodeTags } from "./model.ts";
import { searchText } from "./search.ts";

/**
 * @param status null: all but the inactive ones
 * @param protocol null: any
 * @param tag null: any
 */
export function listOf(status: AgentStatus | null, protocol: Protocol | null, tag: string | null): string {
  // The migration that made the lists of older agents has the same spelling.
  return `${status ?? "live"}/${protocol ?? "any"}${tag === null ? "" : `/${tag}`}`;
}

/** All that are not inactive. The quota counts these. */
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

/**
 * To be called when the agent itself has been written.
 *
 * @param before the agent as it was; null for one that is new
 * @returns the new totals of the lists that it has entered or left
 */
export async function moveBetweenLists(
  tx: Tx,
  before: AgentRow | null,
  after: AgentRow,
): Promise<ReadonlyMap<string, number>> {
  const { agentLists: t } = tx.tables;
  const { tenant, id } = after;
  const [from, to] = [before === null ? new Set<string>() : listsOf(before), listsOf(after)];
  const [left, entered] = [[...from.difference(to)], [...to.difference(from)]];
  if (left.length > 0) {
    await tx.db.delete(t).where(and(eq(t.tenant, tenant), inArray(t.list, left), eq(t.id, id)));
  }
  if (entered.length > 0) await tx.db.insert(t).values(entered.map((list) => ({ tenant, list, id })));
  await writeSearch(tx, before, after);
  const deltas = [...left.map((list) => [list, -1] as const), ...entered.map((list) => [list, 1] as const)];
  return addToTotals(tx, tenant, new Map(deltas));
}

async function writeSearch(tx: Tx, before: AgentRow | null, after: AgentRow): Promise<void> {
  const { agentSearch: t } = tx.tables;
  const next = searchOf(after);
  if (before === null) {
    await tx.db.insert(t).values(next);
    return;
  }
  const last = searchOf(before);
  if (Bun.deepEquals(last, next)) return;
  const { tenant, inactive, id } = last;
  await tx.db
    .update(t)
    .set(next)
    .where(and(eq(t.tenant, tenant), eq(t.inactive, inactive), eq(t.id, id)));
}

function searchOf(row: AgentRow) {
  const { tenant, id, protocol, tags } = row;
  const status = agentStatus(row);
  const text = searchText(row);
  const size = Buffer.byteLength(text) + Buffer.byteLength(tags ?? "");
  return { tenant, inactive: status === "inactive", id, status, protocol, size, tags, text };
}
