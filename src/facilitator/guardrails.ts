// The limits of an account: which kind of payment it may settle, how much in one transaction, and how much in one
// UTC day. Pure; amounts are smallest units of the token, and what equals a limit is allowed.
import { NETWORK, TOKEN } from "../x402/kind.ts";

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

export interface Presented {
  readonly network: string;
  /** The network and the asset that the requirements name. */
  readonly requiredNetwork: string;
  /** The token's address, lower case. */
  readonly asset: string;
  readonly value: bigint;
}

const TOKEN_LOWER = TOKEN.toLowerCase();

/** Every account may settle the one kind of the deployment. */
export function isAllowedKind({ network, requiredNetwork, asset }: Omit<Presented, "value">): boolean {
  return network === NETWORK && requiredNetwork === NETWORK && asset === TOKEN_LOWER;
}

/** Whether `value` more than what is `reserved` already is more than the ceiling allows. */
export function exceedsCeiling(reserved: bigint, value: bigint, dailyCeiling: bigint): boolean {
  return reserved + value > dailyCeiling;
}

/** The first limit that the payment breaks, when `reserved` of the account's ceiling is taken. */
export function checkGuardrails(
  presented: Presented,
  reserved: bigint,
  limits: Limits,
): GuardrailProblem | null {
  if (!isAllowedKind(presented)) return "kind_not_allowed";
  if (presented.value > limits.maxPerTransaction) return "over_max_per_transaction";
  if (exceedsCeiling(reserved, presented.value, limits.dailyCeiling)) return "over_daily_ceiling";
  return null;
}
