// What ends while a page is read, and the ended calls that it finds neither among the open ones nor in the history's own
// tables: only on SQLite, see storage/sqlite-recent.ts. They are few, and in memory.
import type { CountDimension } from "../../../db/schema.ts";
import type { RecentCall } from "../../storage/recent.ts";
import type { Reader } from "../../storage/store.ts";

const VALUES: Record<CountDimension, (call: RecentCall) => string | null> = {
  all: () => "",
  agent: ({ agent_id }) => agent_id,
  status: ({ status }) => status,
  mode: ({ mode }) => mode,
  error_class: ({ error_class }) => error_class,
  model: ({ model }) => model,
  settlement: () => null,
};

/** The IDs of those that match all filters, newest first, and no more than so many. */
export function recentIds(
  { recentCalls }: Reader,
  tenant: string,
  filters: readonly (readonly [CountDimension, string])[],
  most = Number.POSITIVE_INFINITY,
): string[] {
  const calls = recentCalls?.of(tenant) ?? [];
  const ids: string[] = [];
  for (let place = calls.length - 1; place >= 0 && ids.length < most; place -= 1) {
    const call = calls[place];
    if (call === undefined) continue;
    if (filters.every(([dimension, value]) => VALUES[dimension](call) === value)) ids.push(call.id);
  }
  return ids;
}

/** Reads what no recent call may come to or leave meanwhile. */
export async function whileUnmoved<T>({ recentCalls }: Reader, read: () => Promise<T>): Promise<T> {
  for (;;) {
    const version = recentCalls?.version();
    const found = await read();
    if (version === recentCalls?.version()) return found;
  }
}

/** So often a page is read anew because calls have ended meanwhile. */
export const TRIES_MAX = 8;

/**
 * Whether the calls that were open still are. One that has ended between the two looks is among the ended ones too, and
 * would be passed over twice on the way to a place behind it.
 */
export function areAmong(openIds: readonly string[], now: readonly string[]): boolean {
  const still = new Set(now);
  return openIds.every((id) => still.has(id));
}
