// The observed rates of callers in a database that several replicas share, to the microsecond of the server's clock. A row
// for each caller counts all of its calls, and a row for each time it called says how many those were by then: the calls of
// the last minute are all, less those counted in the newest row that is older. So a call costs the same at any rate.
import { FOR_ALL, inputRows, NOW_MICROSECONDS, type SharedCounter, type Store } from "../../storage/store.ts";
import { RATE_WINDOW_MS } from "./observed-rate.ts";

export interface CallsOfCaller {
  readonly tenant: string;
  readonly agentId: string;
  readonly user: string;
  /** How many more there are now. */
  readonly count: number;
}

const WINDOW = RATE_WINDOW_MS * 1000;
/** A clock that was set back by more starts the minute anew. What is less could be two servers' clocks. */
const BACK_MAX = 1_000_000;

const INPUT = inputRows<CallsOfCaller>({
  tenant: ["text", ({ tenant }) => tenant],
  agent_id: ["text", ({ agentId }) => agentId],
  user_name: ["text", ({ user }) => user],
  count: ["bigint", ({ count }) => count],
});

const callerOf = (agentId: unknown, user: unknown) => `${agentId} ${user}`;

/**
 * The statement that counts calls, and gives how many there were in the last minute with them. While it waits for the row
 * of a caller, others may add calls that it does not see, but none that is over a minute old, and it only looks for those.
 *
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
/** A caller may look for a call until it has been over for as long as the window is. */
const KEPT = 3 * WINDOW;

/**
 * What nobody looks for any more, and what a clock that was wrong has left in the future. Who calls just now is passed over,
 * so that nobody waits here while it holds rows. Both ends of the index are read in its order, and no further: millions may
 * have gathered.
 */
const forgetCalls: SharedCounter<null, number> = {
  name: "forget calls",
  kind: "counter",
  tenantOf: () => FOR_ALL,
  bytesOf: () => 0,
  postgres: {
    text: `with clock as materialized (select (extract(epoch from statement_timestamp()) * 1000000)::bigint as now), old as (
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
    valuesOf: () => [],
    outputsOf: (inputs, [row]) => inputs.map(() => Number(row?.["rows"])),
  },
};

/** Removes the calls that no rate counts any more, and says how many. */
export async function removeOldCalls(execute: Store["execute"]): Promise<number> {
  let removed = 0;
  for (let rows = ROWS_AT_ONCE; rows >= ROWS_AT_ONCE; removed += rows) {
    rows = await execute(forgetCalls, null);
  }
  return removed;
}
