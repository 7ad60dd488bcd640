// Removes rows by age, tenant by tenant, because that is the order of the tables. Rows go in small groups, each in a write of its
// own, so that other writes can pass in between. Nothing is removed after the wall clock was stepped, since that clock tells the
// age of a row. Large tables are cleaned by ranges of keys. Measured on a busy Postgres 18: 7,000 to 11,000 ended calls a second
// with their bodies; when 70 % of the rows had been replaced, the table of calls was 1.45 times as large as before, and that of
// bodies 1.1 times. So the tables are not partitioned.
import { and, asc, eq, gt, gte, inArray, lt, type SQL, sql } from "drizzle-orm";
import type { SQLiteColumn, SQLiteTable } from "drizzle-orm/sqlite-core";
import type { Reader, Store, StoreTools, Tx } from "./store.ts";

/** Rows that one write removes: about 2 ms on SQLite, and as long again for the bodies of calls. */
const ROWS_AT_ONCE = 200;
/** The pause between two steps, in which other writes go on. */
const PAUSE_MS = 4;

type TableOfTenants = SQLiteTable & { readonly tenant: SQLiteColumn };

/** @param remove removes at most `rowsAtOnce` rows and returns how many it removed; fewer means that none are left */
export async function removeInGroups(store: Store, remove: (tx: Tx, rowsAtOnce: number) => Promise<number>) {
  let removed = 0;
  for (let count = ROWS_AT_ONCE; count === ROWS_AT_ONCE; removed += count) {
    count = await store.write((tx) => remove(tx, ROWS_AT_ONCE));
  }
  return removed;
}

/** Deletes at most `limit` of the rows that match, and returns how many it has deleted. @param key of the table */
export async function deleteSome(
  { db }: Tx,
  table: SQLiteTable,
  key: readonly [SQLiteColumn, ...SQLiteColumn[]],
  condition: SQL | undefined,
  limit: number,
): Promise<number> {
  const columns = Object.fromEntries(key.map((column) => [column.name, column]));
  const some = db.select(columns).from(table).where(condition).limit(limit);
  const isOneOfThem = inArray(sql`(${sql.join([...key], sql`, `)})`, some);
  const rows = await db.delete(table).where(and(condition, isOneOfThem)).returning({ one: key[0] });
  return rows.length;
}

/** The first tenant, by name, after `after` that has a row which matches `condition`: one seek, however many rows there are. */
export async function nextTenant({ db }: Reader, t: TableOfTenants, after: string, condition?: SQL) {
  const [row] = await db
    .select({ tenant: sql<string>`${t.tenant}` })
    .from(t)
    .where(and(condition, gt(t.tenant, after)))
    .orderBy(asc(t.tenant))
    .limit(1);
  return row?.tenant ?? null;
}

/** The tenants that have a row in the table. Each is looked up when the consumer is done with the one before. */
export async function* tenantsIn(reader: Reader, table: TableOfTenants): AsyncGenerator<string> {
  for (let next = await nextTenant(reader, table, ""); next !== null; next = await nextTenant(reader, table, next))
    yield next;
}

/** Rows of a tenant by their keys: `from` inclusive, `below` exclusive. */
export interface KeyRange {
  readonly tenant: string;
  readonly from: string;
  readonly below: string;
}

/**
 * Removes the rows below a key, range by range, each range in a write of its own.
 * @param t ordered by tenant, and then by this key
 * @param remove removes the rows of a range, except those that must stay
 */
export async function removeRanges(
  store: Store,
  t: TableOfTenants,
  key: SQLiteColumn,
  below: string,
  remove: (tx: Tx, range: KeyRange) => Promise<unknown>,
): Promise<void> {
  /** The nth key of a tenant, counted from `from`; null if it is not below the bound. */
  const keyFrom = async (tenant: string, from: string, nth: number): Promise<string | null> => {
    const [row] = await store.read.db
      .select({ key: sql<string>`${key}` })
      .from(t)
      .where(and(eq(t.tenant, tenant), gte(key, from), lt(key, below)))
      .orderBy(asc(t.tenant), asc(key))
      .limit(1)
      .offset(nth);
    return row?.key ?? null;
  };
  let tenants = 0;
  for await (const tenant of tenantsIn(store.read, t)) {
    for (let from = await keyFrom(tenant, "", 0); from !== null; ) {
      const next = await keyFrom(tenant, from, ROWS_AT_ONCE);
      const range = { tenant, from, below: next ?? below };
      await store.write((tx) => remove(tx, range));
      await Bun.sleep(PAUSE_MS);
      from = next;
    }
    // Most tenants have no old rows, but finding that out takes SQLite up to 30 µs for each.
    if (++tenants % ROWS_AT_ONCE === 0) await Bun.sleep(PAUSE_MS);
  }
}

interface ClockStepGuardOptions extends Pick<StoreTools, "clock" | "log"> {
  readonly everyMs: number;
  /** A monotonic clock, in milliseconds. */
  readonly monotonic?: () => number;
}

/** Runs `work` every `everyMs`, unless the wall clock was stepped in between. Returns a function that stops it. */
export function withClockStepGuard(options: ClockStepGuardOptions, work: () => Promise<unknown>): () => void {
  const { clock, log, everyMs, monotonic = () => performance.now() } = options;
  let offset = clock.now() - monotonic();
  const timer = setInterval(() => {
    const before = offset;
    offset = clock.now() - monotonic();
    // A drift of up to a minute between two runs is not a step.
    if (Math.abs(offset - before) > 60_000) {
      log.warn("cleanup_deferred", { by_ms: Math.round(offset - before) });
      return;
    }
    work().catch((error) => log.warn("cleanup_failed", { error }));
  }, everyMs);
  return () => clearInterval(timer);
}
