// How rows are removed for their age: tenant by tenant, since the tables are ordered that way, in small groups, each a write
// of its own, so that other writes pass between them; and only while the clock that tells the age runs evenly.
//
// Large tables go in ranges of their keys, which rise with time.
import { and, asc, eq, gt, gte, lt } from "drizzle-orm";
import type { Log } from "../core/log.ts";
import type { Clock } from "../core/time.ts";
import type { Reader, Store, Tx } from "./store.ts";

/** What one step removes: about 2 ms on SQLite, and as long again for the bodies of calls. */
const ROWS_AT_ONCE = 200;
/** Others go on meanwhile. */
const PAUSE_MS = 4;

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

/** Tables that stand in the order of their tenants, and then of time. */
type TimedTable = "endedInvocations" | "invocationBodies" | "policyDecisions";

/** Rows of a tenant, by their keys: from `from` on, and below `below`. */
export interface KeyRange {
  readonly tenant: string;
  readonly from: string;
  readonly below: string;
}

function keyOf(reader: Reader, table: TimedTable) {
  const { endedInvocations, invocationBodies, policyDecisions } = reader.tables;
  return {
    endedInvocations: endedInvocations.id,
    invocationBodies: invocationBodies.invocation_id,
    policyDecisions: policyDecisions.id,
  }[table];
}

/**
 * Removes what is below a key, range by range, in a write each. What must stay is passed over.
 *
 * @param remove removes what may go of a range
 */
export async function removeRanges(
  store: Store,
  table: TimedTable,
  below: string,
  remove: (tx: Tx, range: KeyRange) => Promise<unknown>,
): Promise<void> {
  const t = store.read.tables[table];
  const key = keyOf(store.read, table);
  /** The nth key of a tenant from one on, as far as it is below. */
  const keyFrom = async (tenant: string, from: string, nth: number): Promise<string | null> => {
    const [row] = await store.read.db
      .select({ key })
      .from(t)
      .where(and(eq(t.tenant, tenant), gte(key, from), lt(key, below)))
      .orderBy(asc(t.tenant), asc(key))
      .limit(1)
      .offset(nth);
    return row?.key ?? null;
  };
  let looked = 0;
  for await (const tenant of tenantsIn(store.read, table)) {
    for (let from = await keyFrom(tenant, "", 0); from !== null; ) {
      const next = await keyFrom(tenant, from, ROWS_AT_ONCE);
      const range = { tenant, from, below: next ?? below };
      await store.write((tx) => remove(tx, range));
      await Bun.sleep(PAUSE_MS);
      from = next;
    }
    // Of most tenants nothing is old enough, and to see that takes SQLite up to 30 µs of each.
    if (++looked % ROWS_AT_ONCE === 0) await Bun.sleep(PAUSE_MS);
  }
}

interface ClockStepGuardOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly everyMs: number;
  /** Milliseconds of a clock that never goes back. */
  readonly monotonic?: () => number;
}

/**
 * Runs `work` at intervals, the first time after `everyMs`, and only when the clock has run evenly since the time before.
 * Returns a function that stops it.
 */
export function withClockStepGuard(options: ClockStepGuardOptions, work: () => Promise<unknown>): () => void {
  const { clock, log, everyMs, monotonic = () => performance.now() } = options;
  let offset = clock.now() - monotonic();
  const timer = setInterval(() => {
    const before = offset;
    offset = clock.now() - monotonic();
    // The clock may drift from the monotonic one by a minute between two runs.
    if (Math.abs(offset - before) > 60_000) {
      log.warn("cleanup_deferred", { by_ms: Math.round(offset - before) });
      return;
    }
    work().catch((error) => log.warn("cleanup_failed", { error }));
  }, everyMs);
  return () => clearInterval(timer);
}
