// Which rows of the gateway are removed at which age. About every hour one replica, by lease, removes the old rows.
import type { Log } from "../core/log.ts";
import { HOUR_MS } from "../core/time.ts";
import { type Poll, poll } from "../kernel/loop.ts";
import { withClockStepGuard } from "../storage/cleanup.ts";
import { leaseJob } from "../storage/leases.ts";
import type { Store } from "../storage/store.ts";
import { joinTotals } from "../storage/totals.ts";
import { removeFullBuckets } from "./agents/store.ts";
import { removeOldNotes } from "./invocations/lost-commits.ts";
import { cleanUp, type Retention } from "./invocations/retention.ts";
import { removeOldDecisions } from "./policy/decisions.ts";
import { removeCountedCalls } from "./policy/observed-rate.ts";
import { removeOldReceipts } from "./receipts/store.ts";

/** How long notes of refused calls are kept. A commit that waits for a standby server may arrive only when the standby is back. */
const REFUSAL_NOTE_DAYS = 7;

/** How often to remove counted calls (policy/observed-rate.ts), useless after minutes: while there are some, and otherwise. */
const CALLS_EVERY_MS = 30_000;
const CALLS_SELDOM_MS = 480_000;

/** Starts the clean-up. Returns a function that stops it. */
export function startRetention(store: Store, retention: Retention, log: Log): () => void {
  const { clock } = store;
  const { history_days } = retention;
  // Ask more often than the lease allows, so that a process that lives for less than an hour takes part too.
  const stop = withClockStepGuard({ clock, log, everyMs: 10 * 60_000 }, async () => {
    if (!(await leaseJob(store, "retention", 0.9 * HOUR_MS))) return;
    await Promise.all([
      // Captured bodies after body_days, whole records after history_days, idempotency keys when they expire.
      cleanUp(store, clock, retention, log).then(() => joinTotals(store)),
      removeOldDecisions(store, clock, history_days),
      removeOldReceipts(store, clock, history_days),
      removeOldNotes(store, clock, REFUSAL_NOTE_DAYS),
      removeFullBuckets(store),
    ]);
  });
  // Null where the process has the database to itself and counts calls in memory.
  const calls = store.isShared ? startRemovingCountedCalls(store, log) : null;
  return () => {
    stop();
    calls?.stop();
  };
}

function startRemovingCountedCalls(store: Store, log: Log): Poll {
  return poll({ leastMs: CALLS_EVERY_MS, mostMs: CALLS_SELDOM_MS }, () =>
    removeCountedCallsOnLease(store).catch((error) => {
      log.warn("cleanup_failed", { error });
      return false;
    }),
  );
}

/** Returns whether this process has the lease and has removed some calls. */
export async function removeCountedCallsOnLease(store: Store): Promise<boolean> {
  if (!store.isShared || !(await leaseJob(store, "caller calls", 0.9 * CALLS_EVERY_MS))) return false;
  return (await removeCountedCalls(store.execute)) > 0;
}
