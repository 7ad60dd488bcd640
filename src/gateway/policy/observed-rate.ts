// The observed rate: how many calls of one caller to one agent came in the last 60 seconds, this one included. It is counted
// for every caller, since a policy that is put now judges by the minute before it. Exact to the millisecond: a call 60,000
// ms ago is not counted any more. Calls of one millisecond share an entry, so a caller's memory is bounded at any rate.
//
// Each replica counts in memory what it sees itself. Once a rule asks for the rate, the replicas count the caller together,
// in rows of the database, and each adds the calls that it counted in memory before.

import { createBatcher } from "../../kernel/batch.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { within } from "../../storage/failures.ts";
import { inputRows, NOW_MICROSECONDS, type SharedCounter, type Store } from "../../storage/store.ts";
import { cleaning } from "../agents/store.ts";

export const RATE_WINDOW_MS = 60_000;

export interface CallingUser {
  readonly tenant: string;
  readonly agentId: string;
  readonly user: string;
}

/** An agent belongs to one tenant, so its ID names both. */
const callerOf = (agentId: unknown, user: unknown) => `${agentId} ${user}`;

/** The calls of one caller, oldest first: entry i says that `counts[i]` of them came at `times[i]`. */
interface CallTimes {
  times: number[];
  counts: number[];
  /** The first entry that is not too old. */
  first: number;
  /** The sum of the counts from the first entry on. */
  total: number;
}

/** @param now milliseconds of a clock that never goes back */
export function createCallRates(now: () => number = () => performance.now(), callersMax: number = MAX.callersRated) {
  const known = tenantCache<string, CallTimes>(callersMax);

  return {
    /** Counts a call and gives the rate with it, as far as it was counted here. */
    observe({ tenant, agentId, user }: CallingUser): number {
      const at = Math.floor(now());
      const key = callerOf(agentId, user);
      let calls = known.get(key);
      if (calls === undefined) {
        calls = { times: [], counts: [], first: 0, total: 0 };
        known.set(tenant, key, calls);
      }
      forget(calls, at - RATE_WINDOW_MS);
      add(calls, at);
      return calls.total;
    },
    /** The rate as it is without another call. */
    observed({ agentId, user }: CallingUser): number {
      const calls = known.get(callerOf(agentId, user));
      if (calls === undefined) return 0;
      forget(calls, Math.floor(now()) - RATE_WINDOW_MS);
      return calls.total;
    },
  };
}

function add(calls: CallTimes, at: number): void {
  const last = calls.times.length - 1;
  calls.total += 1;
  if (calls.times[last] === at) {
    calls.counts[last] = (calls.counts[last] ?? 0) + 1;
    return;
  }
  calls.times.push(at);
  calls.counts.push(1);
}

/** Drops what came at `until` or before. */
function forget(calls: CallTimes, until: number): void {
  const { times, counts } = calls;
  while (calls.first < times.length && (times[calls.first] ?? 0) <= until) {
    calls.total -= counts[calls.first] ?? 0;
    calls.first += 1;
  }
  // The arrays are cut when most entries are too old, so that the average cost per call stays constant.
  if (calls.first > 32 && calls.first * 2 > times.length) {
    calls.times = times.slice(calls.first);
    calls.counts = counts.slice(calls.first);
    calls.first = 0;
  }
}

/** New calls of a caller. */
type CallsOfCaller = CallingUser & { readonly count: number };

const WINDOW = RATE_WINDOW_MS * 1000;
/** A clock that was set back by more restarts the minute. A smaller difference could be that of two servers' clocks. */
const BACK_MAX = 1_000_000;

const INPUT = inputRows<CallsOfCaller>({
  tenant: ["text", ({ tenant }) => tenant],
  agent_id: ["text", ({ agentId }) => agentId],
  user_name: ["text", ({ user }) => user],
  count: ["bigint", ({ count }) => count],
});

/**
 * Counts calls, to the microsecond of the server's clock, and gives how many there were in the last minute with them. A row for
 * each caller counts all of its calls, and a row for each time it called says how many those were by then. The calls of the
 * last minute are all calls less those counted in the newest row that is older, so a call costs the same at any rate. While the
 * statement waits for the row of a caller, others may add calls that it does not see, but none that is over a minute old.
 * @param now what gives the time in microseconds; for tests
 */
export function countCalls(now: string = NOW_MICROSECONDS): SharedCounter<CallsOfCaller, number> {
  return {
    name: "calls",
    kind: "counter",
    tenantOf: ({ tenant }) => tenant,
    bytesOf: () => 192,
    // A statement changes a row once.
    keyOf: ({ agentId, user }) => callerOf(agentId, user),
    postgres: {
      text: `with called as (
          insert into caller_rates as c (tenant, agent_id, user_name, at, counted, gone, added)
          select tenant, agent_id, user_name, ${now}, count, 0, count
          from ${INPUT.source}
          order by tenant collate "C", agent_id collate "C", user_name collate "C"
          on conflict (tenant, agent_id, user_name) do update set (at, counted, gone, added) = (
            select next.at, c.counted + excluded.added,
              case when next.at < c.at or next.at - ${WINDOW} >= c.at then c.counted
                else greatest(c.gone, (
                  select max(l.counted) from caller_calls l
                  where l.tenant = c.tenant and l.agent_id = c.agent_id and l.user_name = c.user_name
                    and l.at > c.at - ${WINDOW} and l.at <= next.at - ${WINDOW}))
              end,
              excluded.added
            from (select ${now} as now) as clock,
              lateral (
                select case when clock.now < c.at - ${BACK_MAX} then clock.now else greatest(clock.now, c.at + 1) end as at
              ) as next
          )
          returning tenant, agent_id, user_name, at, counted, gone
        ), logged as (
          insert into caller_calls as l (tenant, agent_id, user_name, at, counted)
          select tenant, agent_id, user_name, at, counted from called
          on conflict (tenant, agent_id, user_name, at) do update set counted = greatest(l.counted, excluded.counted)
        )
        select agent_id, user_name, counted - gone as rate from called`,
      valuesOf: INPUT.values,
      outputsOf(inputs, rows) {
        const rates = new Map(rows.map((row) => [callerOf(row["agent_id"], row["user_name"]), Number(row["rate"])]));
        return inputs.map(({ agentId, user }) => rates.get(callerOf(agentId, user)) ?? Number.NaN);
      },
    },
  };
}

const ROWS_AT_ONCE = 1_000;
/** A caller may look for a call until the call has been outside of the window for as long as the window is. */
const KEPT = 3 * WINDOW;

/**
 * Deletes calls that nobody looks for any more, and those that a wrong clock has left in the future. It skips locked rows, so
 * that it never waits while it holds rows. Both ends of the index are read in order: millions may have gathered.
 */
const forgetCalls = cleaning(
  "forget calls",
  `with clock as materialized (select (extract(epoch from statement_timestamp()) * 1000000)::bigint as now), old as (
     delete from caller_calls where ctid = any(
       array(
         select ctid from caller_calls where at < (select now from clock) - ${KEPT}
         order by at limit ${ROWS_AT_ONCE} for update skip locked)
       || array(
         select ctid from caller_calls where at > (select now from clock) + ${WINDOW}
         order by at desc limit ${ROWS_AT_ONCE} for update skip locked))
     returning tenant, agent_id, user_name
   ), idle as (
     delete from caller_rates where ctid = any(array(
       select c.ctid from caller_rates c
       where (c.tenant, c.agent_id, c.user_name) in (select tenant, agent_id, user_name from old)
         and (c.at < (select now from clock) - ${KEPT} or c.at > (select now from clock) + ${WINDOW})
       for update skip locked))
   )
   select count(*) as rows from old`,
);

/** Removes the calls that no rate counts any more, and says how many. */
export async function removeOldCalls(execute: Store["execute"]): Promise<number> {
  let removed = 0;
  for (let rows = ROWS_AT_ONCE; rows >= ROWS_AT_ONCE; removed += rows) {
    rows = await execute(forgetCalls, null);
  }
  return removed;
}

/** The outcome of `work`, unless that takes more than `ms` of the time in which this process is at work. */
async function inTime<T>(ms: number, work: Promise<T>): Promise<T> {
  const startedAt = performance.now();
  try {
    return await within(ms, work);
  } catch (error) {
    // When a time-out comes this late, the process stood still, and the result may be there already.
    if (performance.now() - startedAt < ms + 250) throw error;
    return within(ms, work);
  }
}

/** @param now milliseconds of a clock that never goes back */
export function createObservedRates({ isShared, execute }: Pick<Store, "isShared" | "execute">, now?: () => number) {
  const own = createCallRates(now);
  const counting = countCalls();
  /** All of the replica's waiting calls of a caller are counted at once. */
  const questions = createBatcher(async (caller: CallingUser, count) => {
    const rate = await execute(counting, { ...caller, count });
    return (index) => rate - count + index + 1;
  });
  return {
    /** Whether other replicas count the calls of a caller too. */
    isShared,
    observe: own.observe,
    /**
     * Counts a call in the database and gives the rate with it. Calls that were counted here alone, before there was a rule,
     * are part of the rate. A call that can't be counted there is counted here.
     * @param msMax how long it may take
     * @throws Fault `unavailable` when the call can't be counted in the database
     */
    async observeShared(caller: CallingUser, msMax: number): Promise<number> {
      try {
        const counted = await inTime(msMax, questions.join(callerOf(caller.agentId, caller.user), caller));
        return counted + own.observed(caller);
      } catch (error) {
        own.observe(caller);
        throw error;
      }
    },
  };
}

export type ObservedRates = ReturnType<typeof createObservedRates>;
