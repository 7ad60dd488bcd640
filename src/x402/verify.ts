// What can be checked of a payment without a chain: who signed it, when it is valid, and whether it is what was asked for.
// Pure: the caller passes the time.
import { recoverSigner } from "./eip3009.ts";
import { type Network, SCHEME } from "./network.ts";
import type { Authorization, Hex, Payment, PaymentKey, Requirements } from "./types.ts";

/**
 * "other" does not mean invalid: the signature may be a contract wallet's, which only the token can judge. Nor is "payer"
 * final on chain if the payer has code: then the token asks the contract.
 */
export type SignedBy = "payer" | "other";

/** With the domain of the token. */
export type SignedAuthorization = Pick<Payment, "authorization" | "signature"> & { readonly domain: Hex };

export function checkSignature({ domain, authorization, signature }: SignedAuthorization): SignedBy {
  return recoverSigner(domain, authorization, signature) === authorization.from ? "payer" : "other";
}

/**
 * Holds when `validAfter` ≤ now and `validBefore` ≥ now + margin, which is the gateway's rule word for word.
 *
 * On chain both bounds exclude (`validAfter` < block time < `validBefore`), and these are whole seconds: a block at
 * time t takes it exactly when `checkWindow(authorization, t - 1, 2)` holds.
 *
 * @param nowSeconds whole unix seconds
 * @param marginSeconds whole seconds for which it must still be good
 */
export function checkWindow(authorization: Authorization, nowSeconds: number | bigint, marginSeconds: number | bigint) {
  const now = BigInt(nowSeconds);
  if (authorization.validAfter > now) return "not_yet_valid";
  return authorization.validBefore < now + BigInt(marginSeconds) ? "expired" : null;
}

/**
 * Whether the payment is what the requirements ask for, and both are of the kind that is taken on the network. Network
 * and asset come last: with the facilitator they are guardrails, which come after everything else.
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
