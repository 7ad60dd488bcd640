// The wire format of x402: parses headers and bodies into the values of types.ts, and writes challenges, settle requests and
// response headers. Parsing is strict in every known field and ignores unknown ones, since official clients and servers add
// some. Version 2 differs in spelling only, and is translated into version 1.
import { Fault, invalidField } from "../core/fault.ts";
import { URL_CHARACTERS_MAX } from "../core/host.ts";
import { textProblem } from "../core/text.ts";
import { MAX } from "../kernel/limits.ts";
import { isJsonObject, parseJson } from "../wire/json.ts";
import { type Network, SCHEME, X402_VERSION } from "./network.ts";
import type { WireRequirements } from "./schemas.ts";
import { type Authorization, type Hex, lowerHex, type Payment, parseUint256, type Requirements } from "./types.ts";

/** `reason` names the field and repeats no value, so it may be shown to the sender. */
export type Parsed<T> = { readonly ok: true; readonly value: T } | { readonly ok: false; readonly reason: string };

export interface SettleRequest {
  readonly payment: Payment;
  readonly requirements: Requirements;
}

/** The offer that a version 2 payment claims to answer, under version 1's names. */
export type AcceptedTerms = Pick<Requirements, "scheme" | "network" | "asset" | "payTo"> & { readonly amount: bigint };

export const MAX_TIMEOUT_SECONDS = 60;
const CAIP2 = /^[-a-z0-9]{3,8}:[-_a-zA-Z0-9]{1,32}$/;

/** The value of `X-PAYMENT`. */
export const decodePaymentHeader = (text: string): Parsed<Payment> =>
  attempt(() => readPayment(headerJson(text, "X-PAYMENT")));

/** What the body of a 402 asks for, in version 1. */
export function parseChallenge(value: unknown): Parsed<readonly Requirements[]> {
  return attempt(() => {
    const scope = outermost(value, "body");
    versionIn(scope, X402_VERSION);
    const accepts = requiredField(scope, "accepts");
    if (!Array.isArray(accepts) || accepts.length > MAX.challengeOffers) {
      throw invalidField("accepts", `must be an array of at most ${MAX.challengeOffers} offers`);
    }
    return accepts.map((_, at) => readRequirements(objectIn({ path: "accepts", fields: { ...accepts } }, String(at))));
  });
}

/** The value of version 2's `PAYMENT-SIGNATURE`. */
export function decodePaymentSignature(ours: Network, text: string) {
  return attempt(() => {
    const scope = headerJson(text, "PAYMENT-SIGNATURE");
    const x402Version = versionIn(scope, 2);
    const accepted = readAccepted(ours, objectIn(scope, "accepted"));
    const { scheme, network } = accepted;
    return { x402Version, scheme, network, ...readPayload(scope), accepted };
  });
}

/** The JSON of a request to `/settle`. */
export function parseSettleRequest(value: unknown): Parsed<SettleRequest> {
  return attempt(() => {
    const scope = outermost(value, "body");
    versionIn(scope, X402_VERSION);
    const payment = readPayment(objectIn(scope, "paymentPayload"));
    // A transfer of 0 moves nothing but burns gas all the same.
    if (payment.authorization.value === 0n) {
      throw invalidField("paymentPayload.payload.authorization.value", "must be above 0");
    }
    return { payment, requirements: readRequirements(objectIn(scope, "paymentRequirements")) };
  });
}

function attempt<T>(read: () => T): Parsed<T> {
  try {
    return { ok: true, value: read() };
  } catch (problem) {
    if (problem instanceof Fault && problem.kind === "invalid_request") return { ok: false, reason: problem.message };
    throw problem;
  }
}

function headerJson(text: string, name: string): FieldScope {
  const bytes = decodeBase64(text, name);
  const parsed = attempt(() => parseJson(bytes));
  if (!parsed.ok) throw new Fault("invalid_request", parsed.reason.replace(/^body(?=:)/, name));
  return outermost(parsed.value, name);
}

/** RFC 4648 section 4, with or without padding. The decoder skips unknown characters, so the result is encoded again and compared. */
function decodeBase64(text: string, name: string): Uint8Array {
  if (text.length > MAX.paymentHeaderCharacters) {
    throw invalidField(name, `must be at most ${MAX.paymentHeaderCharacters} characters`);
  }
  const bytes = Buffer.from(text, "base64");
  const padded = bytes.toString("base64");
  if (text !== padded && text !== padded.replace(/=+$/, "")) throw invalidField(name, "must be standard base64");
  return bytes;
}

function readPayment(scope: FieldScope): Payment {
  return {
    x402Version: versionIn(scope, X402_VERSION),
    scheme: fieldName(scope, "scheme"),
    network: fieldName(scope, "network"),
    ...readPayload(scope),
  };
}

function readPayload(scope: FieldScope): Pick<Payment, "authorization" | "signature"> {
  const payload = objectIn(scope, "payload");
  return { authorization: authorizationIn(payload, "authorization"), signature: signatureIn(payload, "signature") };
}

function readRequirements(scope: FieldScope): Requirements {
  return {
    scheme: fieldName(scope, "scheme"),
    network: fieldName(scope, "network"),
    maxAmountRequired: uint256In(scope, "maxAmountRequired"),
    asset: addressIn(scope, "asset"),
    payTo: addressIn(scope, "payTo"),
    resource: textIn(scope, "resource", URL_CHARACTERS_MAX),
    maxTimeoutSeconds: secondsIn(scope, "maxTimeoutSeconds"),
  };
}

/** An offer of version 2 names its network by CAIP-2; a version 1 name is refused. */
function readAccepted(ours: Network, scope: FieldScope): AcceptedTerms {
  const network = fieldName(scope, "network");
  if (!CAIP2.test(network)) throw invalidField("accepted.network", "must be a CAIP-2 network");
  return {
    scheme: fieldName(scope, "scheme"),
    network: network === ours.caip2 ? ours.name : network,
    amount: uint256In(scope, "amount"),
    asset: addressIn(scope, "asset"),
    payTo: addressIn(scope, "payTo"),
  };
}

/** Whether a version 2 payment answers this offer. */
export function acceptedMatches(accepted: AcceptedTerms, wire: WireRequirements): boolean {
  const { scheme, network, maxAmountRequired, asset, payTo } = requirementsFrom(wire);
  const isKind = accepted.scheme === scheme && accepted.network === network && accepted.asset === asset;
  return isKind && accepted.amount === maxAmountRequired && accepted.payTo === payTo;
}

type AskedTerms = Pick<WireRequirements, "payTo" | "resource" | "description"> & { readonly amount: bigint };

/** The requirements shown to a caller. `resource` must be an absolute URL, `payTo` an address in any case. */
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

/** Our own requirements as parsed values, for the checks of verify.ts. */
export function requirementsFrom(wire: WireRequirements): Requirements {
  const { scheme, network, resource, maxTimeoutSeconds } = wire;
  const [asset, payTo] = [lowerHex(wire.asset), lowerHex(wire.payTo)];
  const maxAmountRequired = BigInt(wire.maxAmountRequired);
  return { scheme, network, maxAmountRequired, asset, payTo, resource, maxTimeoutSeconds };
}

/** The body of a 402: what a caller has to pay, in both versions. */
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

/** The response header with the payment's outcome, in the version in which the caller paid. `transaction` "": declined. */
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

/** The body of a request to `/settle`: always version 1, whichever version carried the payment. */
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

/** JSON in base64, the form of the protocol's headers. */
export const encodeBase64 = (value: object): string => Buffer.from(JSON.stringify(value)).toString("base64");

// Strict readers of fields: each returns a value in the form of types.ts, or throws a Fault that names the field by its path.
// No message repeats a value, since a signature may stand in any field.

/** A JSON object and its path; the path of the outermost one is "". */
interface FieldScope {
  readonly path: string;
  readonly fields: Readonly<Record<string, unknown>>;
}

const ADDRESS = /^0x[0-9a-fA-F]{40}$/;
const WORD = /^0x[0-9a-fA-F]{64}$/;
/** At least the 65 bytes of a plain signature: the token does not accept the 64 of EIP-2098. */
const SIGNATURE = /^0x(?:[0-9a-fA-F]{2}){65,}$/;

/** The outermost value. @param name what error messages call it */
const outermost = (value: unknown, name: string): FieldScope => ({ path: "", fields: asFields(value, name) });

function objectIn(scope: FieldScope, key: string): FieldScope {
  const path = pathOf(scope, key);
  return { path, fields: asFields(requiredField(scope, key), path) };
}

function asFields(value: unknown, name: string): FieldScope["fields"] {
  if (!isJsonObject(value)) throw invalidField(name, "must be a JSON object");
  return value;
}

const pathOf = ({ path }: FieldScope, key: string): string => (path === "" ? key : `${path}.${key}`);

/** Only own keys count: those inherited from `Object.prototype` were not sent. */
function requiredField(scope: FieldScope, key: string): unknown {
  const value = Object.hasOwn(scope.fields, key) ? scope.fields[key] : undefined;
  if (value === undefined) throw invalidField(pathOf(scope, key), "required");
  return value;
}

function versionIn<V extends number>(scope: FieldScope, version: V): V {
  if (requiredField(scope, "x402Version") !== version) {
    throw invalidField(pathOf(scope, "x402Version"), `must be ${version}`);
  }
  return version;
}

/** A name such as a scheme or a network. The codec does not check whether it is known. */
const fieldName = (scope: FieldScope, key: string): string => textIn(scope, key, 64);

function textIn(scope: FieldScope, key: string, charactersMax: number): string {
  const value = requiredField(scope, key);
  if (typeof value !== "string") throw invalidField(pathOf(scope, key), "must be a string");
  const problem = textProblem(value, { min: 1, max: charactersMax });
  if (problem !== null) throw invalidField(pathOf(scope, key), problem);
  return value;
}

/** A string of decimal digits. JSON numbers are refused: a double does not hold 256 bits. */
function uint256In(scope: FieldScope, key: string): bigint {
  const value = requiredField(scope, key);
  const integer = typeof value === "string" ? parseUint256(value) : null;
  if (integer === null) {
    throw invalidField(pathOf(scope, key), "must be a string of decimal digits, of at most 256 bits");
  }
  return integer;
}

function secondsIn(scope: FieldScope, key: string): number {
  const value = requiredField(scope, key);
  if (typeof value !== "number" || !Number.isSafeInteger(value) || value < 0) {
    throw invalidField(pathOf(scope, key), "must be an integer, not below 0");
  }
  return value;
}

const addressIn = (scope: FieldScope, key: string): Hex =>
  hexIn(scope, key, ADDRESS, "must be an address of 0x and 40 hexadecimal digits");

function signatureIn(scope: FieldScope, key: string): Hex {
  const signature = hexIn(scope, key, SIGNATURE, "must be 0x and the hexadecimal digits of at least 65 bytes");
  if (signature.length > 2 + 2 * MAX.signatureBytes) {
    throw invalidField(pathOf(scope, key), `must be at most ${MAX.signatureBytes} bytes`);
  }
  return signature;
}

function hexIn(scope: FieldScope, key: string, form: RegExp, problem: string): Hex {
  const value = requiredField(scope, key);
  if (typeof value !== "string" || !form.test(value)) throw invalidField(pathOf(scope, key), problem);
  return lowerHex(value);
}

/** Unknown keys are ignored, as in the official schemas: they are not part of what was signed. */
function authorizationIn(scope: FieldScope, key: string): Authorization {
  const authorization = objectIn(scope, key);
  return {
    from: addressIn(authorization, "from"),
    to: addressIn(authorization, "to"),
    value: uint256In(authorization, "value"),
    validAfter: uint256In(authorization, "validAfter"),
    validBefore: uint256In(authorization, "validBefore"),
    nonce: hexIn(authorization, "nonce", WORD, "must be 0x and the 64 hexadecimal digits of 32 bytes"),
  };
}
