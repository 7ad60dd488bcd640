// Calls that were paid for while nobody waited for them: their payment was unknown, their caller was told to come
// back with it, and it landed meanwhile. Whoever does not come back in time has paid for a call that is not made, and
// the record says so.
import { and, asc, eq, lte, sql } from "drizzle-orm";
import type { Clock } from "../../core/clock.ts";
import { RETRY_AFTER_SECONDS_MAX } from "../../core/limits.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import { type InvocationKey, paidFor, withdraw } from "../invocations/service.ts";

/** From when the payment was collected: twice what any `Retry-After` says, that of the agent's rate limit too. */
export const KEPT_MS = 2 * RETRY_AFTER_SECONDS_MAX * 1000;
const LOOK_MS = 5_000;
const CALLS_AT_ONCE = 100;

export interface UnclaimedOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** Told of each call that ended, after it is durable. */
  ended(id: string): void;
}

/** Looks for them from now on; gives what stops it. */
export function endUnclaimed(options: UnclaimedOptions): () => void {
  const { log } = options;
  const timer = setInterval(() => {
    endOnce(options).catch((error) => log.warn("unclaimed calls not looked at", { error }));
  }, LOOK_MS);
  return () => clearInterval(timer);
}

/** Gives the calls that it ended. */
export async function endOnce({ store, clock, log, ended }: UnclaimedOptions): Promise<InvocationKey[]> {
  // Read first: there is nearly never one, and a write takes its turn among all others.
  const { invocations: t } = store.read.tables;
  const keys = await store.read.db
    .select({ tenant: t.tenant, id: t.id })
    .from(t)
    .where(
      // The index of these calls has the same words.
      and(
        eq(t.status, "pending"),
        sql`${t.mode} = 'streaming'`,
        paidFor(t),
        lte(t.updated_at, clock.now() - KEPT_MS),
      ),
    )
    .orderBy(asc(t.updated_at))
    .limit(CALLS_AT_ONCE);
  const gone: InvocationKey[] = [];
  for (const key of keys) {
    // Refused when its caller has come back meanwhile.
    if (!(await store.write((tx) => withdraw(tx, key, "cancelled", clock.now())))) continue;
    log.info("a paid call was not fetched", { tenant: key.tenant, invocation_id: key.id });
    ended(key.id);
    gone.push(key);
  }
  return gone;
}
