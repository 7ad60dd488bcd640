// The checks of a payment that need no chain: its signer, its validity window, and whether it meets the requirements.
// Pure: the caller passes the time.
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

export function checkSignature({ domain, authorization, signature }: SignedAuthorization): SignedBy {
  return recoverSigner(domain, authorization, signature) === authorization.from ? "payer" : "other";
}

/**
 * Holds when `validAfter` ≤ now and `validBefore` ≥ now + margin, which is the gateway's rule word for word.
 *
 * On chain both bounds are exclusive (`validAfter` < block time < `validBefore`), in whole seconds: a block at time t accepts
 * the authorization exactly when `checkWindow(authorization, t - 1, 2)` holds.
 *
 * @param nowSeconds whole unix seconds
 * @param marginSeconds whole seconds for which the authorization must still be valid
 */
export function checkWindow(authorization: Authorization, nowSeconds: number | bigint, marginSeconds: number | bigint) {
  const now = BigInt(nowSeconds);
  if (authorization.validAfter > now) return "not_yet_valid";
  return authorization.validBefore < now + BigInt(marginSeconds) ? "expired" : null;
}

/**
 * Whether the payment meets the requirements, and both use the scheme, network and token accepted here. Network and asset
 * are checked last: at the facilitator they are guardrails, which come after everything else.
 *
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
