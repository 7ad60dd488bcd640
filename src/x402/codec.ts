// The payment protocol's wire: headers and bodies in, as the values of types.ts, and challenges, settle requests
// and answers out. Reading is strict in every known field and ignores the others, since official clients
// and servers add some. Version 2 differs in spelling only, and is translated into version 1.
import { Fault, invalidField } from "../core/fault.ts";
import { URL_CHARACTERS_MAX } from "../core/host.ts";
import { textProblem } from "../core/text.ts";
import { MAX } from "../kernel/limits.ts";
import { parseJson } from "../wire/json.ts";
import { type Network, SCHEME, X402_VERSION } from "./network.ts";
import type { WireRequirements } from "./schemas.ts";
import {
  type Authorization,
  type Hex,
  lowerHex,
  type Payment,
  type Requirements,
  UINT256_DIGITS_MAX,
  UINT256_MAX,
} from "./types.ts";

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
export function decodePaymentSignature(ours: Network, text: string) {
  return attempt(() => {
    const place = headerJson(text, "PAYMENT-SIGNATURE");
    const x402Version = versionIn(place, 2);
    const accepted = readAccepted(ours, objectIn(place, "accepted"));
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
function readAccepted(ours: Network, place: FieldScope): AcceptedTerms {
  const network = fieldName(place, "network");
  if (!CAIP2.test(network)) throw invalidField("accepted.network", "must be a CAIP-2 network");
  return {
    scheme: fieldName(place, "scheme"),
    network: network === ours.caip2 ? ours.name : network,
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

type AskedTerms = Pick<WireRequirements, "payTo" | "resource" | "description"> & { readonly amount: bigint };

/** What is asked of a caller. `resource` must be an absolute URL, `payTo` an address in any case. */
export function requirementsOf({ name, token }: Network, asked: AskedTerms): WireRequirements {
  return {
    scheme: SCHEME,
    network: name,
    maxAmountRequired: asked.amount.toString(),
    resource: asked.resource,
    description: asked.description,
    mimeType: "application/json",
    payTo: asked.payTo,
    maxTimeoutSeconds: MAX_TIMEOUT_SECONDS,
    asset: token.address,
    extra: { name: token.name, version: token.version },
  };
}

/** Our own requirements as values, for the checks of verify.ts. */
export function requirementsFrom(wire: WireRequirements): Requirements {
  const { scheme, network, resource, maxTimeoutSeconds } = wire;
  const [asset, payTo] = [lowerHex(wire.asset), lowerHex(wire.payTo)];
  const maxAmountRequired = BigInt(wire.maxAmountRequired);
  return { scheme, network, maxAmountRequired, asset, payTo, resource, maxTimeoutSeconds };
}

/** What a caller has to pay, in both versions. */
export type PaymentChallenge = ReturnType<typeof challenge>;

export function challenge({ caip2 }: Network, wire: WireRequirements, error: string) {
  const { scheme, maxAmountRequired: amount, asset, payTo, maxTimeoutSeconds, extra } = wire;
  const version2 = {
    x402Version: 2,
    error,
    resource: { url: wire.resource, description: shortened(wire.description), mimeType: wire.mimeType },
    accepts: [{ scheme, network: caip2, amount, asset, payTo, maxTimeoutSeconds, extra }],
  };
  return { version1: { x402Version: X402_VERSION, error, accepts: [wire] }, version2 };
}

function shortened(description: string): string {
  const characters = [...description];
  if (characters.length <= MAX.challengeCharacters) return description;
  return `${characters.slice(0, MAX.challengeCharacters - 1).join("")}…`;
}

/** The header that tells a caller what became of its payment, in the version in which it paid. No transaction: declined. */
export function paymentResponse(
  { name: network, caip2 }: Network,
  x402Version: Payment["x402Version"],
  settled: { readonly transaction: string; readonly payer: string },
) {
  const { transaction, payer } = settled;
  const response = { success: transaction !== "", transaction, network: x402Version === 1 ? network : caip2, payer };
  const name = x402Version === 1 ? "X-PAYMENT-RESPONSE" : "PAYMENT-RESPONSE";
  return { name, value: encodeBase64(response) } as const;
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

/** As headers carry it. */
export const encodeBase64 = (value: object): string => Buffer.from(JSON.stringify(value)).toString("base64");

// Strict readers of fields: each returns a value in the form of types.ts, or throws a Fault that names the field by its path. No
// message repeats a value, since a signature may stand in any field.

/** A JSON object, and where it stands: "" for the outermost. */
interface FieldScope {
  readonly path: string;
  readonly fields: Readonly<Record<string, unknown>>;
}

const ADDRESS = /^0x[0-9a-fA-F]{40}$/;
const WORD = /^0x[0-9a-fA-F]{64}$/;
/** At least the 65 bytes of a plain signature: the 64 of EIP-2098 are no signature to the token. */
const SIGNATURE = /^0x(?:[0-9a-fA-F]{2}){65,}$/;

/** The outermost value. `name` is what a message calls it. */
function outermost(value: unknown, name: string): FieldScope {
  return { path: "", fields: asFields(value, name) };
}

function objectIn(place: FieldScope, key: string): FieldScope {
  const path = pathOf(place, key);
  return { path, fields: asFields(present(place, key), path) };
}

function asFields(value: unknown, name: string): FieldScope["fields"] {
  if (!isObject(value)) throw invalidField(name, "must be a JSON object");
  return value;
}

const isObject = (value: unknown): value is FieldScope["fields"] =>
  typeof value === "object" && value !== null && !Array.isArray(value);

const pathOf = ({ path }: FieldScope, key: string): string => (path === "" ? key : `${path}.${key}`);

/** Inherited keys are no fields: `Object.prototype` is not part of what was sent. */
function present(place: FieldScope, key: string): unknown {
  const value = Object.hasOwn(place.fields, key) ? place.fields[key] : undefined;
  if (value === undefined) throw invalidField(pathOf(place, key), "required");
  return value;
}

function versionIn<V extends number>(place: FieldScope, version: V): V {
  if (present(place, "x402Version") !== version) {
    throw invalidField(pathOf(place, "x402Version"), `must be ${version}`);
  }
  return version;
}

/** A word such as a scheme or a network. The codec does not judge which ones are known. */
const fieldName = (place: FieldScope, key: string): string => textIn(place, key, 64);

function textIn(place: FieldScope, key: string, charactersMax: number): string {
  const value = present(place, key);
  if (typeof value !== "string") throw invalidField(pathOf(place, key), "must be a string");
  const problem = textProblem(value, { min: 1, max: charactersMax });
  if (problem !== null) throw invalidField(pathOf(place, key), problem);
  return value;
}

/** A string of decimal digits. JSON numbers are refused: a double does not hold 256 bits. */
function uint256In(place: FieldScope, key: string): bigint {
  const value = present(place, key);
  const integer = typeof value === "string" && /^[0-9]+$/.test(value) ? uint256(value) : null;
  if (integer === null) {
    throw invalidField(pathOf(place, key), "must be a string of decimal digits, of at most 256 bits");
  }
  return integer;
}

/** Reading digits takes more than linear time, so their number is checked first. */
function uint256(digits: string): bigint | null {
  const significant = digits.replace(/^0+/, "");
  if (significant.length > UINT256_DIGITS_MAX) return null;
  const integer = BigInt(significant);
  return integer <= UINT256_MAX ? integer : null;
}

function secondsIn(place: FieldScope, key: string): number {
  const value = present(place, key);
  if (typeof value !== "number" || !Number.isSafeInteger(value) || value < 0) {
    throw invalidField(pathOf(place, key), "must be an integer, not below 0");
  }
  return value;
}

const addressIn = (place: FieldScope, key: string): Hex =>
  hexIn(place, key, ADDRESS, "must be an address of 0x and 40 hexadecimal digits");

function signatureIn(place: FieldScope, key: string): Hex {
  const signature = hexIn(place, key, SIGNATURE, "must be 0x and the hexadecimal digits of at least 65 bytes");
  if (signature.length > 2 + 2 * MAX.signatureBytes) {
    throw invalidField(pathOf(place, key), `must be at most ${MAX.signatureBytes} bytes`);
  }
  return signature;
}

function hexIn(place: FieldScope, key: string, form: RegExp, problem: string): Hex {
  const value = present(place, key);
  if (typeof value !== "string" || !form.test(value)) throw invalidField(pathOf(place, key), problem);
  return lowerHex(value);
}

/** Further keys are passed over, as the official schemas do: nobody signed them and nothing reads them. */
function authorizationIn(place: FieldScope, key: string): Authorization {
  const authorization = objectIn(place, key);
  return {
    from: addressIn(authorization, "from"),
    to: addressIn(authorization, "to"),
    value: uint256In(authorization, "value"),
    validAfter: uint256In(authorization, "validAfter"),
    validBefore: uint256In(authorization, "validBefore"),
    nonce: hexIn(authorization, "nonce", WORD, "must be 0x and the 64 hexadecimal digits of 32 bytes"),
  };
}
