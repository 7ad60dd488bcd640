// The limits of an account: which kind of payment it may settle, how much in one transaction, and how much in one
// UTC day; and how much gas it may have burned on one. Pure; amounts are smallest units of the token, gas is in wei,
// and what equals a limit is allowed.
import { NETWORK, TOKEN } from "../../x402/kind.ts";
import type { Payment, Requirements } from "../../x402/types.ts";
import type { Used } from "./daily-limits.ts";

const TOKEN_LOWER = TOKEN.toLowerCase();

/** The account's own limits; null for the deployment's default. */
export interface AccountLimits {
  readonly maxPerTransaction: bigint | null;
  readonly dailyCeiling: bigint | null;
}

/** An account that may settle. */
export interface FacilitatorAccount extends AccountLimits {
  readonly name: string;
}

export interface Limits {
  readonly maxPerTransaction: bigint;
  readonly dailyCeiling: bigint;
  /** Of reverted transactions; 0 for no bound. */
  readonly dailyGasWei: bigint;
  /** Of all transactions; 0 for no bound. */
  readonly dailyGasAllWei: bigint;
  readonly minValue: bigint;
}

export type GuardrailProblem =
  | "kind_not_allowed"
  | "over_max_per_transaction"
  | "over_daily_ceiling"
  | "over_daily_gas"
  | "payer_reverted"
  | "under_min_value"
  | "payer_is_payee";

/** Some pass by themselves: the account may ask again on the chain's next day. */
export function isOfDay(problem: GuardrailProblem): boolean {
  return ["over_daily_ceiling", "over_daily_gas", "payer_reverted"].includes(problem);
}

export function limitsOf(account: AccountLimits, defaults: Limits): Limits {
  return {
    ...defaults,
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

/** An account below the bound may pass it with its last transaction. */
export function exceedsGas(burned: bigint, dailyGasWei: bigint): boolean {
  return dailyGasWei > 0n && burned > dailyGasWei;
}

/** Of one account on one day. A payer with code needs no transaction of its own to make its payments revert. */
export function isShutOut(reverts: number, hasCode: boolean): boolean {
  return reverts >= (hasCode ? 2 : 5);
}

/**
 * Whether a payer without code has as many payments under way as it may have: by one transaction that moves its money it
 * can make all of them revert. A payer with code holds their gas instead.
 */
export function exceedsOpen(open: number, hasCode: boolean): boolean {
  return !hasCode && open >= 256;
}

/** Whether `more` exceeds the bound, beside what is used and held. A first payment of the day may be dearer than that. */
export function exceedsGasOfAll(used: bigint, more: bigint, dailyGasAllWei: bigint): boolean {
  return dailyGasAllWei > 0n && used > 0n && used + more > dailyGasAllWei;
}

interface GasAtOnce {
  readonly burned: bigint;
  /** For others under way, and of that for those of the same payer. */
  readonly reserved: bigint;
  readonly own: bigint;
  readonly more: bigint;
}

/**
 * Whether `more` exceeds the bound, together with what has burned and what is `reserved`, or one payer would hold more than
 * an eighth of it: it must not burn what the account has for all. A single payment is let through, since one alone may
 * cost more than the bound when gas is expensive.
 */
export function exceedsGasAtOnce({ burned, reserved, own, more }: GasAtOnce, dailyGasWei: bigint): boolean {
  if (dailyGasWei === 0n || more === 0n) return false;
  const isOver = reserved > 0n && burned + reserved + more > dailyGasWei;
  return isOver || (own > 0n && 8n * (own + more) > dailyGasWei);
}

/** The first limit that the payment breaks, when so much of the account's day is used. */
export function checkGuardrails(
  payment: Payment,
  requirements: Requirements,
  { used, limits }: { readonly used: Used; readonly limits: Limits },
): GuardrailProblem | null {
  const { value } = payment.authorization;
  if (!isAllowedKind(payment, requirements)) return "kind_not_allowed";
  if (payment.authorization.from === payment.authorization.to) return "payer_is_payee";
  if (value < limits.minValue) return "under_min_value";
  if (value > limits.maxPerTransaction) return "over_max_per_transaction";
  if (exceedsCeiling(used.reserved, value, limits.dailyCeiling)) return "over_daily_ceiling";
  const isOver =
    exceedsGas(used.gasBurned, limits.dailyGasWei) || exceedsGasOfAll(used.gasUsed, 1n, limits.dailyGasAllWei);
  return isOver ? "over_daily_gas" : null;
}
