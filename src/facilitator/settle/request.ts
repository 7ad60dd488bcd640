// One request to collect a payment, with what every step needs of it; whether it asks for the same as a record; and what
// settling needs from its surroundings.
import type { Chain } from "../../chain/chain.ts";
import type { TimeSpan } from "../../chain/chain-time.ts";
import type { FindOwnTransfer } from "../../chain/own-transfer.ts";
import type { Log } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import type { Store } from "../../storage/store.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import { canonicalSignature } from "../../x402/eip3009.ts";
import { NETWORK, SCHEME } from "../../x402/kind.ts";
import type { Hex, Payment, PaymentKey, Requirements } from "../../x402/types.ts";
import type { Verifier } from "../../x402/verifier/verifier.ts";
import { checkWindow, keyOf, type SignedBy } from "../../x402/verify.ts";
import { type FacilitatorAccount, type Limits, limitsOf } from "../payments/guardrails.ts";
import type { PaymentSpans } from "../payments/payment-spans.ts";
import type { FacilitatorPayment } from "../payments/payments.ts";
import type { Wallet } from "../wallet/wallet.ts";
import type { SettlementWaiters } from "./waiters.ts";

/** A payment must be valid for at least this much longer, or it would miss the next block and waste its gas. */
const SPARE_SECONDS = 3;

/** Of the chain and the wallets only what settling asks of them. */
export interface SettleOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly meters?: Pick<Meters, "settlement" | "settlementTook">;
  readonly chain: Pick<Chain, "isSignedByContract" | "balanceOf" | "hasCode" | "isUsed"> &
    Pick<Wallet, "simulate"> & {
      /** The time of day by the chain: it decides whether a payment is good yet, or no more. @throws Fault `unavailable` */
      time(): Promise<TimeSpan>;
    };
  readonly wallet: Pick<Wallet, "capacity" | "readiness" | "costOf" | "send" | "worksFor" | "canSend" | "isAlone">;
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

export interface SettlementRequest {
  readonly account: string;
  readonly limits: Limits;
  readonly key: PaymentKey;
  readonly payment: Payment;
  readonly requirements: Requirements;
  /** Whose signature it is. If it isn't the payer's own, it may be a contract wallet's, which only the chain can judge. */
  readonly signedBy: SignedBy;
  readonly named: Named;
}

/** A payment in the log: never with its signature. */
export interface Named {
  readonly account: string;
  readonly payer: Hex;
  readonly nonce: Hex;
}

export function settlementRequest(
  account: FacilitatorAccount,
  request: SettleRequest,
  defaults: Limits,
  signedBy: SignedBy,
): SettlementRequest {
  const { payment, requirements } = request;
  const { from: payer, nonce } = payment.authorization;
  // The token refuses v 0 and 1. A contract wallet may read its signature in any way, so that stays as it is.
  const canonical = signedBy === "payer" ? canonicalSignature(payment.signature) : null;
  return {
    account: account.name,
    limits: limitsOf(account, defaults),
    key: keyOf(payment.authorization),
    payment: { ...payment, signature: canonical ?? payment.signature },
    requirements,
    signedBy,
    named: { account: account.name, payer, nonce },
  };
}

/** A problem ends the payment for good, so it must hold for the whole span of time. */
export function windowProblem(
  { payment }: { readonly payment: Pick<Payment, "authorization"> },
  { earliest, latest }: TimeSpan,
) {
  const at = (now: number) => checkWindow(payment.authorization, Math.floor(now / 1000), SPARE_SECONDS);
  return at(earliest) === at(latest) ? at(latest) : null;
}

/** One text for one set of requirements: the fields in one order, integers as decimals, hex in lower case. */
export function requirementsText(requirements: Requirements): string {
  const { scheme, network, maxAmountRequired, asset, payTo, resource, maxTimeoutSeconds } = requirements;
  return JSON.stringify({
    scheme,
    network,
    maxAmountRequired: String(maxAmountRequired),
    asset,
    payTo,
    resource,
    maxTimeoutSeconds,
  });
}

/** Account, authorization and requirements, all fields. Payer and nonce are the record's key, so they are the same. */
export function isSameTerms(record: FacilitatorPayment, { account, payment, ...rest }: SettlementRequest): boolean {
  const { authorization, signature, scheme, network } = payment;
  return (
    record.account === account &&
    scheme === SCHEME &&
    network === NETWORK &&
    record.pay_to === authorization.to &&
    record.value === String(authorization.value) &&
    record.valid_after === String(authorization.validAfter) &&
    record.valid_before === String(authorization.validBefore) &&
    record.requirements === requirementsText(rest.requirements) &&
    (rest.signedBy === "payer" || record.signature === signature)
  );
}
