// What a call needs of its agent: the agent's row, and a token of its rate limit. Rows are read in batches and cached for a
// second: a query for each call took more of the gateway and of Postgres than all else about an accept (measured with a
// thousand busy agents). A change by this process is in force when it is acknowledged; a change by another replica is in force
// when the cached row expires (decisions.md, section 4, allows 2 s).
import type { Tables } from "../../../db/schema.ts";
import { isId } from "../../core/id.ts";
import { createBatcher } from "../../kernel/batch.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { BURST_DEFAULT, MAX } from "../../kernel/limits.ts";
import { askTogether } from "../../storage/failures.ts";
import type { Command, SharedCounter, Store } from "../../storage/store.ts";
import { FOR_ALL, foundBy, inputRows, NOW_MICROSECONDS } from "../../storage/store.ts";

/** An agent without the columns that only the catalog shows. */
export type InvocableAgent = Omit<Tables["agents"]["$inferSelect"], CatalogColumn>;
type CatalogColumn = "tenant" | "name" | "description" | "tags" | "metadata" | "mcp_transport" | AuthorColumn;
type AuthorColumn = "created_by" | "created_at" | "updated_at";

interface AgentKey {
  readonly tenant: string;
  readonly id: string;
}

const SELECTED = `a.id, a.upstream_url, a.credential_ref, a.suspended, a.invocation_rate_limit, a.invocation_burst,
  a.rate_revision, a.emit_receipts, a.capture_body, a.protocol, a.mcp_protocol_version, a.pricing, a.deleted_at`;

const INPUT = inputRows<AgentKey>({ tenant: ["text", ({ tenant }) => tenant], id: ["text", ({ id }) => id] });

/** Converts a row: the two databases return numbers and booleans in different types. */
function agentOf(row: Readonly<Record<string, unknown>>): InvocableAgent {
  const { n: _number, ...fields } = row;
  const whole = (name: string) => (row[name] === null ? null : Number(row[name]));
  return {
    ...(fields as unknown as InvocableAgent),
    suspended: Boolean(row["suspended"]),
    invocation_rate_limit: whole("invocation_rate_limit"),
    invocation_burst: whole("invocation_burst"),
    rate_revision: Number(row["rate_revision"]),
    emit_receipts: Boolean(row["emit_receipts"]),
    capture_body: Boolean(row["capture_body"]),
    deleted_at: whole("deleted_at"),
  };
}

export const agentLookUp: Command<AgentKey, InvocableAgent | null> = {
  name: "agent",
  kind: "look_up",
  tenantOf: ({ tenant }) => tenant,
  bytesOf: () => 128,
  sqlite(prepare) {
    const find = prepare(`select ${SELECTED} from agents a where a.tenant = ? and a.id = ?`);
    return ({ tenant, id }) => {
      const row = find.get(tenant, id);
      return row === null ? null : agentOf(row);
    };
  },
  postgres: {
    text: `select input.n, ${SELECTED} from ${INPUT.source}, agents a where a.tenant = input.tenant and a.id = input.id`,
    valuesOf: INPUT.values,
    outputsOf: foundBy(agentOf),
  },
};

/** The agent, even an inactive one; null when the tenant has none with this ID. */
export const findAgent = async ({ execute }: Pick<Store, "execute">, tenant: string, id: string) =>
  isId("agt", id) ? execute(agentLookUp, { tenant, id }) : null;

/** The approximate size of a cached agent without its prices. */
const AGENT_CHARACTERS = 512;

const keyOf = (tenant: string, id: string) => `${id} ${tenant}`;

/** @param now milliseconds of a monotonic clock */
export function createAgentCache(store: Pick<Store, "execute">, now: () => number = () => performance.now()) {
  /** Agents by ID. An ID belongs to one tenant. */
  const cache = tenantCache<string, { tenant: string; agent: InvocableAgent; until: number }>(MAX.agentsCharacters);
  /** Agents being read. `forget` removes an agent that changes meanwhile, since the read may return its old state. */
  const reading = new Set<string>();

  const reads = createBatcher(async ({ tenant, id }: AgentKey) => {
    const hit = cached(tenant, id);
    if (hit !== undefined) return () => hit;
    const key = keyOf(tenant, id);
    const until = now() + 1_000;
    reading.add(key);
    let isUnchanged = false;
    const agent = await findAgent(store, tenant, id).finally(() => {
      isUnchanged = reading.delete(key);
    });
    if (isUnchanged && agent !== null) {
      cache.set(tenant, id, { tenant, agent, until }, AGENT_CHARACTERS + (agent.pricing?.length ?? 0));
    }
    return () => agent;
  });

  /** Serves nearly every call: returns an agent that was read less than a second ago. */
  function cached(tenant: string, id: string): InvocableAgent | undefined {
    const entry = cache.get(id);
    return entry?.tenant === tenant && now() < entry.until ? entry.agent : undefined;
  }

  return {
    cached,
    async find(tenant: string, id: string): Promise<InvocableAgent | null> {
      const agent = cached(tenant, id);
      if (agent !== undefined || !isId("agt", id)) return agent ?? null;
      return askTogether(reads.join(keyOf(tenant, id), { tenant, id }));
    },
    /** Must be called after a write that may have changed the agent, before the write is acknowledged. */
    forget(tenant: string, id: string) {
      reading.delete(keyOf(tenant, id));
      cache.delete(id);
    },
  };
}

export type AgentCache = ReturnType<typeof createAgentCache>;

// The rate limit of an agent is a token bucket: in memory where a process has the database to itself, else a row of the
// database, from which a replica takes the tokens for all its waiting calls of an agent by one statement.

const RATE_DEFAULT = 1;
/** Tokens. Absorbs rounding errors, so that a caller who waits as long as Retry-After says is admitted. */
const TOLERANCE = 1e-6;

export interface Bucket {
  readonly tokens: number;
  /** When the bucket held that many tokens, in milliseconds. */
  readonly at: number;
}

interface TakeResult {
  readonly bucket: Bucket | null;
  /** Null when a token was taken; else whole seconds until the next one, 1 to 60. */
  readonly retryAfterSeconds: number | null;
}

/** Takes one token, if there is one. @param bucket null for a bucket never used, which is full @param rate tokens per second */
export function take(bucket: Bucket | null, now: number, rate: number | null, burst: number | null): TakeResult {
  if (rate === null && burst === null) return { bucket, retryAfterSeconds: null };
  const { perSecond, depth } = bucketSize(rate, burst);
  const last = bucket ?? { tokens: depth, at: now };
  const at = Math.max(now, last.at);
  const tokens = Math.min(depth, last.tokens + ((at - last.at) / 1000) * perSecond);
  if (tokens >= 1 - TOLERANCE) return { bucket: { tokens: Math.max(0, tokens - 1), at }, retryAfterSeconds: null };
  // The bucket is returned unchanged, so that refused calls add no rounding errors.
  return { bucket, retryAfterSeconds: retryAfter((1 - tokens) / perSecond) };
}

function bucketSize(rate: number | null, burst: number | null) {
  return { perSecond: rate ?? RATE_DEFAULT, depth: burst ?? BURST_DEFAULT };
}

/** The Retry-After value for a token that comes in so many seconds. */
const retryAfter = (seconds: number) => Math.min(Math.max(Math.ceil(seconds - TOLERANCE), 1), MAX.retryAfterSeconds);

type RateFields = Pick<InvocableAgent, "id" | "invocation_rate_limit" | "invocation_burst" | "rate_revision">;

const isLimited = (agent: RateFields) => agent.invocation_rate_limit !== null || agent.invocation_burst !== null;

export interface RateLimiter {
  /** Takes a token as `take` does, but without the database; undefined when the database must be asked. */
  takeNow(tenant: string, agent: RateFields): number | null | undefined;
  /** Takes a token of the agent: null if there was one, else the whole seconds until there is. */
  take(tenant: string, agent: RateFields): Promise<number | null>;
}

/** The rate limiter of a single process. @param now milliseconds of a monotonic clock */
export function createRateLimiter(now: () => number = () => performance.now()): RateLimiter {
  const buckets = tenantCache<string, { readonly revision: number; readonly bucket: Bucket }>(MAX.rateBuckets);
  function takeNow(tenant: string, agent: RateFields): number | null {
    if (!isLimited(agent)) return null;
    const kept = buckets.get(agent.id);
    const current = kept?.revision === agent.rate_revision ? kept.bucket : null;
    const { bucket, retryAfterSeconds } = take(current, now(), agent.invocation_rate_limit, agent.invocation_burst);
    if (bucket !== null && bucket !== current) buckets.set(tenant, agent.id, { revision: agent.rate_revision, bucket });
    return retryAfterSeconds;
  }

  return { takeNow, take: async (tenant, agent) => takeNow(tenant, agent) };
}

/** Calls of an agent that ask for tokens together. */
export interface TokensWanted {
  readonly tenant: string;
  readonly agentId: string;
  readonly revision: number;
  readonly perSecond: number;
  readonly depth: number;
  readonly count: number;
}

/** Rates outside these bounds would overflow or underflow the server's floating-point numbers. */
const [RATE_MIN, RATE_MAX] = [1e-15, 1e15];

const TOKEN_INPUT = inputRows<TokensWanted>({
  tenant: ["text", ({ tenant }) => tenant],
  agent_id: ["text", ({ agentId }) => agentId],
  revision: ["bigint", ({ revision }) => revision],
  rate: ["double precision", ({ perSecond }) => Math.min(Math.max(perSecond, RATE_MIN), RATE_MAX)],
  depth: ["double precision", ({ depth }) => depth],
  count: ["bigint", ({ count }) => count],
});

/** SQL of the tokens in the bucket of a row at a time in microseconds. */
const level = (row: string, now: string) =>
  `least(${row}.depth, ${row}.tokens + greatest(${now} - ${row}.filled_at, 0) * ${row}.rate / 1000000)`;

/**
 * Takes tokens from the buckets of a shared database, by the rule of `take` and the server's clock. An agent without a row has
 * a full bucket. The time is read after the row is locked, so it goes back only if the clock is set; the bucket then fills from
 * the new time on. A replica that still has the agent as it was before a PATCH takes from the new bucket all the same.
 * @param now SQL of the time in microseconds; for tests
 */
export function takeTokens(now: string = NOW_MICROSECONDS): SharedCounter<TokensWanted, ReturnType<typeof grantedOf>> {
  return {
    name: "tokens",
    kind: "counter",
    tenantOf: ({ tenant }) => tenant,
    bytesOf: () => 192,
    // One statement can change a row only once.
    keyOf: ({ agentId }) => agentId,
    postgres: {
      text: `insert into agent_buckets as b (tenant, agent_id, revision, rate, depth, tokens, filled_at, granted)
        select tenant, agent_id, revision, rate, depth, depth - least(count, depth), ${now}, least(count, depth)
        from ${TOKEN_INPUT.source}
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
      valuesOf: TOKEN_INPUT.values,
      outputsOf(inputs, rows) {
        const byAgent = new Map(rows.map((row) => [row["agent_id"], row]));
        return inputs.map(({ agentId }) => grantedOf(byAgent.get(agentId) ?? {}));
      },
    },
  };
}

/** The number of tokens taken, and the time until the bucket has one again. */
function grantedOf(row: Readonly<Record<string, unknown>>) {
  const missing = 1 - Number(row["tokens"]);
  return { count: Number(row["granted"]), waitMs: Math.max(missing / Number(row["rate"]), 0) * 1000 };
}

const ROWS_AT_ONCE = 1_000;

/**
 * Deletes the buckets that are full again, which equal a missing row, and those of deleted agents. Buckets used in the
 * last minute stay, since a replica may not know a new revision yet. Skips locked rows: it never waits with locks.
 */
const deleteFullBuckets = cleaning(
  "forget buckets",
  `with clock as materialized (select ${NOW_MICROSECONDS} as now), forgotten as (
     delete from agent_buckets where ctid = any(array(
       select b.ctid from agent_buckets b, clock
       where abs(clock.now - b.filled_at) > 60000000 and (
         ${level("b", "clock.now")} >= b.depth or not exists (
           select from agents a where a.tenant = b.tenant and a.id = b.agent_id and a.deleted_at is null))
       limit ${ROWS_AT_ONCE} for update of b skip locked))
     returning 1)
   select count(*) as rows from forgotten`,
);

/** A statement of a shared database that deletes rows and returns their number as `rows`. */
export function cleaning(name: string, text: string): SharedCounter<null, number> {
  const outputsOf = (inputs: readonly null[], [row]: readonly Readonly<Record<string, unknown>>[]) =>
    inputs.map(() => Number(row?.["rows"]));
  return {
    name,
    kind: "counter",
    tenantOf: () => FOR_ALL,
    bytesOf: () => 0,
    postgres: { text, valuesOf: () => [], outputsOf },
  };
}

export async function removeFullBuckets({ isShared, execute }: Pick<Store, "isShared" | "execute">): Promise<void> {
  if (!isShared) return;
  while ((await execute(deleteFullBuckets, null)) === ROWS_AT_ONCE);
}

/**
 * The rate limiter of several replicas. A refusal is cached until the next token comes, so that a flood of refused calls costs
 * no queries. Calls whose tokens are taken by one statement count as simultaneous, so the burst must cover their number.
 */
export function createSharedRateLimiter(
  execute: Store["execute"],
  now: () => number = () => performance.now(),
): RateLimiter {
  const take = takeTokens();
  /** No token comes before `until`; by `tokenAt` there is one. */
  const refusals = tenantCache<string, { readonly until: number; readonly tokenAt: number }>(MAX.rateRefusals);

  const takes = createBatcher(async (of: { readonly tenant: string; readonly agent: RateFields }, count) => {
    const { tenant, agent } = of;
    const { id: agentId, rate_revision: revision, invocation_rate_limit: rate, invocation_burst: burst } = agent;
    const askedAt = now();
    const granted = await execute(take, { tenant, agentId, revision, count, ...bucketSize(rate, burst) });
    if (granted.count < count) {
      // The server read its clock at some time between the request and the answer, hence two bounds. A refusal is reused for a
      // second at most: the database's clock may be set, or its buckets lost in a crash.
      const until = askedAt + Math.min(granted.waitMs, 1_000);
      refusals.set(tenant, bucketKey(agent), { until, tokenAt: now() + granted.waitMs });
    }
    return (index) => (index < granted.count ? null : retryAfter(granted.waitMs / 1000));
  });

  function takeNow(_: string, agent: RateFields): number | null | undefined {
    if (!isLimited(agent)) return null;
    const refusal = refusals.get(bucketKey(agent));
    if (refusal === undefined || now() >= refusal.until) return undefined;
    return retryAfter((refusal.tokenAt - now()) / 1000);
  }

  return {
    takeNow,
    async take(tenant, agent) {
      const taken = takeNow(tenant, agent);
      return taken === undefined ? askTogether(takes.join(bucketKey(agent), { tenant, agent })) : taken;
    },
  };
}

/** The key includes the revision, since a PATCH of the rate fields starts a full bucket. */
const bucketKey = ({ id, rate_revision }: RateFields) => `${id} ${rate_revision}`;
