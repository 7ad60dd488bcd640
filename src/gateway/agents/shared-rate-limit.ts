// The rate limit of an agent that several replicas call: one bucket in the database, of which each replica asks for all its
// waiting calls at once. A refusal holds here until the next token comes, so a flood of refused calls asks nothing. It is
// the burst that must be as large as what comes together: calls that are asked for in one question come at one moment.
import { createGathering } from "../../concurrency/gathered.ts";
import { tenantCache } from "../../concurrency/tenant-cache.ts";
import type { Store } from "../../storage/store.ts";
import { bucketSize, isLimited, type RateFields, secondsToTell } from "./rate-limit.ts";
import { takeTokens } from "./shared-buckets.ts";

/** Beyond it an agent's refusal is forgotten, and the database asked again. */
const REFUSALS_MAX = 10_000;
/** A refusal is believed no longer: the clock of the database may be set, or its buckets lost in a crash. */
const BELIEVED_MS_MAX = 1_000;

interface Refusal {
  /** No token comes before this. */
  readonly until: number;
  /** There is one at the latest then. */
  readonly tokenAt: number;
}

interface Limited {
  readonly tenant: string;
  readonly agent: RateFields;
}

/** @param now milliseconds of a clock that never goes back */
export function createSharedRateLimiter(execute: Store["execute"], now: () => number = () => performance.now()) {
  const take = takeTokens();
  const refusals = tenantCache<string, Refusal>(REFUSALS_MAX);

  const questions = createGathering(async ({ tenant, agent }: Limited, count) => {
    const { id: agentId, rate_revision: revision, invocation_rate_limit: rate, invocation_burst: burst } = agent;
    const askedAt = now();
    const granted = await execute(take, { tenant, agentId, revision, count, ...bucketSize(rate, burst) });
    if (granted.count < count) {
      // The server read its clock at some moment in between.
      const until = askedAt + Math.min(granted.waitMs, BELIEVED_MS_MAX);
      refusals.set(tenant, keyOf(agent), { until, tokenAt: now() + granted.waitMs });
    }
    return (place) => (place < granted.count ? null : secondsToTell(granted.waitMs / 1000));
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

/** With its revision, since a PATCH starts a full bucket. */
const keyOf = ({ id, rate_revision }: RateFields) => `${id} ${rate_revision}`;
