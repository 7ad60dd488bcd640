// The rate limit of an agent: a token bucket, as a pure function of its last state, and a bounded registry of
// the buckets in use, for a process that is alone with its database. Time is monotonic and in milliseconds.

import { tenantCache } from "../../concurrency/tenant-cache.ts";
import { BURST_DEFAULT, RETRY_AFTER_SECONDS_MAX } from "../../core/limits.ts";

/** Buckets that are kept. Beyond it the tenant with the most loses one, and that agent starts with a full bucket. */
const BUCKETS_MAX = 100_000;
const RATE_DEFAULT = 1;
/** Absorbs rounding errors, so that a caller who waits for Retry-After is let in. */
export const TOLERANCE = 1e-6;

export interface Bucket {
  readonly tokens: number;
  /** When it held that many, in milliseconds. */
  readonly at: number;
}

export interface Take {
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

export function bucketSize(rate: number | null, burst: number | null) {
  return { perSecond: rate ?? RATE_DEFAULT, depth: burst ?? BURST_DEFAULT };
}

/** What Retry-After says of a token that comes in so many seconds. */
export function secondsToTell(seconds: number): number {
  return Math.min(Math.max(Math.ceil(seconds - TOLERANCE), 1), RETRY_AFTER_SECONDS_MAX);
}

/** What the rate limit of an agent is made of. */
export interface RateFields {
  readonly id: string;
  readonly invocation_rate_limit: number | null;
  readonly invocation_burst: number | null;
  /** Changes whenever the fields are set, here or on another replica. */
  readonly rate_revision: number;
}

export function isLimited(agent: RateFields): boolean {
  return agent.invocation_rate_limit !== null || agent.invocation_burst !== null;
}

/** @param now milliseconds of a clock that never goes back */
export function createRateLimiter(now: () => number = () => performance.now()) {
  const buckets = tenantCache<string, { readonly revision: number; readonly bucket: Bucket }>(BUCKETS_MAX);
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
