// Verifies payment signatures for many callers at once. One verification takes 0.7 ms of a core. A few run on the main
// thread, and so does a tenant's only one, so that it does not queue behind others' many. The rest run on compute threads.

import { Fault } from "../core/fault.ts";
import { type ComputeTask, compute } from "../kernel/compute.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairShare } from "../kernel/share.ts";
import { inTurn } from "../kernel/turns.ts";
import type { Hex } from "./types.ts";
import { checkSignature, type SignedAuthorization, type SignedBy } from "./verify.ts";

/** Up to so many in flight, the main thread is done before another thread would have started. */
const INLINE_MOST = 4;

export const SIGNATURE: ComputeTask<SignedAuthorization, SignedBy> = { name: "signature", run: checkSignature };

export type Verifier = ReturnType<typeof createVerifier>;

/** @param domain the hash of the token's EIP-712 domain */
export function createVerifier(domain: Hex, waitingMax: number = MAX.verifications) {
  const slots = createFairShare({ size: waitingMax });
  let isSingleInline = false;

  async function verify(owner: string, signed: SignedAuthorization): Promise<SignedBy> {
    const verifyInline = () => inTurn(owner, () => checkSignature(signed));
    if (slots.heldBy(owner) === 1 && !isSingleInline) {
      isSingleInline = true;
      return verifyInline().finally(() => {
        isSingleInline = false;
      });
    }
    if (slots.inUse <= INLINE_MOST) return verifyInline();
    // What a thread failed to do is done here, where a real problem throws its own error.
    return compute(SIGNATURE, signed, { tenant: owner, bytes: 0 }).catch(verifyInline);
  }

  return {
    /**
     * Does what `checkSignature` does, on whichever thread.
     *
     * @param owner the tenant or account that waits for the result
     * @throws Fault `unavailable` when too many verifications wait
     */
    async signedBy(
      owner: string,
      { authorization, signature }: Omit<SignedAuthorization, "domain">,
    ): Promise<SignedBy> {
      if (slots.take(owner) !== null) {
        throw new Fault("unavailable", "too many payments wait to be verified", { retryAfterSeconds: 1 });
      }
      try {
        return await verify(owner, { domain, authorization, signature });
      } finally {
        slots.giveBack(owner);
      }
    },
  };
}
