// Whose signature a payment carries, for many callers. Judging one takes 0.7 ms of a core. A few are judged on the main
// thread, and so is a tenant's only one, so that it waits behind nobody's many. The others are judged on threads of their own.

import { Fault } from "../core/fault.ts";
import { type ComputeTask, compute } from "../kernel/compute.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairShare } from "../kernel/share.ts";
import { inTurn } from "../kernel/turns.ts";
import type { Hex } from "./types.ts";
import { checkSignature, type SignedAuthorization, type SignedBy } from "./verify.ts";

/** With no more than these the main thread is done before another has started. */
const FEW = 4;

export const SIGNATURE: ComputeTask<SignedAuthorization, SignedBy> = { name: "signature", run: checkSignature };

export type Verifier = ReturnType<typeof createVerifier>;

/** @param domain of the token of all payments */
export function createVerifier(domain: Hex, waitingMax: number = MAX.verifications) {
  const places = createFairShare({ size: waitingMax });
  let isOnlyOneDue = false;

  async function judge(owner: string, signed: SignedAuthorization): Promise<SignedBy> {
    const judgeHere = () => inTurn(owner, () => checkSignature(signed));
    if (places.heldBy(owner) === 1 && !isOnlyOneDue) {
      isOnlyOneDue = true;
      return judgeHere().finally(() => {
        isOnlyOneDue = false;
      });
    }
    if (places.inUse <= FEW) return judgeHere();
    // What a thread did not do is done here, and what it could not do fails here with the error itself.
    return compute(SIGNATURE, signed, { tenant: owner, bytes: 0 }).catch(judgeHere);
  }

  return {
    /**
     * Judges as checkSignature does.
     *
     * @param owner the tenant or account that waits for it
     * @throws Fault `unavailable` when too many wait
     */
    async signedBy(
      owner: string,
      { authorization, signature }: Omit<SignedAuthorization, "domain">,
    ): Promise<SignedBy> {
      if (places.take(owner) !== null) {
        throw new Fault("unavailable", "too many payments wait to be verified", { retryAfterSeconds: 1 });
      }
      try {
        return await judge(owner, { domain, authorization, signature });
      } finally {
        places.giveBack(owner);
      }
    },
  };
}
