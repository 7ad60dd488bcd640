// The payment protocol's wire: headers and bodies in, as the values of types.ts, and challenges, settle requests
// and answers out. Reading is strict in every known field and ignores the others, since official clients
// and servers add some. Version 2 differs in spelling only, and is translated into version 1.
import { Fault, invalidField } from "../core/fault.ts";
import { URL_CHARACTERS_MAX } from "../core/host.ts";
import { MAX } from "../kernel/limits.ts";
import { parseJson } from "../wire/json.ts";
import {
  addressIn,
  authorizationIn,
  type FieldScope,
  fieldName,
  lowerHex,
  objectIn,
  outermost,
  secondsIn,
  signatureIn,
  textIn,
  uint256In,
  versionIn,
} from "./fields.ts";
import { NETWORK, NETWORK_CAIP2, SCHEME, TOKEN, TOKEN_NAME, TOKEN_VERSION, X402_VERSION } from "./kind.ts";
import type { WireRequirements } from "./schemas.ts";
import type { Payment, Requirements } from "./types.ts";

/** `reason` names the field and repeats no value: it may be shown to the sender. */
export type Parsed<T> = { readonly ok: true; readonly value: T } | { readonly ok: false; readonly reason: string };

export interface SettleRequest {
  readonly payment: Payment;
  readonly requirements: Requirements;
}

/** The offer that a version 2 payment says it answers, in the words of version 1. */
export type AcceptedTerms = Pick<Requirements, "scheme" | "network" | "asset" | "payTo"> & { readonly amount: bigint };

export const MAX_TIMEOUT_SECONDS = 60;
const CAIP2 = /^[-a-z0-9]{3,8}:[-_a-zA-Z0-9]{1,32}$/;

/** The value of `X-PAYMENT`. */
export function decodePaymentHeader(text: string): Parsed<Payment> {
  return attempt(() => readPayment(headerJson(text, "X-PAYMENT")));
}

/** The value of version 2's `PAYMENT-SIGNATURE`. */
export function decodePaymentSignature(text: string): Parsed<Payment & { readonly accepted: AcceptedTerms }> {
  return attempt(() => {
    const place = headerJson(text, "PAYMENT-SIGNATURE");
    const x402Version = versionIn(place, 2);
    const accepted = readAccepted(objectIn(place, "accepted"));
    const { scheme, network } = accepted;
    return { x402Version, scheme, network, ...readPayload(place), accepted };
  });
}

/** The JSON of a request to `/settle`. */
export function parseSettleRequest(value: unknown): Parsed<SettleRequest> {
  return attempt(() => {
    const place = outermost(value, "body");
    versionIn(place, X402_VERSION);
    const payment = readPayment(objectIn(place, "paymentPayload"));
    // It would move nothing, and burn gas all the same.
    if (payment.authorization.value === 0n) {
      throw invalidField("paymentPayload.payload.authorization.value", "must be above 0");
    }
    return { payment, requirements: readRequirements(objectIn(place, "paymentRequirements")) };
  });
}

function attempt<T>(read: () => T): Parsed<T> {
  try {
    return { ok: true, value: read() };
  } catch (problem) {
    if (problem instanceof Fault && problem.kind === "invalid_request") {
      return { ok: false, reason: problem.message };
    }
    throw problem;
  }
}

function headerJson(text: string, name: string): FieldScope {
  const bytes = decodeBase64(text, name);
  const parsed = attempt(() => parseJson(bytes));
  if (!parsed.ok) throw new Fault("invalid_request", parsed.reason.replace(/^body(?=:)/, name));
  return outermost(parsed.value, name);
}

/** RFC 4648 section 4, with or without padding. The decoder skips unknown characters, so the way back is compared. */
function decodeBase64(text: string, name: string): Uint8Array {
  if (text.length > MAX.paymentHeaderCharacters) {
    throw invalidField(name, `must be at most ${MAX.paymentHeaderCharacters} characters`);
  }
  const bytes = Buffer.from(text, "base64");
  const padded = bytes.toString("base64");
  if (text !== padded && text !== padded.replace(/=+$/, "")) throw invalidField(name, "must be standard base64");
  return bytes;
}

function readPayment(place: FieldScope): Payment {
  return {
    x402Version: versionIn(place, X402_VERSION),
    scheme: fieldName(place, "scheme"),
    network: fieldName(place, "network"),
    ...readPayload(place),
  };
}

function readPayload(place: FieldScope): Pick<Payment, "authorization" | "signature"> {
  const payload = objectIn(place, "payload");
  return {
    authorization: authorizationIn(payload, "authorization"),
    signature: signatureIn(payload, "signature"),
  };
}

function readRequirements(place: FieldScope): Requirements {
  return {
    scheme: fieldName(place, "scheme"),
    network: fieldName(place, "network"),
    maxAmountRequired: uint256In(place, "maxAmountRequired"),
    asset: addressIn(place, "asset"),
    payTo: addressIn(place, "payTo"),
    resource: textIn(place, "resource", URL_CHARACTERS_MAX),
    maxTimeoutSeconds: secondsIn(place, "maxTimeoutSeconds"),
  };
}

/** Names of version 1 do not count here: an offer made in version 2 names networks by CAIP-2. */
function readAccepted(place: FieldScope): AcceptedTerms {
  const network = fieldName(place, "network");
  if (!CAIP2.test(network)) throw invalidField("accepted.network", "must be a CAIP-2 network");
  return {
    scheme: fieldName(place, "scheme"),
    network: network === NETWORK_CAIP2 ? NETWORK : network,
    amount: uint256In(place, "amount"),
    asset: addressIn(place, "asset"),
    payTo: addressIn(place, "payTo"),
  };
}

/** Whether a version 2 payment answers this offer. */
export function acceptedMatches(accepted: AcceptedTerms, wire: WireRequirements): boolean {
  const { scheme, network, maxAmountRequired, asset, payTo } = requirementsFrom(wire);
  const isKind = accepted.scheme === scheme && accepted.network === network && accepted.asset === asset;
  return isKind && accepted.amount === maxAmountRequired && accepted.payTo === payTo;
}

/** What is asked of a caller. `resource` must be an absolute URL, `payTo` an address in any case. */
export function requirementsOf(demand: {
  readonly amount: bigint;
  readonly payTo: string;
  readonly resource: string;
  readonly description: string;
}): WireRequirements {
  const { amount, payTo, resource, description } = demand;
  return {
    scheme: SCHEME,
    network: NETWORK,
    maxAmountRequired: amount.toString(),
    resource,
    description,
    mimeType: "application/json",
    payTo,
    maxTimeoutSeconds: MAX_TIMEOUT_SECONDS,
    asset: TOKEN,
    extra: { name: TOKEN_NAME, version: TOKEN_VERSION },
  };
}

/** Our own requirements as values, for the checks of verify.ts. */
export function requirementsFrom(wire: WireRequirements): Requirements {
  const { scheme, network, resource, maxTimeoutSeconds } = wire;
  const [asset, payTo] = [lowerHex(wire.asset), lowerHex(wire.payTo)];
  return {
    scheme,
    network,
    maxAmountRequired: BigInt(wire.maxAmountRequired),
    asset,
    payTo,
    resource,
    maxTimeoutSeconds,
  };
}

/** One 402 for the clients of both versions: the body is version 1, the value of `PAYMENT-REQUIRED` version 2. */
export function challenge(wire: WireRequirements, error: string) {
  const { scheme, maxAmountRequired: amount, asset, payTo, maxTimeoutSeconds, extra } = wire;
  const required = {
    x402Version: 2,
    error,
    resource: { url: wire.resource, description: shortened(wire.description), mimeType: wire.mimeType },
    accepts: [{ scheme, network: NETWORK_CAIP2, amount, asset, payTo, maxTimeoutSeconds, extra }],
  };
  return { body: { x402Version: X402_VERSION, error, accepts: [wire] }, header: encodeBase64(required) };
}

function shortened(description: string): string {
  const characters = [...description];
  if (characters.length <= MAX.challengeCharacters) return description;
  return `${characters.slice(0, MAX.challengeCharacters - 1).join("")}…`;
}

/** The header that tells a caller what became of its payment, in the version in which it paid. No transaction: declined. */
export function paymentResponse(
  x402Version: Payment["x402Version"],
  settled: { readonly transaction: string; readonly payer: string },
) {
  const name = x402Version === 1 ? "X-PAYMENT-RESPONSE" : "PAYMENT-RESPONSE";
  const network = x402Version === 1 ? NETWORK : NETWORK_CAIP2;
  const { transaction, payer } = settled;
  return { name, value: encodeBase64({ success: transaction !== "", transaction, network, payer }) } as const;
}

/** The body of a request to `/settle`: version 1, whichever version carried the payment. */
export function settleRequestJson(payment: Payment, paymentRequirements: WireRequirements) {
  const { scheme, network, signature, authorization } = payment;
  const decimals = {
    value: String(authorization.value),
    validAfter: String(authorization.validAfter),
    validBefore: String(authorization.validBefore),
  };
  const payload = { signature, authorization: { ...authorization, ...decimals } };
  const paymentPayload = { x402Version: X402_VERSION, scheme, network, payload };
  return { x402Version: X402_VERSION, paymentPayload, paymentRequirements };
}

const encodeBase64 = (value: object): string => Buffer.from(JSON.stringify(value)).toString("base64");
