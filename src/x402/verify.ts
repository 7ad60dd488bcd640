// What can be checked of a payment without a chain: who signed it, when it is valid, and whether it is what was asked for.
// Pure: the caller passes the time.
import { recoverSigner } from "./eip3009.ts";
import { CHAIN_ID, NETWORK, SCHEME, TOKEN } from "./kind.ts";
import { type Authorization, lowerHex, type Payment, type PaymentKey, type Requirements } from "./types.ts";

const TOKEN_KEY = lowerHex(TOKEN);

/**
 * "other" does not mean invalid: the signature may be a contract wallet's, which only the token can judge. Nor is "payer"
 * final on chain if the payer has code: then the token asks the contract.
 */
export type SignedBy = "payer" | "other";

export function checkSignature({ authorization, signature }: Pick<Payment, "authorization" | "signature">): SignedBy {
  return recoverSigner(authorization, signature) === authorization.from ? "payer" : "other";
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
 * Whether the payment is what the requirements ask for, and both are of the kind that this version takes. Network
 * and asset come last: with the facilitator they are guardrails, which come after everything else.
 *
 * @param rule `exactValue`: the value is the price (gateway); otherwise at most the price (facilitator)
 */
export function checkRequirements(
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
  if (payment.network !== NETWORK || requirements.network !== NETWORK) return "wrong_network";
  return requirements.asset === TOKEN_KEY ? null : "wrong_asset";
}

export function keyOf({ from, nonce }: Pick<Authorization, "from" | "nonce">): PaymentKey {
  return { chain_id: CHAIN_ID, token: TOKEN_KEY, payer: from, nonce };
}
