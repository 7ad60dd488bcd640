// The port of what is counted and measured. Names and forms of the metrics are in src/metrics; what counts knows none
// of them. No tenant, agent or caller passes here, so none can become a label.
import type { CallEndListener } from "./call.ts";
import type { PolicyAction } from "./states.ts";

/** What a priced call's payment came to at the gateway, before it is settled. Requests that repeat a call are not counted. */
export const PAYMENT_OUTCOMES = ["required", "refused", "crowded", "accepted"] as const;
export type PaymentOutcome = (typeof PAYMENT_OUTCOMES)[number];

/**
 * What settling a payment came to. Of the gateway: `settled`, `declined`, `expired`, `given_up`, each once for a payment,
 * and for each attempt that left it open `unknown`, or `unsent` if nothing had left. Of the facilitator: `settled`,
 * `failed`, `reorganised`, each once for a change of a record, and for each request `refused` or `over_limit`.
 */
export const SETTLEMENT_OUTCOMES = [
  "settled",
  "declined",
  "expired",
  "given_up",
  "unknown",
  "unsent",
  "failed",
  "reorganised",
  "refused",
  "over_limit",
] as const;
export type SettlementOutcome = (typeof SETTLEMENT_OUTCOMES)[number];

export interface QueueSize {
  readonly calls: number;
  /** Of the one that waits longest; 0 when none does. */
  readonly oldestMs: number;
}

/** What is read when somebody asks for the metrics. */
export interface GaugeSources {
  /** Of the whole deployment. */
  readonly queue?: () => Promise<QueueSize>;
  /** Calls that this process makes now. */
  readonly running?: () => number;
  /** How much of the bounds of this process is in use, by their names in kernel/limits.ts. */
  readonly inUse?: () => Readonly<Record<string, number>>;
  /** In wei, by address; rejects when they cannot be known. */
  readonly balances?: () => Promise<readonly (readonly [address: string, wei: bigint])[]>;
}

export interface Meters {
  /** A new call was answered 202, or is begun on the streaming path. */
  accepted(): void;
  readonly ended: CallEndListener;
  policyDecided(action: PolicyAction): void;
  payment(outcome: PaymentOutcome): void;
  settlement(outcome: SettlementOutcome): void;
  settlementTook(ms: number): void;
  rpcFailed(endpoint: number): void;
  /** The main thread's event loop was late by so much. */
  loopLate(ms: number): void;
  /** For a service with these routes: takes an answered request. */
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
