// The claims of a trust receipt: made from an ended invocation here, and verified offline by `tollgate receipt verify`. Both
// use one schema, and one hash that links each receipt to the one before it. The verification relies on nothing that a receipt
// claims before its signature is checked.
import { createHash } from "node:crypto";
import { type Static, type TSchema, Type } from "@sinclair/typebox";
import { Value } from "@sinclair/typebox/value";
import { type CryptoKey, compactVerify, importJWK, type JWK } from "jose";
import { type IdPrefix, idPattern, idTime } from "../../core/id.ts";
import { ERROR_CLASSES, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import { formatDateTime } from "../../core/time.ts";
import { SIGNING_ALGORITHM } from "../../keys/signing-keys.ts";
import type { InvocationRow } from "../invocations/service.ts";

/** The header's `typ`, so that nothing else signed by the key can pass for a receipt (RFC 8725, section 3.11). */
export const RECEIPT_TYPE = "receipt+jwt";

const id = (prefix: IdPrefix) => Type.String({ pattern: idPattern(prefix) });
const oneOf = <T extends string>(values: readonly T[]) => Type.Union(values.map((value) => Type.Literal(value)));
const orNull = <T extends TSchema>(schema: T) => Type.Union([schema, Type.Null()]);
const text = Type.String({ minLength: 1 });
const whole = orNull(Type.Integer({ minimum: 0 }));
const amount = Type.String({ pattern: "^[0-9]+$" });
const dateTime = Type.String({ pattern: "^\\d{4}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d{3}Z$" });
const sha256 = orNull(Type.String({ pattern: "^[0-9a-f]{64}$" }));

const Settlement = Type.Object({
  status: oneOf(SETTLEMENT_STATUSES),
  tx_hash: Type.Optional(text),
  settled_amount: Type.Optional(amount),
  operator_amount: Type.Optional(amount),
  facilitator_fee: Type.Optional(amount),
  attempts: Type.Optional(Type.Integer({ minimum: 0 })),
  reason: Type.Optional(text),
  settled_at: Type.Optional(dateTime),
});

export const ReceiptClaims = Type.Object({
  receipt_id: id("rcpt"),
  tenant: text,
  agent_id: id("agt"),
  invocation_id: id("inv"),
  caller: text,
  mode: oneOf(MODES),
  status: oneOf(["succeeded", "failed"]),
  error_class: orNull(oneOf(ERROR_CLASSES)),
  upstream_status: whole,
  created_at: dateTime,
  completed_at: dateTime,
  latency_ms: whole,
  req_size: whole,
  resp_size: whole,
  req_sha256: sha256,
  resp_sha256: sha256,
  payment: orNull(Type.Object({ network: text, asset: text, amount, payer: text, nonce: text })),
  settlement: orNull(Settlement),
  /** SHA-256 of the tenant's previous receipt; null in the first one. */
  previous: sha256,
});
export type ReceiptClaims = Static<typeof ReceiptClaims>;

/** The SHA-256 of a receipt, which is the `previous` of the next one. */
export const linkOf = (jws: string): string => createHash("sha256").update(jws).digest("hex");

/** @throws Error for an invocation that has not ended */
export function claimsOf(row: InvocationRow, receipt_id: string, previous: string | null): ReceiptClaims {
  const { status, completed_at } = row;
  if (completed_at === null || (status !== "succeeded" && status !== "failed")) {
    throw new Error("a receipt of an invocation that has not ended");
  }
  return {
    receipt_id,
    tenant: row.tenant,
    agent_id: row.agent_id,
    invocation_id: row.id,
    caller: row.caller,
    mode: row.mode,
    status,
    error_class: row.error_class,
    upstream_status: row.upstream_status,
    created_at: formatDateTime(idTime(row.id)),
    completed_at: formatDateTime(completed_at),
    latency_ms: row.latency_ms,
    req_size: row.req_size,
    resp_size: row.resp_size,
    req_sha256: row.req_sha256,
    resp_sha256: row.resp_sha256,
    payment: paymentOf(row),
    settlement: settlementOf(row),
    previous,
  };
}

function paymentOf(row: InvocationRow): ReceiptClaims["payment"] {
  const { payment_network: network, payment_asset: asset, payment_amount: amount } = row;
  const { payment_payer: payer, payment_nonce: nonce } = row;
  if (network === null || asset === null || amount === null || payer === null || nonce === null) return null;
  return { network, asset, amount, payer, nonce };
}

function settlementOf({ settlement_status: status, settlement }: InvocationRow): ReceiptClaims["settlement"] {
  if (status === null) return null;
  return { status, ...(JSON.parse(settlement ?? "{}") as Omit<Static<typeof Settlement>, "status">) };
}

/** The published keys by `kid`. */
export type ReceiptKeys = ReadonlyMap<string, CryptoKey>;

/** Allows one encoding of a signature only (its last character has four unused bits), so that every changed byte is noticed. */
const COMPACT_JWS = /^[\w-]+\.[\w-]+\.[\w-]{85}[AQgw]$/;
const decoder = new TextDecoder("utf-8", { fatal: true });

/** The Ed25519 keys of a JSON Web Key Set; null when the value is not a key set, or has no such key. */
export async function receiptKeys(jwks: unknown): Promise<ReceiptKeys | null> {
  if (typeof jwks !== "object" || jwks === null || !("keys" in jwks) || !Array.isArray(jwks.keys)) return null;
  const keys = new Map<string, CryptoKey>();
  for (const jwk of jwks.keys as readonly unknown[]) {
    if (!isSigningJwk(jwk)) continue;
    const key = await importJWK(jwk, SIGNING_ALGORITHM).catch(() => null);
    if (key !== null && !(key instanceof Uint8Array)) keys.set(jwk.kid, key);
  }
  return keys.size === 0 ? null : keys;
}

function isSigningJwk(value: unknown): value is JWK & { kid: string } {
  if (typeof value !== "object" || value === null) return false;
  const { kty, crv, kid, x, d }: Partial<Record<string, unknown>> = { ...value };
  return kty === "OKP" && crv === "Ed25519" && typeof kid === "string" && typeof x === "string" && d === undefined;
}

/** Checks receipts line by line: the signature by the published keys, the claims, and the chain. */
export function createReceiptChain(keys: ReceiptKeys) {
  /** The line in which each receipt ID and invocation ID occurs. */
  const lines = new Map<string, number>();
  let length = 0;
  let last: { readonly claims: ReceiptClaims; readonly link: string } | null = null;
  let first: ReceiptClaims | null = null;

  /** Checks a receipt that is valid by itself against the ones before it. */
  function chainProblem(claims: ReceiptClaims): string | null {
    if (last !== null && claims.previous !== last.link) {
      return "its `previous` is not the SHA-256 of the line before: a receipt was removed, added, changed or moved here";
    }
    for (const name of ["receipt_id", "invocation_id"] as const) {
      const line = lines.get(claims[name]);
      if (line !== undefined) return `its ${name} is that of line ${line} too`;
    }
    return null;
  }

  return {
    /** Takes the next receipt. Null if it is valid and follows the last, else its problem and unverified ID, if readable. */
    async take(jws: string) {
      const read = await readReceipt(jws, keys);
      if (typeof read === "string") return { receipt_id: claimedId(jws), problem: read };
      const problem = chainProblem(read);
      if (problem !== null) return { receipt_id: read.receipt_id, problem };
      first ??= read;
      last = { claims: read, link: linkOf(jws) };
      length += 1;
      lines.set(read.receipt_id, length).set(read.invocation_id, length);
      return null;
    },
    get length() {
      return length;
    },
    /** The claims of the first receipt; null before it, like `last`. */
    get first() {
      return first;
    },
    get last() {
      return last?.claims ?? null;
    },
  };
}

export type VerifiedChain = ReturnType<typeof createReceiptChain>;

/** The claims of a receipt that is valid by itself, or what is wrong with it. */
async function readReceipt(jws: string, keys: ReceiptKeys): Promise<ReceiptClaims | string> {
  if (jws.startsWith("{")) return "it is JSON; the receipt is only the value of `receipt` in the API's response";
  if (!COMPACT_JWS.test(jws)) return "it is not a compact JWS";
  const header = parse(jws.split(".")[0]);
  if (header === null) return "its header can't be read";
  const { alg, kid, typ } = header;
  if (alg !== SIGNING_ALGORITHM) return `its alg is not ${SIGNING_ALGORITHM}`;
  if (typ !== RECEIPT_TYPE) return `its typ is not ${RECEIPT_TYPE}`;
  const key = typeof kid === "string" ? keys.get(kid) : undefined;
  if (key === undefined) return "its kid names no key of the key set";
  try {
    await compactVerify(jws, key, { algorithms: [SIGNING_ALGORITHM] });
  } catch {
    return "its signature is not valid";
  }
  const claims = parse(jws.split(".")[1]);
  if (Value.Check(ReceiptClaims, claims)) return claims;
  const path = Value.Errors(ReceiptClaims, claims).First()?.path.slice(1) ?? "";
  return path === "" ? "its payload is not a JSON object" : `its ${path.replaceAll("/", ".")} is missing or not valid`;
}

function parse(part = ""): Partial<Record<string, unknown>> | null {
  try {
    const value: unknown = JSON.parse(decoder.decode(Buffer.from(part, "base64url")));
    return typeof value === "object" && value !== null ? { ...value } : null;
  } catch {
    return null;
  }
}

function claimedId(jws: string): string | null {
  const id = parse(jws.split(".")[1])?.["receipt_id"];
  return typeof id === "string" && Value.Check(ReceiptClaims.properties.receipt_id, id) ? id : null;
}
