// How old rows are removed: tenant by tenant, since the tables are ordered that way, and in small groups, each its own
// write, so that other writes pass between them.
import { asc, gt } from "drizzle-orm";
import type { Reader, Store, Tx } from "./store.ts";

const ROWS_AT_ONCE = 200;

type TableOfTenants =
  | "endedInvocations"
  | "invocationBodies"
  | "payments"
  | "policyDecisions"
  | "receiptChains"
  | "receiptsDue";

/**
 * @param remove removes at most so many rows and returns how many it removed; fewer means that none are left
 * @returns how many rows were removed
 */
export async function removeInGroups(
  store: Store,
  remove: (tx: Tx, rowsAtOnce: number) => Promise<number>,
): Promise<number> {
  let removed = 0;
  for (let count = ROWS_AT_ONCE; count === ROWS_AT_ONCE; removed += count) {
    count = await store.write((tx) => remove(tx, ROWS_AT_ONCE));
  }
  return removed;
}

/** The first tenant by name after `after` that has a row in the table: one seek, however many rows there are. */
export async function nextTenant(reader: Reader, table: TableOfTenants, after: string): Promise<string | null> {
  const t = reader.tables[table];
  const [row] = await reader.db
    .select({ tenant: t.tenant })
    .from(t)
    .where(gt(t.tenant, after))
    .orderBy(asc(t.tenant))
    .limit(1);
  return row?.tenant ?? null;
}

/** Each tenant that has a row in the table. The next one is looked for when the one before is done. */
export async function* tenantsIn(reader: Reader, table: TableOfTenants): AsyncGenerator<string> {
  for (
    let tenant = await nextTenant(reader, table, "");
    tenant !== null;
    tenant = await nextTenant(reader, table, tenant)
  ) {
    yield tenant;
  }
}
