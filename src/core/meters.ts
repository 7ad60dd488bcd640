// The interface through which the product counts and measures. Metric names and types are known to src/metrics alone. Only
// the event of `ended` holds a tenant, agent and caller, and src/metrics makes no label of them.
import type { CallEndListener } from "./call.ts";
import type { PolicyAction } from "./states.ts";

/** The gateway's decision on the payment of a priced call, before it is settled. Idempotent repetitions are not counted. */
export const PAYMENT_OUTCOMES = ["required", "refused", "crowded", "accepted"] as const;

/**
 * Outcomes of settling a payment. The gateway counts `settled`, `declined`, `expired` and `given_up` once for a payment, and
 * for each inconclusive attempt `unknown`, or `unsent` if nothing was sent. The facilitator counts `settled`, `failed` and
 * `reorganised` once for each change of a record, and `refused` or `over_limit` for each request.
 */
export const SETTLEMENT_OUTCOMES = [
  ...["settled", "declined", "expired", "given_up", "unknown", "unsent"],
  ...["failed", "reorganised", "refused", "over_limit"],
] as const;

export interface QueueSize {
  readonly calls: number;
  /** Age of the call that waits longest; 0 when none waits. */
  readonly oldestMs: number;
}

/** Values that are read at each scrape. */
export interface GaugeSources {
  /** The queue of the whole deployment. */
  readonly queue?: () => Promise<QueueSize>;
  readonly running?: () => number;
  /** Use of this process's limits, by their names in kernel/limits.ts. */
  readonly inUse?: () => Readonly<Record<string, number>>;
  /** The wallets' balances in wei, by address; rejects when no node tells them. */
  readonly balances?: () => Promise<readonly (readonly [address: string, wei: bigint])[]>;
}

export interface Meters {
  /** Counts a new call: one answered with 202, or begun on the streaming path. */
  accepted(): void;
  readonly ended: CallEndListener;
  policyDecided(action: PolicyAction): void;
  payment(outcome: (typeof PAYMENT_OUTCOMES)[number]): void;
  settlement(outcome: (typeof SETTLEMENT_OUTCOMES)[number]): void;
  settlementTook(ms: number): void;
  rpcFailed(endpoint: number): void;
  /** Records by how many milliseconds the main thread's event loop was late. */
  loopLate(ms: number): void;
  /** @returns a function that records an answered request of a service with these routes */
  requestsTo(routes: readonly { readonly path: string }[]): (path: string, status: number, ms: number) => void;
  gauges(sources: GaugeSources): void;
}

export const silentMeters: Meters = {
  accepted() {},
  ended() {},
  policyDecided() {},
  payment() {},
  settlement() {},
  settlementTook() {},
  rpcFailed() {},
  loopLate() {},
  requestsTo: () => () => {},
  gauges() {},
};
