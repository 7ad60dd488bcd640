// Checks receipts offline: the signature of each by the published keys, its claims, and the chain from line to
// line. Nothing here trusts what a receipt says of itself before its signature holds.
import { Value } from "@sinclair/typebox/value";
import { type CryptoKey, compactVerify, importJWK, type JWK } from "jose";
import { SIGNING_ALGORITHM } from "../../keys/signing-keys.ts";
import { linkOf, RECEIPT_TYPE, ReceiptClaims } from "./claims.ts";

/** By `kid`. */
export type ReceiptKeys = ReadonlyMap<string, CryptoKey>;

/** A signature has one spelling only, so that no byte of a receipt can be changed unnoticed. */
const COMPACT_JWS = /^[\w-]+\.[\w-]+\.[\w-]{85}[AQgw]$/;
const decoder = new TextDecoder("utf-8", { fatal: true });

/** The Ed25519 keys of a JSON Web Key Set; null when the value is none, or holds no such key. */
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

/** What is wrong with a receipt. `receipt_id` is what it claims to be, as far as that can be read. */
export interface Break {
  readonly receipt_id: string | null;
  readonly problem: string;
}

export function createReceiptChain(keys: ReceiptKeys) {
  const places = new Map<string, number>();
  let length = 0;
  let last: { readonly claims: ReceiptClaims; readonly link: string } | null = null;
  let first: ReceiptClaims | null = null;

  /** A receipt that holds by itself, among those before it. */
  function problemOf(claims: ReceiptClaims): string | null {
    if (last !== null && claims.previous !== last.link) {
      return "its `previous` is not the SHA-256 of the line before: a receipt was removed, added, changed or moved here";
    }
    for (const name of ["receipt_id", "invocation_id"] as const) {
      const place = places.get(claims[name]);
      if (place !== undefined) return `its ${name} is that of line ${place} too`;
    }
    return null;
  }

  return {
    /** Takes the next receipt; null when it holds and follows the one before it. */
    async take(jws: string): Promise<Break | null> {
      const read = await readReceipt(jws, keys);
      if (typeof read === "string") return { receipt_id: claimedId(jws), problem: read };
      const problem = problemOf(read);
      if (problem !== null) return { receipt_id: read.receipt_id, problem };
      first ??= read;
      last = { claims: read, link: linkOf(jws) };
      length += 1;
      places.set(read.receipt_id, length).set(read.invocation_id, length);
      return null;
    },
    /** How many hold so far. */
    get length() {
      return length;
    },
    /** Null before the first one, like `last`. */
    get first() {
      return first;
    },
    get last() {
      return last?.claims ?? null;
    },
  };
}

export type VerifiedChain = ReturnType<typeof createReceiptChain>;

/** The claims of a receipt that holds by itself, or what is wrong with it. */
async function readReceipt(jws: string, keys: ReceiptKeys): Promise<ReceiptClaims | string> {
  if (jws.startsWith("{")) return "it is JSON; of the API's answer the receipt is the value of `receipt` alone";
  if (!COMPACT_JWS.test(jws)) return "it is no compact JWS";
  const header = parse(jws.split(".")[0]);
  if (header === null) return "its header can't be read";
  const { alg, kid, typ } = header;
  if (alg !== SIGNING_ALGORITHM) return `its alg is not ${SIGNING_ALGORITHM}`;
  if (typ !== RECEIPT_TYPE) return `its typ is not ${RECEIPT_TYPE}`;
  const key = typeof kid === "string" ? keys.get(kid) : undefined;
  if (key === undefined) return "its kid is that of no key in the key set";
  try {
    await compactVerify(jws, key, { algorithms: [SIGNING_ALGORITHM] });
  } catch {
    return "its signature does not hold";
  }
  const claims = parse(jws.split(".")[1]);
  if (Value.Check(ReceiptClaims, claims)) return claims;
  const path = Value.Errors(ReceiptClaims, claims).First()?.path.slice(1) ?? "";
  return path === ""
    ? "its payload is not that of a receipt"
    : `its ${path.replaceAll("/", ".")} is not that of a receipt`;
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
