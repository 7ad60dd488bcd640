// One request to collect a payment, with what every step needs of it, and whether it asks for the same as a record. Pure.
import type { TimeSpan } from "../../chain/chain-time.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import { canonicalSignature } from "../../x402/eip3009.ts";
import { NETWORK, SCHEME } from "../../x402/kind.ts";
import type { Hex, Payment, PaymentKey, Requirements } from "../../x402/types.ts";
import { checkWindow, keyOf, type SignedBy } from "../../x402/verify.ts";
import { type FacilitatorAccount, type Limits, limitsOf } from "../payments/guardrails.ts";
import type { FacilitatorPayment } from "../payments/payments.ts";

/** A payment must be valid for at least this much longer, or it would miss the next block and waste its gas. */
const SPARE_SECONDS = 3;

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
