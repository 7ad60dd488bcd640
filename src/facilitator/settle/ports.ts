// What settling needs from its surroundings; of the chain and the wallets only what it asks of them.

import type { Chain } from "../../chain/chain.ts";
import type { TimeSpan } from "../../chain/chain-time.ts";
import type { FindOwnTransfer } from "../../chain/own-transfer.ts";
import type { Log } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import type { Store } from "../../storage/store.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { Verifier } from "../../x402/verifier/verifier.ts";
import type { Limits } from "../payments/guardrails.ts";
import type { PaymentSpans } from "../payments/payment-spans.ts";
import type { ClaimedPayment, SimulatedGas } from "../payments/payments.ts";
import type { SettlementWaiters } from "./waiters.ts";

/** This process does not work for the wallet (any more). Nothing of it is stored, or the wallet's new holder knows of it. */
export class WalletNotHeld extends Error {
  override readonly name = "WalletNotHeld";

  constructor(wallet: Hex) {
    super(`another facilitator works for the wallet ${wallet}`);
  }
}

export type Gas = SimulatedGas;

export interface SettleChain extends Pick<Chain, "isSignedByContract" | "balanceOf" | "hasCode" | "isUsed"> {
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
}

export interface SettleWallet {
  /** Payments that may be under way at once. */
  readonly capacity: number;
  readiness(): Promise<{ readonly ready: true } | { readonly ready: false; readonly reason: string }>;
  /** Wei that a transaction with that gas and signature may cost, at the fees of now. @throws Fault `unavailable` */
  costOf(gas: Gas, signature: Hex): Promise<bigint>;
  /**
   * Resolves when a signed transaction is stored; rejects when certainly none is. Its outcome is announced.
   *
   * @throws WalletNotHeld when the payment is left to the holder of the wallet
   */
  send(payment: ClaimedPayment, gas: Gas): Promise<void>;
  /** Whether this process is to send what is claimed for this wallet; null: for none, by an earlier version. */
  worksFor(wallet: Hex | null): boolean;
  /** Whether this process works for a wallet that has gas. */
  canSend(): boolean;
  /** Whether no other facilitator claims payments for wallets of this process. */
  isAlone(): boolean;
}

export interface SettleOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly meters?: Pick<Meters, "settlement" | "settlementTook">;
  readonly chain: SettleChain;
  readonly wallet: SettleWallet;
  readonly outcomes: SettlementWaiters;
  readonly verifier: Pick<Verifier, "signedBy">;
  readonly limits: Limits & { readonly inclusionTimeoutMs: number };
  /** Left out where traces are off. */
  readonly spans?: PaymentSpans;
  /** Finds what was collected and is not recorded. */
  readonly findOwnTransfer: FindOwnTransfer;
  /** Settlements at work at once, of all accounts together; tests lower it. */
  readonly inFlightMax?: number;
}
