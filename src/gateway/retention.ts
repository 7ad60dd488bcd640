// Every age rule of the gateway. About every hour, while the clock is steady, one of the replicas removes old rows. Each
// replica prepares the periods of the tables that new rows will need.

import type { Log } from "../core/log.ts";
import { HOUR_MS } from "../core/time.ts";
import { type Poll, poll } from "../kernel/loop.ts";
import { withClockStepGuard } from "../storage/cleanup.ts";
import { leaseJob } from "../storage/leases.ts";
import { type Periods, periodHours, type Store, type TimedTable } from "../storage/store.ts";
import { joinTotals } from "../storage/totals.ts";
import { removeFullBuckets } from "./agents/store.ts";
import { SLOT_HOURS } from "./invocations/idempotency.ts";
import { removeOldNotes } from "./invocations/lost-commits.ts";
import { BODIES, cleanUp, ENDED_CALLS, IDEMPOTENCY_KEYS, PARTS, type Retention } from "./invocations/retention.ts";
import { DECISIONS, removeOldDecisions } from "./policy/decisions.ts";
import { removeOldCalls } from "./policy/observed-rate.ts";
import { removeOldReceipts } from "./receipts/service.ts";
import { RECEIPTS } from "./receipts/store.ts";

/** A commit that waits for a standby can be as late as the standby's return. */
const REFUSAL_NOTE_DAYS = 7;

/** Calls that replicas have counted are of no use after minutes: how often to look when there are some, and when not. */
const [CALLS_EVERY_MS, CALLS_SELDOM_MS] = [30_000, 480_000];

/** Starts before calls are taken, since each end of a call writes into a table that goes by age. Gives what stops it. */
export async function startRetention(store: Store, retention: Retention, log: Log): Promise<() => void> {
  const { clock } = store;
  await store.periods.clearTheWay([ENDED_CALLS, BODIES, PARTS, DECISIONS, RECEIPTS, IDEMPOTENCY_KEYS]);
  const { history_days } = retention;
  // Rows without a period of their own go into another one, and are removed one by one later.
  const prepared = () =>
    prepareTables(store.periods, retention).catch((error) => {
      log.warn("history_not_prepared", { error });
      return [];
    });
  // The start is over by then, and what had to wait for it is done. Until then there is room too.
  const first = setTimeout(prepared, 60_000);
  // More often than the lease allows, so that a process that lives for less than an hour takes part too.
  const stop = withClockStepGuard({ clock, log, everyMs: 10 * 60_000 }, async () => {
    const starts = await prepared();
    if (!(await leaseJob(store, "retention", 0.9 * HOUR_MS))) return;
    await Promise.all([
      // Captured bodies after body_days, whole records after history_days, idempotency keys when they expire.
      cleanUp(store, clock, retention, log).then(() => joinTotals(store, clock, starts)),
      removeOldDecisions(store, clock, history_days),
      removeOldReceipts(store, clock, history_days),
      removeOldNotes(store, clock, REFUSAL_NOTE_DAYS),
      removeFullBuckets(store),
    ]);
  });
  const calls = startRemovingCalls(store, log);
  return () => {
    clearTimeout(first);
    stop();
    calls?.stop();
  };
}

/** Null where the process counts in memory. */
function startRemovingCalls(store: Store, log: Log): Poll | null {
  if (!store.isShared) return null;
  return poll({ leastMs: CALLS_EVERY_MS, mostMs: CALLS_SELDOM_MS }, () =>
    removeCallsOnLease(store).catch((error) => {
      log.warn("cleanup_failed", { error });
      return false;
    }),
  );
}

/** Whether this process has the lease, and there were calls to remove. */
export async function removeCallsOnLease(store: Store): Promise<boolean> {
  if (!store.isShared || !(await leaseJob(store, "caller calls", 0.9 * CALLS_EVERY_MS))) return false;
  return (await removeOldCalls(store.execute)) > 0;
}

/** Makes room in the tables that go by age. Gives the pieces of the ended calls. */
export async function prepareTables(periods: Periods, { body_days, history_days }: Retention) {
  const lives = [body_days, history_days].filter((days) => days > 0);
  const bodyDays = lives.length === 0 ? 0 : Math.min(...lives);
  const tables: [TimedTable, number][] = [
    [BODIES, bodyDays],
    [PARTS, bodyDays],
    [DECISIONS, history_days],
    [RECEIPTS, history_days],
  ];
  await periods.prepare(IDEMPOTENCY_KEYS, SLOT_HOURS);
  for (const [table, days] of tables) await periods.prepare(table, periodHours(days));
  return await periods.prepare(ENDED_CALLS, periodHours(history_days));
}
