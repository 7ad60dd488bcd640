// The gate of a priced call, without a database: the price that is demanded, the payment in the headers, and whether
// the payment meets the demand. Callers learn only that a payment failed; the exact reason is for the log.
import { Fault } from "../../core/fault.ts";
import { checksummed } from "../../x402/address.ts";
import {
  type AcceptedTerms,
  acceptedMatches,
  challenge,
  decodePaymentHeader,
  decodePaymentSignature,
  type Parsed,
  requirementsFrom,
  requirementsOf,
  type WireRequirements,
} from "../../x402/codec.ts";
import { canonicalSignature } from "../../x402/eip3009.ts";
import type { Payment } from "../../x402/types.ts";
import { checkRequirements, checkWindow, type SignedBy } from "../../x402/verify.ts";
import type { RestoreGuard } from "./restored.ts";

/** How long a payment must still be valid when it comes in: the time that settling takes. */
const MARGIN_SECONDS = 6;
/** A name or address, with or without a port. Anything else in the header must not get into a URL for others. */
const HOST = /^(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::\d{1,5})?$/i;

export interface PresentedPayment {
  readonly payment: Payment;
  /** What a version 2 payment says that it answers. */
  readonly accepted: AcceptedTerms | null;
}

export const refused = () => new Fault("payment_required", "the payment could not be verified");
export const declined = (headers: Readonly<Record<string, string>>) => {
  const error = "the payment could not be settled";
  return new Fault("payment_required", error, { answer: { body: { error }, headers } });
};

/** @throws Fault `invalid_request` when the call carries payments of both versions */
export function paymentHeaders(headers: Headers): { v1: string | null; v2: string | null } {
  const [v1, v2] = [headers.get("x-payment"), headers.get("payment-signature")];
  if (v1 !== null && v2 !== null) {
    throw new Fault("invalid_request", "X-PAYMENT: can't be sent together with PAYMENT-SIGNATURE");
  }
  return { v1, v2 };
}

/** The payment that the headers carry, unverified; null when there is none. */
export function readPayment({ v1, v2 }: ReturnType<typeof paymentHeaders>): Parsed<PresentedPayment> | null {
  if (v1 !== null) return readVersion1(v1);
  return v2 === null ? null : readVersion2(v2);
}

/**
 * The payment, its signature made canonical and checked.
 *
 * @param check says whose signature it is
 * @param note receives the exact reason of a refusal
 * @throws Fault `payment_required`
 */
export async function signedPayment(
  read: Parsed<PresentedPayment>,
  check: (payment: Payment) => Promise<SignedBy>,
  note: (reason: string) => void,
): Promise<PresentedPayment> {
  if (!read.ok) {
    note(read.reason);
    throw new Fault("payment_required", "the payment could not be read");
  }
  const { payment, accepted } = read.value;
  const signature = canonicalSignature(payment.signature);
  // A contract wallet's signature can't be judged without a chain, and there is none here.
  if (signature === null || (await check(payment)) !== "payer") {
    note("invalid_signature");
    throw refused();
  }
  return { payment: { ...payment, signature }, accepted };
}

function readVersion1(text: string): Parsed<PresentedPayment> {
  const read = decodePaymentHeader(text);
  return read.ok ? { ok: true, value: { payment: read.value, accepted: null } } : read;
}

function readVersion2(text: string): Parsed<PresentedPayment> {
  const read = decodePaymentSignature(text);
  if (!read.ok) return read;
  const { accepted, ...payment } = read.value;
  return { ok: true, value: { payment, accepted } };
}

/** Why the payment is not the one that is asked for; null when it is. @param now Unix seconds */
export function paymentProblem(
  { payment, accepted }: PresentedPayment,
  wire: WireRequirements,
  now: number,
  guard: RestoreGuard,
): string | null {
  if (accepted !== null && !acceptedMatches(accepted, wire)) return "answers_another_offer";
  const { validBefore } = payment.authorization;
  return (
    checkRequirements(payment, requirementsFrom(wire), { exactValue: true }) ??
    checkWindow(payment.authorization, now, MARGIN_SECONDS) ??
    (validBefore > guard.latest(now) ? "valid_too_long" : null) ??
    (guard.mayBeOlder(validBefore) ? "may_be_older_than_the_restore" : null)
  );
}

export interface Demand {
  readonly amount: bigint;
  /** As the agent's owner wrote it. */
  readonly pay_to: string;
  readonly agent_id: string;
  /** The absolute URL of the call. */
  readonly resource: string;
  readonly timeoutSeconds: number;
}

export function demanded({ amount, pay_to, agent_id, resource, timeoutSeconds }: Demand): WireRequirements {
  const requirements = requirementsOf({
    amount,
    // Official clients refuse an address in mixed case whose checksum is wrong.
    payTo: checksummed(pay_to) === pay_to ? pay_to : pay_to.toLowerCase(),
    resource,
    description: `One call of ${agent_id}`,
  });
  return { ...requirements, maxTimeoutSeconds: timeoutSeconds };
}

/** The 402 that asks for a payment, in both versions at once. */
export function paymentRequired(wire: WireRequirements): Fault {
  const error = "the agent is priced: a payment is required, in X-PAYMENT or PAYMENT-SIGNATURE";
  const { body, header } = challenge(wire, error);
  return new Fault("payment_required", error, {
    answer: { body, headers: { "payment-required": header } },
  });
}

/** The base URL of this gateway, as configured or from the request's Host. Without a slash at its end. */
export function baseUrl(publicUrl: string | null, headers: Headers): string {
  if (publicUrl !== null) return publicUrl.replace(/\/+$/, "");
  const host = headers.get("host") ?? "";
  const url = HOST.test(host) ? URL.parse(`http://${host}`) : null;
  return url === null ? "http://localhost" : url.origin;
}
