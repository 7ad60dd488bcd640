// The rate limit of an agent, a token bucket. A process that is alone with its database keeps the buckets in memory; time is
// monotonic there and in milliseconds. Where several replicas share a database, the buckets are rows of it, and each replica
// asks for all its waiting calls of an agent in one statement.

import { createGathering } from "../../kernel/batch.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { BURST_DEFAULT, MAX } from "../../kernel/limits.ts";
import { FOR_ALL, inputRows, NOW_MICROSECONDS, type SharedCounter, type Store } from "../../storage/store.ts";

const RATE_DEFAULT = 1;
/** Absorbs rounding errors, so that a caller who waits for Retry-After is let in. */
const TOLERANCE = 1e-6;

export interface Bucket {
  readonly tokens: number;
  /** When it held that many, in milliseconds. */
  readonly at: number;
}

interface Take {
  readonly bucket: Bucket | null;
  /** Null when the token was there; else whole seconds until the next one, 1 to 60. */
  readonly retryAfterSeconds: number | null;
}

/**
 * Takes one token.
 *
 * @param bucket null for one that was never used: it is full
 * @param rate tokens per second; null together with `burst`: unlimited
 */
export function take(bucket: Bucket | null, now: number, rate: number | null, burst: number | null): Take {
  if (rate === null && burst === null) return { bucket, retryAfterSeconds: null };
  const { perSecond, depth } = bucketSize(rate, burst);
  const last = bucket ?? { tokens: depth, at: now };
  const at = Math.max(now, last.at);
  const tokens = Math.min(depth, last.tokens + ((at - last.at) / 1000) * perSecond);
  if (tokens >= 1 - TOLERANCE) {
    return { bucket: { tokens: Math.max(0, tokens - 1), at }, retryAfterSeconds: null };
  }
  // The bucket stays as it was, so that refused calls add no rounding of their own.
  return { bucket, retryAfterSeconds: secondsToTell((1 - tokens) / perSecond) };
}

function bucketSize(rate: number | null, burst: number | null) {
  return { perSecond: rate ?? RATE_DEFAULT, depth: burst ?? BURST_DEFAULT };
}

/** The value of Retry-After when a token comes in so many seconds. */
function secondsToTell(seconds: number): number {
  return Math.min(Math.max(Math.ceil(seconds - TOLERANCE), 1), MAX.retryAfterSeconds);
}

/** The fields of an agent that its rate limit needs. */
interface RateFields {
  readonly id: string;
  readonly invocation_rate_limit: number | null;
  readonly invocation_burst: number | null;
  /** Changes whenever the fields are set, here or on another replica. */
  readonly rate_revision: number;
}

function isLimited(agent: RateFields): boolean {
  return agent.invocation_rate_limit !== null || agent.invocation_burst !== null;
}

/** @param now milliseconds of a clock that never goes back */
export function createRateLimiter(now: () => number = () => performance.now()) {
  const buckets = tenantCache<string, { readonly revision: number; readonly bucket: Bucket }>(MAX.rateBuckets);
  return {
    /** Takes a token of the agent: null, or the whole seconds until there is one. */
    take(tenant: string, agent: RateFields): number | null {
      if (!isLimited(agent)) return null;
      const kept = buckets.get(agent.id);
      const current = kept?.revision === agent.rate_revision ? kept.bucket : null;
      const { bucket, retryAfterSeconds } = take(current, now(), agent.invocation_rate_limit, agent.invocation_burst);
      if (bucket !== null && bucket !== current) {
        buckets.set(tenant, agent.id, { revision: agent.rate_revision, bucket });
      }
      return retryAfterSeconds;
    },
  };
}

export interface Asked {
  readonly tenant: string;
  readonly agentId: string;
  readonly revision: number;
  readonly perSecond: number;
  readonly depth: number;
  /** Tokens. */
  readonly count: number;
}

interface Granted {
  readonly count: number;
  /** Until there is a token again. */
  readonly waitMs: number;
}

/** A rate beyond these would leave the range of the server's numbers. */
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
 * The statement that takes tokens from the buckets of a shared database, by the rule of `take` and the server's clock. An
 * agent without a row has a full bucket. The time is read when the row is locked, so it never runs back from one taker to the
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
 * Deletes buckets that are full again, which mean the same as no row, and those of deleted agents. A bucket that was used a
 * moment ago stays, since a replica may not know of its PATCH yet. A locked bucket is skipped, so that the statement never
 * waits while it holds rows.
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

/** Removes the rows that buckets have left behind. */
export async function removeFullBuckets({ isShared, execute }: Pick<Store, "isShared" | "execute">): Promise<void> {
  if (!isShared) return;
  while ((await execute(forgetBuckets, null)) === ROWS_AT_ONCE);
}

interface RateRefusal {
  /** No token comes before then. */
  readonly until: number;
  /** A token has come by then. */
  readonly tokenAt: number;
}

interface Limited {
  readonly tenant: string;
  readonly agent: RateFields;
}

/**
 * The rate limit of agents that several replicas call. A refusal is remembered until the next token comes, so a flood of
 * refused calls asks the database nothing. Calls that are asked for together come at one moment, so an agent's burst must
 * be as large as their number.
 *
 * @param now milliseconds of a clock that never goes back
 */
export function createSharedRateLimiter(execute: Store["execute"], now: () => number = () => performance.now()) {
  const take = takeTokens();
  const refusals = tenantCache<string, RateRefusal>(MAX.rateRefusals);

  const questions = createGathering(async ({ tenant, agent }: Limited, count) => {
    const { id: agentId, rate_revision: revision, invocation_rate_limit: rate, invocation_burst: burst } = agent;
    const askedAt = now();
    const granted = await execute(take, { tenant, agentId, revision, count, ...bucketSize(rate, burst) });
    if (granted.count < count) {
      // The server read its clock at some moment in between.
      // A refusal is reused for a second at most: the clock of the database may be set, or its buckets lost in a crash.
      const until = askedAt + Math.min(granted.waitMs, 1_000);
      refusals.set(tenant, keyOf(agent), { until, tokenAt: now() + granted.waitMs });
    }
    return (index) => (index < granted.count ? null : secondsToTell(granted.waitMs / 1000));
  });

  return {
    /** Takes a token of the agent: null, or the whole seconds until there is one. */
    take(tenant: string, agent: RateFields): Bun.MaybePromise<number | null> {
      if (!isLimited(agent)) return null;
      const refusal = refusals.get(keyOf(agent));
      if (refusal !== undefined && now() < refusal.until) return secondsToTell((refusal.tokenAt - now()) / 1000);
      return questions.join(keyOf(agent), { tenant, agent });
    },
  };
}

/** The revision is part of the key, since a PATCH starts a full bucket. */
const keyOf = ({ id, rate_revision }: RateFields) => `${id} ${rate_revision}`;
