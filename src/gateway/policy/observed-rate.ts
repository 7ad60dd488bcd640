// The observed rate: how many calls one caller made to one agent in the last 60 seconds, the present one included. It is a
// sliding-window log, kept for every caller, since a new policy judges by the minute before it. It is exact to the
// millisecond. Calls of one millisecond share an entry, so a caller's memory is bounded at any rate.
//
// Each replica counts its local calls in memory. Once a rule has a rate threshold, the replicas count the caller together, in
// rows of the database, and each adds the calls that it counted in memory before.
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

/** The key of a caller. An agent belongs to one tenant, so the tenant is not part of it. */
const callerOf = (agentId: unknown, user: unknown) => `${agentId} ${user}`;

/** The calls of one caller, oldest first: entry i says that `counts[i]` of them came at `times[i]`. */
interface CallTimes {
  times: number[];
  counts: number[];
  /** The first entry inside the window. */
  first: number;
  /** The sum of the counts from the first entry on. */
  total: number;
}

/** @param now milliseconds of a clock that never goes back */
export function createCallRates(now: () => number = () => performance.now(), callersMax: number = MAX.callersRated) {
  const callers = tenantCache<string, CallTimes>(callersMax);

  return {
    /** Counts a call, and returns this replica's rate with it. */
    observe({ tenant, agentId, user }: CallingUser): number {
      const at = Math.floor(now());
      const key = callerOf(agentId, user);
      let calls = callers.get(key);
      if (calls === undefined) {
        calls = { times: [], counts: [], first: 0, total: 0 };
        callers.set(tenant, key, calls);
      }
      forget(calls, at - RATE_WINDOW_MS);
      add(calls, at);
      return calls.total;
    },
    /** This replica's rate, without counting a call. */
    observed({ agentId, user }: CallingUser): number {
      const calls = callers.get(callerOf(agentId, user));
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

/** Drops the calls at `until` or before. */
function forget(calls: CallTimes, until: number): void {
  const { times, counts } = calls;
  while (calls.first < times.length && (times[calls.first] ?? 0) <= until) {
    calls.total -= counts[calls.first] ?? 0;
    calls.first += 1;
  }
  // The arrays are compacted only when most entries are outside the window, so the amortised cost per call is constant.
  if (calls.first > 32 && calls.first * 2 > times.length) {
    calls.times = times.slice(calls.first);
    calls.counts = counts.slice(calls.first);
    calls.first = 0;
  }
}

/** New calls of a caller, to be counted in the database. */
type CallsOfCaller = CallingUser & { readonly count: number };

const WINDOW = RATE_WINDOW_MS * 1000;
/** Microseconds. A clock set back by more restarts the window; a smaller difference may be one between servers' clocks. */
const BACK_MAX = 1_000_000;

const INPUT = inputRows<CallsOfCaller>({
  tenant: ["text", ({ tenant }) => tenant],
  agent_id: ["text", ({ agentId }) => agentId],
  user_name: ["text", ({ user }) => user],
  count: ["bigint", ({ count }) => count],
});

/**
 * Counts calls, to the microsecond of the server's clock, and returns the rate with them. A row per caller holds the running
 * total of its calls (`counted`), and a row per call time holds the total by then. The rate is the total less that of the
 * newest row outside the window, so a call costs the same at any rate. While the statement waits for the caller's row, others
 * may add calls that it does not see, but none that is over a minute old.
 * @param now SQL for the time in microseconds; for tests
 */
export function countCalls(now: string = NOW_MICROSECONDS): SharedCounter<CallsOfCaller, number> {
  return {
    name: "calls",
    kind: "counter",
    tenantOf: ({ tenant }) => tenant,
    bytesOf: () => 192,
    // One statement can change a row only once, so it takes one input per caller.
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
/** Microseconds that rows are kept: a count may read a row for up to a window's length after it has left the window. */
const KEPT = 3 * WINDOW;

/**
 * Deletes calls that no count reads any more, and calls that a wrong clock left in the future. It skips locked rows, so that
 * it never waits while it holds locks. Both ends of the index are read in order, since millions of rows may have gathered.
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

/** Deletes the calls that no rate counts any more. @returns how many */
export async function removeCountedCalls(execute: Store["execute"]): Promise<number> {
  let removed = 0;
  for (let rows = ROWS_AT_ONCE; rows >= ROWS_AT_ONCE; removed += rows) rows = await execute(forgetCalls, null);
  return removed;
}

/** The result of `work`, within `ms`; time in which the process was suspended does not count. */
async function inTime<T>(ms: number, work: Promise<T>): Promise<T> {
  const startedAt = performance.now();
  try {
    return await within(ms, work);
  } catch (error) {
    // A time-out that fires this late means that the process was suspended, and the result may have arrived meanwhile.
    if (performance.now() - startedAt < ms + 250) throw error;
    return within(ms, work);
  }
}

/** @param now milliseconds of a clock that never goes back */
export function createObservedRates({ isShared, execute }: Pick<Store, "isShared" | "execute">, now?: () => number) {
  const local = createCallRates(now);
  const counting = countCalls();
  /** All waiting calls of a caller on this replica are counted at once. */
  const batcher = createBatcher(async (caller: CallingUser, count) => {
    const rate = await execute(counting, { ...caller, count });
    return (index) => rate - count + index + 1;
  });
  return {
    /** Whether other replicas count calls too. */
    isShared,
    observe: local.observe,
    /**
     * Counts a call in the database, and returns the rate with it. The rate includes calls that this replica counted in memory
     * before there was a rule. A call that can't be counted in the database is counted in memory.
     * @param msMax time limit in milliseconds
     * @throws Fault `unavailable` when the call can't be counted in the database
     */
    async observeShared(caller: CallingUser, msMax: number): Promise<number> {
      try {
        const counted = await inTime(msMax, batcher.join(callerOf(caller.agentId, caller.user), caller));
        return counted + local.observed(caller);
      } catch (error) {
        local.observe(caller);
        throw error;
      }
    },
  };
}

export type ObservedRates = ReturnType<typeof createObservedRates>;
