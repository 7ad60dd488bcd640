// What settling needs from its surroundings; of the chain and the wallets only what it asks of them.
import type { Clock } from "../../core/clock.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { Limits } from "../guardrails.ts";
import type { ClaimedPayment } from "../payments.ts";
import type { Balance } from "./held-funds.ts";
import type { TimeSpan } from "./request.ts";
import type { SettlementWaiters } from "./waiters.ts";

/** What a simulation found: it holds for the wallet that it was made for. */
export interface Gas {
  readonly limit: bigint;
  readonly from: Hex;
}

export interface SettleChain {
  /**
   * Whether the token would take it now, from the wallet that would send it.
   *
   * @throws Fault `unavailable` when no node gives a sensible answer
   */
  simulate(
    authorization: Authorization,
    signature: Hex,
  ): Promise<{ readonly ok: true; readonly gas: Gas } | { readonly ok: false; readonly reason: string }>;
  /**
   * The time of day by the chain: it decides whether a payment is good yet, or no more.
   *
   * @throws Fault `unavailable` when no node tells
   */
  time(): Promise<TimeSpan>;
  /** Whether the payer is a contract wallet that takes this for its signature now. @throws Fault `unavailable` */
  isSignedByContract(authorization: Authorization, signature: Hex): Promise<boolean>;
  /** Of the token, at the end of the newest block. @throws Fault `unavailable` */
  balanceOf(payer: Hex): Promise<Balance>;
  /** Whether the payer has code at the end of this block: then that decides whether a transfer reverts. */
  hasCode(address: Hex, at: { readonly number: number; readonly hash: Hex }): Promise<boolean>;
  /** Whether the authorization had been used or cancelled by the end of this block. @throws Error when no node tells */
  isUsed(
    authorization: Pick<Authorization, "from" | "nonce">,
    at: { readonly number: number; readonly hash: Hex },
  ): Promise<boolean>;
}

export interface SettleWallet {
  /** Payments that may be under way at once. */
  readonly capacity: number;
  readiness(): Promise<{ readonly ready: true } | { readonly ready: false; readonly reason: string }>;
  /** Wei that a transaction with that gas may cost, at the fees of now. @throws Fault `unavailable` */
  costOf(gas: Gas): Promise<bigint>;
  /** Resolves when a signed transaction is stored; rejects when certainly none is. Its outcome is announced. */
  send(payment: ClaimedPayment, gas: Gas): Promise<void>;
}

export interface SettleOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly chain: SettleChain;
  readonly wallet: SettleWallet;
  readonly outcomes: SettlementWaiters;
  readonly limits: Limits & { readonly inclusionTimeoutMs: number };
  /** Settlements at work at once, of all accounts together; tests lower it. */
  readonly atWorkMax?: number;
}
