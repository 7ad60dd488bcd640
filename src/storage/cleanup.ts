// How rows are removed for their age: tenant by tenant, since the tables are ordered that way, in small groups, each a write
// of its own, so that other writes pass between them; and only while the clock that tells the age runs evenly.
import { asc, gt } from "drizzle-orm";
import type { Log } from "../core/log.ts";
import type { Clock } from "../core/time.ts";
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
