// The ended calls that a page finds neither among the open ones nor in the history's own tables: only on SQLite, see
// storage/sqlite-recent.ts. They are few, and in memory.
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

/** The IDs of those that match all filters. */
export function recentIds(
  { recentCalls }: Reader,
  tenant: string,
  filters: readonly (readonly [CountDimension, string])[],
): string[] {
  const calls = recentCalls?.of(tenant) ?? [];
  return calls
    .filter((call) => filters.every(([dimension, value]) => VALUES[dimension](call) === value))
    .map(({ id }) => id);
}

/** Reads what no recent call may come to or leave meanwhile. */
export async function whileUnmoved<T>({ recentCalls }: Reader, read: () => Promise<T>): Promise<T> {
  for (;;) {
    const version = recentCalls?.version();
    const found = await read();
    if (version === recentCalls?.version()) return found;
  }
}
