// The checks of a payment that need no chain: its signer, its validity window, and whether it meets the requirements.
import { Fault } from "../core/fault.ts";
import { type ComputeTask, compute } from "../kernel/compute.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairShare } from "../kernel/share.ts";
import { inTurn } from "../kernel/turns.ts";
import { recoverSigner } from "./eip3009.ts";
import { type Network, SCHEME } from "./network.ts";
import type { Authorization, Hex, Payment, PaymentKey, Requirements } from "./types.ts";

/**
 * "other" does not mean invalid: the signature may be a contract wallet's, which only the token can check. Nor is "payer"
 * final if the payer has code: then the token asks the payer's contract.
 */
export type SignedBy = "payer" | "other";

/** An authorization with its signature, and the hash of the token's EIP-712 domain. */
export type SignedAuthorization = Pick<Payment, "authorization" | "signature"> & { readonly domain: Hex };

export const checkSignature = ({ domain, authorization, signature }: SignedAuthorization): SignedBy =>
  recoverSigner(domain, authorization, signature) === authorization.from ? "payer" : "other";

/**
 * Null when `validAfter` ≤ now and `validBefore` ≥ now + margin, the gateway's rule word for word; else the problem.
 *
 * On chain both bounds are exclusive (`validAfter` < block time < `validBefore`), in whole seconds: a block at time t accepts
 * the authorization exactly when `checkWindow(authorization, t - 1, 2)` is null.
 * @param nowSeconds whole unix seconds
 * @param marginSeconds whole seconds for which the authorization must still be valid
 */
export function checkWindow(authorization: Authorization, nowSeconds: number | bigint, marginSeconds: number | bigint) {
  const now = BigInt(nowSeconds);
  if (authorization.validAfter > now) return "not_yet_valid";
  return authorization.validBefore < now + BigInt(marginSeconds) ? "expired" : null;
}

/**
 * Null if the payment meets the requirements and both use our scheme, network and token; else the problem. Network and asset
 * are checked last: at the facilitator they are guardrails, which come after everything else.
 * @param rule `exactValue`: the value is the price (gateway); otherwise at most the price (facilitator)
 */
export function checkRequirements(
  network: Network,
  payment: Payment,
  requirements: Requirements,
  rule: { readonly exactValue: boolean },
) {
  const { to, value } = payment.authorization;
  const price = requirements.maxAmountRequired;
  if (payment.scheme !== SCHEME || requirements.scheme !== SCHEME) return "wrong_scheme";
  if (to !== requirements.payTo) return "wrong_recipient";
  if (rule.exactValue && value !== price) return "wrong_value";
  if (value > price) return "value_too_high";
  if (payment.network !== network.name || requirements.network !== network.name) return "wrong_network";
  return requirements.asset === network.token.key ? null : "wrong_asset";
}

export function keyOf({ chainId, token }: Network, { from, nonce }: Pick<Authorization, "from" | "nonce">): PaymentKey {
  return { chain_id: chainId, token: token.key, payer: from, nonce };
}

// Signatures for many callers at once. One verification takes 0.7 ms of a core. A few run on the main thread, and so does a
// tenant's only one, so that it does not queue behind others' many. The rest run on compute threads.

/** With up to so many in flight, the main thread is done before another thread would have started. */
const INLINE_MAX = 4;

export const SIGNATURE: ComputeTask<SignedAuthorization, SignedBy> = { name: "signature", run: checkSignature };

export type Verifier = ReturnType<typeof createVerifier>;

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
    if (slots.inUse <= INLINE_MAX) return verifyInline();
    // What a thread failed to do is done here, where a real problem throws its own error.
    return compute(SIGNATURE, signed, { tenant: owner, bytes: 0 }).catch(verifyInline);
  }

  return {
    /** `checkSignature`, on whichever thread, for a tenant or account. @throws Fault `unavailable` when too many wait */
    async signedBy(owner: string, { authorization, signature }: Omit<SignedAuthorization, "domain">) {
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
