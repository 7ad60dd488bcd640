// The token buckets of agents in a database that several replicas share: a row for each, which one statement fills up and
// takes from, by the server's clock. The rule is that of rate-limit.ts. No row is a full bucket.
import { FOR_ALL, inputRows, NOW_MICROSECONDS, type SharedCounter, type Store } from "../../storage/store.ts";
import { TOLERANCE } from "./rate-limit.ts";

export interface Asked {
  readonly tenant: string;
  readonly agentId: string;
  readonly revision: number;
  readonly perSecond: number;
  readonly depth: number;
  /** How many tokens. */
  readonly count: number;
}

export interface Granted {
  readonly count: number;
  /** Until there is a token again. */
  readonly waitMs: number;
}

/** A rate so far from all that can be measured would leave the range of the server's numbers. */
const [RATE_MIN, RATE_MAX] = [1e-15, 1e15];

const INPUT = inputRows<Asked>({
  tenant: ["text", ({ tenant }) => tenant],
  agent_id: ["text", ({ agentId }) => agentId],
  revision: ["bigint", ({ revision }) => revision],
  rate: ["double precision", ({ perSecond }) => Math.min(Math.max(perSecond, RATE_MIN), RATE_MAX)],
  depth: ["double precision", ({ depth }) => depth],
  count: ["bigint", ({ count }) => count],
});

const level = (row: string, now: string) =>
  `least(${row}.depth, ${row}.tokens + greatest(${now} - ${row}.filled_at, 0) * ${row}.rate / 1000000)`;

/**
 * The statement that takes tokens. The time is read when the row is locked, so it never runs back from one taker to the
 * next unless the clock was set: then the bucket stays as it is and fills up from there. A replica that does not know of
 * a PATCH yet takes from the bucket that came with it.
 *
 * @param now what gives the time in microseconds; for tests
 */
export function takeTokens(now: string = NOW_MICROSECONDS): SharedCounter<Asked, Granted> {
  return {
    name: "tokens",
    kind: "counter",
    tenantOf: ({ tenant }) => tenant,
    bytesOf: () => 192,
    // A statement changes a row once.
    keyOf: ({ agentId }) => agentId,
    postgres: {
      text: `insert into agent_buckets as b (tenant, agent_id, revision, rate, depth, tokens, filled_at, granted)
        select tenant, agent_id, revision, rate, depth, depth - least(count, depth), ${now}, least(count, depth)
        from ${INPUT.source}
        order by tenant collate "C", agent_id collate "C"
        on conflict (tenant, agent_id) do update set (revision, rate, depth, tokens, filled_at, granted) = (
          select bucket.revision, bucket.rate, bucket.depth, bucket.tokens - taken.count, clock.now, taken.count
          from (select ${now} as now) as clock,
            lateral (
              select excluded.revision, excluded.rate, excluded.depth, excluded.depth as tokens
              where excluded.revision > b.revision
              union all
              select b.revision, b.rate, b.depth, ${level("b", "clock.now")}
              where excluded.revision <= b.revision
            ) as bucket,
            lateral (
              select greatest(least(excluded.granted, floor(bucket.tokens + ${TOLERANCE})), 0) as count
            ) as taken
        )
        returning agent_id, granted, tokens, rate`,
      valuesOf: INPUT.values,
      outputsOf(inputs, rows) {
        const byAgent = new Map(rows.map((row) => [row["agent_id"], row]));
        return inputs.map(({ agentId }) => grantedOf(byAgent.get(agentId) ?? {}));
      },
    },
  };
}

function grantedOf(row: Readonly<Record<string, unknown>>): Granted {
  const missing = 1 - Number(row["tokens"]);
  return { count: Number(row["granted"]), waitMs: Math.max(missing / Number(row["rate"]), 0) * 1000 };
}

const ROWS_AT_ONCE = 1_000;

/**
 * Buckets that are full again say no more than none does, and those of deleted agents nothing. One that was taken from a
 * moment ago stays, since a replica may not know of its PATCH yet. Who is being taken from is passed over, so that nobody
 * waits here while it holds rows.
 */
const forgetBuckets: SharedCounter<null, number> = {
  name: "forget buckets",
  kind: "counter",
  tenantOf: () => FOR_ALL,
  bytesOf: () => 0,
  postgres: {
    text: `with clock as materialized (select ${NOW_MICROSECONDS} as now), forgotten as (
        delete from agent_buckets where ctid = any(array(
          select b.ctid from agent_buckets b, clock
          where abs(clock.now - b.filled_at) > 60000000 and (
            ${level("b", "clock.now")} >= b.depth or not exists (
              select from agents a where a.tenant = b.tenant and a.id = b.agent_id and a.deleted_at is null))
          limit ${ROWS_AT_ONCE} for update of b skip locked))
        returning 1)
      select count(*) as rows from forgotten`,
    valuesOf: () => [],
    outputsOf: (inputs, [row]) => inputs.map(() => Number(row?.["rows"])),
  },
};

/** Removes what the buckets of agents have left behind. */
export async function removeFullBuckets({ isShared, execute }: Pick<Store, "isShared" | "execute">): Promise<void> {
  if (!isShared) return;
  while ((await execute(forgetBuckets, null)) === ROWS_AT_ONCE);
}
