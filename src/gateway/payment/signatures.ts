// Signatures that were judged lately. A call that is made again, after a lost answer or to ask how it stands, brings the
// same payment, and one recovery costs about 0.3 ms of the event loop. What is remembered is bound to all that was
// judged: the digest of the authorization, every byte of the signature, and the payer.

import { tenantCache } from "../../concurrency/tenant-cache.ts";
import { asBuffer } from "../../core/bytes.ts";
import { authorizationDigest } from "../../x402/eip3009.ts";
import type { Payment } from "../../x402/types.ts";
import { checkSignature } from "../../x402/verify.ts";

/** Of all tenants together, about 400 bytes each. */
const REMEMBERED_MAX = 10_000;

export type SignatureCheck = ReturnType<typeof createSignatureCheck>;

/** @param judge replaced by tests, which count */
export function createSignatureCheck(judge = checkSignature, max = REMEMBERED_MAX) {
  const known = tenantCache<string, ReturnType<typeof checkSignature>>(max);
  return (tenant: string, payment: Payment): ReturnType<typeof checkSignature> => {
    const { authorization, signature } = payment;
    // The tenant comes last: what is before it has one form, so no two of these are the same text.
    const digest = asBuffer(authorizationDigest(authorization)).toString("hex");
    const key = `${digest} ${signature} ${authorization.from} ${tenant}`;
    const remembered = known.get(key);
    if (remembered !== undefined) return remembered;
    const found = judge(payment);
    known.set(tenant, key, found);
    return found;
  };
}
