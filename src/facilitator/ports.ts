// What settling needs from its surroundings; of the chain and the wallets only what it asks of them.
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import type { Store } from "../storage/store.ts";
import type { Authorization, Hex } from "../x402/types.ts";
import type { Limits } from "./guardrails.ts";
import type { Outcomes } from "./outcomes.ts";
import type { ClaimedPayment } from "./payments.ts";

export interface SettleChain {
  /**
   * Whether the token would take it now.
   *
   * @throws Fault `unavailable` when no node gives a sensible answer
   */
  simulate(
    authorization: Authorization,
    signature: Hex,
  ): Promise<{ readonly ok: true; readonly gas: bigint } | { readonly ok: false; readonly reason: string }>;
}

export interface SettleWallet {
  readiness(): Promise<{ readonly ready: true } | { readonly ready: false; readonly reason: string }>;
  /** Resolves when a signed transaction is stored; rejects when certainly none is. Its outcome is announced. */
  send(payment: ClaimedPayment, gas: bigint): Promise<void>;
}

export interface SettleOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly chain: SettleChain;
  readonly wallet: SettleWallet;
  readonly outcomes: Outcomes;
  readonly limits: Limits & { readonly inclusionTimeoutMs: number };
  /** Settlements at work at once; tests lower it. */
  readonly atWorkMax?: number;
}
