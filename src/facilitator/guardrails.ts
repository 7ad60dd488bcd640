// The limits of an account: which kind of payment it may settle, how much in one transaction, and how much in one
// UTC day. Pure; amounts are smallest units of the token, and what equals a limit is allowed.
import { NETWORK, TOKEN } from "../x402/kind.ts";
import type { Payment, Requirements } from "../x402/types.ts";

const TOKEN_LOWER = TOKEN.toLowerCase();

/** The account's own limits; null for the deployment's default. */
export interface AccountLimits {
  readonly maxPerTransaction: bigint | null;
  readonly dailyCeiling: bigint | null;
}

export interface Limits {
  readonly maxPerTransaction: bigint;
  readonly dailyCeiling: bigint;
}

export type GuardrailProblem = "kind_not_allowed" | "over_max_per_transaction" | "over_daily_ceiling";

export function limitsOf(account: AccountLimits, defaults: Limits): Limits {
  return {
    maxPerTransaction: account.maxPerTransaction ?? defaults.maxPerTransaction,
    dailyCeiling: account.dailyCeiling ?? defaults.dailyCeiling,
  };
}

/** Every account may settle the one kind of the deployment. */
function isAllowedKind({ network }: Payment, requirements: Requirements): boolean {
  return network === NETWORK && requirements.network === NETWORK && requirements.asset === TOKEN_LOWER;
}

/** Whether `value` more than what is `reserved` already is more than the ceiling allows. */
export function exceedsCeiling(reserved: bigint, value: bigint, dailyCeiling: bigint): boolean {
  return reserved + value > dailyCeiling;
}

/** The first limit that the payment breaks, when `reserved` of the account's ceiling is taken. */
export function checkGuardrails(
  payment: Payment,
  requirements: Requirements,
  { reserved, limits }: { readonly reserved: bigint; readonly limits: Limits },
): GuardrailProblem | null {
  const { value } = payment.authorization;
  if (!isAllowedKind(payment, requirements)) return "kind_not_allowed";
  if (value > limits.maxPerTransaction) return "over_max_per_transaction";
  return exceedsCeiling(reserved, value, limits.dailyCeiling) ? "over_daily_ceiling" : null;
}
