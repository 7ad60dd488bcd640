// Trust receipts for tests: chains signed as the gateway signs them, with keys of the test's own.
import { createHash } from "node:crypto";
import { CompactSign, exportJWK, generateKeyPair } from "jose";
import { newId } from "../../../src/core/id.ts";

const NOW = 1_790_000_000_000;

export async function receiptSigner(kid = "k1") {
  const { publicKey, privateKey } = await generateKeyPair("EdDSA");
  const jwk = { ...(await exportJWK(publicKey)), kid, alg: "EdDSA", use: "sig" };
  const sign = (payload: unknown, header: object = {}) =>
    new CompactSign(new TextEncoder().encode(JSON.stringify(payload)))
      .setProtectedHeader({ alg: "EdDSA", kid, typ: "receipt+jwt", ...header })
      .sign(privateKey);
  return { jwk, sign };
}

export type Signer = Awaited<ReturnType<typeof receiptSigner>>;

export const linkTo = (jws: string) => createHash("sha256").update(jws).digest("hex");

export function receiptClaims(fields: object = {}) {
  return {
    receipt_id: newId("rcpt", NOW),
    tenant: "acme",
    agent_id: newId("agt", NOW),
    invocation_id: newId("inv", NOW),
    caller: "alice",
    mode: "transactional",
    status: "succeeded",
    error_class: null,
    upstream_status: 200,
    created_at: "2026-11-21T10:00:00.000Z",
    completed_at: "2026-11-21T10:00:00.050Z",
    latency_ms: 42,
    req_size: 17,
    resp_size: 17,
    req_sha256: linkTo("request"),
    resp_sha256: linkTo("response"),
    payment: null,
    settlement: null,
    previous: null,
    ...fields,
  };
}

/** Receipts that follow one another, from `previous` on. */
export async function signedChain({ sign }: Signer, length: number, previous: string | null = null): Promise<string[]> {
  const lines: string[] = [];
  for (let link = previous; lines.length < length; ) {
    const jws = await sign(receiptClaims({ previous: link }));
    lines.push(jws);
    link = linkTo(jws);
  }
  return lines;
}
