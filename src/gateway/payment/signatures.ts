// Signatures that were judged lately. A call that is made again, after a lost answer or to ask how it stands, brings the
// same payment, and one recovery costs about 0.7 ms of a core. What is remembered is bound to all that was judged: the
// digest of the authorization, every byte of the signature, and the payer.

import { afterShared } from "../../concurrency/request-turns.ts";
import { tenantCache } from "../../concurrency/tenant-cache.ts";
import { asBuffer } from "../../core/bytes.ts";
import { authorizationDigest } from "../../x402/eip3009.ts";
import type { Payment } from "../../x402/types.ts";
import type { Verifier } from "../../x402/verifier/verifier.ts";
import type { SignedBy } from "../../x402/verify.ts";

/** Of all tenants together, about 400 bytes each. */
const REMEMBERED_MAX = 10_000;

export type SignatureCheck = ReturnType<typeof createSignatureCheck>;

/** @param judge throws Fault `unavailable` when too many wait */
export function createSignatureCheck(judge: Verifier["signedBy"], max = REMEMBERED_MAX) {
  const known = tenantCache<string, SignedBy>(max);
  const underWay = new Map<string, Promise<SignedBy>>();

  async function judgeAndRemember(tenant: string, payment: Payment, key: string): Promise<SignedBy> {
    try {
      const found = await judge(tenant, payment);
      known.set(tenant, key, found);
      return found;
    } finally {
      underWay.delete(key);
    }
  }

  return async (tenant: string, payment: Payment): Promise<SignedBy> => {
    const { authorization, signature } = payment;
    // The tenant comes last: what is before it has one form, so no two of these are the same text.
    const digest = asBuffer(authorizationDigest(authorization)).toString("hex");
    const key = `${digest} ${signature} ${authorization.from} ${tenant}`;
    const remembered = known.get(key);
    if (remembered !== undefined) return remembered;
    const shared = underWay.get(key);
    if (shared !== undefined) return afterShared(shared, tenant);
    const judged = judgeAndRemember(tenant, payment, key);
    underWay.set(key, judged);
    return judged;
  };
}
