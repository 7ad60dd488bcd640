// The limits of an account, in one transaction and on one UTC day, and what it has used of them on a day. Amounts are smallest
// units of the token, gas is in wei, and what equals a limit is allowed. Who changes what is used holds the account's lock.

import { and, count, eq } from "drizzle-orm";
import type { Reader, Tx } from "../../storage/store.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex, Payment, Requirements } from "../../x402/types.ts";

/** An account that may settle, with its own limits; null for the deployment's default. */
export interface FacilitatorAccount {
  readonly name: string;
  readonly maxPerTransaction: bigint | null;
  readonly dailyCeiling: bigint | null;
}

export interface Limits {
  readonly maxPerTransaction: bigint;
  /** Per account and UTC day. */
  readonly dailyCeiling: bigint;
  /** Wei that an account's reverted transactions may burn on a UTC day; 0 for no bound. */
  readonly dailyGasWei: bigint;
  /** Wei that all its transactions may cost on a day; 0 for no bound. */
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

export function limitsOf(account: Omit<FacilitatorAccount, "name">, defaults: Limits): Limits {
  return {
    ...defaults,
    maxPerTransaction: account.maxPerTransaction ?? defaults.maxPerTransaction,
    dailyCeiling: account.dailyCeiling ?? defaults.dailyCeiling,
  };
}

/** Every account may settle the one kind of the deployment. */
const isAllowedKind = ({ name, token }: Network, { network }: Payment, requirements: Requirements): boolean =>
  network === name && requirements.network === name && requirements.asset === token.key;

export const exceedsCeiling = (reserved: bigint, value: bigint, dailyCeiling: bigint): boolean =>
  reserved + value > dailyCeiling;

/** An account below the bound may pass it with its last transaction. */
export const exceedsGas = (burned: bigint, dailyGasWei: bigint): boolean => dailyGasWei > 0n && burned > dailyGasWei;

/** Of one account on one day. A payer with code needs no transaction of its own to make its payments revert. */
export const isShutOut = (reverts: number, hasCode: boolean): boolean => reverts >= (hasCode ? 2 : 5);

/**
 * Whether a payer without code has as many payments under way as it may have: by one transaction that moves its money it
 * can make all of them revert. A payer with code holds their gas instead.
 */
export const exceedsOpen = (open: number, hasCode: boolean): boolean => !hasCode && open >= 256;

/** Whether `more` exceeds the bound, beside what is used and held. A first payment of the day may be dearer than that. */
export function exceedsGasOfAll(used: bigint, more: bigint, dailyGasAllWei: bigint): boolean {
  return dailyGasAllWei > 0n && used > 0n && used + more > dailyGasAllWei;
}

/**
 * Whether `more` exceeds the bound, together with what has burned and what is `reserved` for others under way; or one payer
 * would hold more than an eighth of it (`own` is its part of that): it must not burn what the account has for all. A single
 * payment is let through, since one alone may cost more than the bound when gas is expensive.
 */
export function exceedsGasAtOnce(
  { burned, reserved, own, more }: Readonly<Record<"burned" | "reserved" | "own" | "more", bigint>>,
  dailyGasWei: bigint,
): boolean {
  if (dailyGasWei === 0n || more === 0n) return false;
  const isOver = reserved > 0n && burned + reserved + more > dailyGasWei;
  return isOver || (own > 0n && 8n * (own + more) > dailyGasWei);
}

/** The first limit that the payment breaks, when so much of the account's day is used. */
export function checkGuardrails(
  payment: Payment,
  requirements: Requirements,
  { network, used, limits }: { readonly network: Network; readonly used: Used; readonly limits: Limits },
): GuardrailProblem | null {
  const { value } = payment.authorization;
  if (!isAllowedKind(network, payment, requirements)) return "kind_not_allowed";
  if (payment.authorization.from === payment.authorization.to) return "payer_is_payee";
  if (value < limits.minValue) return "under_min_value";
  if (value > limits.maxPerTransaction) return "over_max_per_transaction";
  if (exceedsCeiling(used.reserved, value, limits.dailyCeiling)) return "over_daily_ceiling";
  const isOver =
    exceedsGas(used.gasBurned, limits.dailyGasWei) || exceedsGasOfAll(used.gasUsed, 1n, limits.dailyGasAllWei);
  return isOver ? "over_daily_gas" : null;
}

export interface DayOfAccount {
  readonly account: string;
  /** `2026-11-21` */
  readonly day: string;
}

export interface Used {
  readonly reserved: bigint;
  /** Wei, of reverted transactions. */
  readonly gasBurned: bigint;
  /** Wei, of all transactions, with what open payments hold; counted only where that has a bound. */
  readonly gasUsed: bigint;
}

/** The UTC day of `now` (milliseconds), `2026-11-21`. */
export const utcDay = (now: number): string => new Date(now).toISOString().slice(0, 10);

/** Taken before any row of a payment is written, and before a payer's lock: another order could end in a deadlock. */
export function lockDays(tx: Tx, account: string): Promise<void> {
  return tx.lock(`ceiling:${account}`);
}

export async function usedOn(reader: Reader, { account, day }: DayOfAccount): Promise<Used> {
  const { facilitatorDays: t } = reader.tables;
  const [row] = await reader.db
    .select()
    .from(t)
    .where(and(eq(t.account, account), eq(t.day, day)));
  const { reserved, gas_burned, gas_used } = row ?? { reserved: 0, gas_burned: 0, gas_used: 0 };
  return { reserved: BigInt(reserved), gasBurned: BigInt(gas_burned), gasUsed: BigInt(gas_used) };
}

/** How many payments of the payer for this account reverted on the day. */
export async function revertsOf(reader: Reader, { account, day }: DayOfAccount, payer: Hex): Promise<number> {
  const { facilitatorPayments: t } = reader.tables;
  const isIts = and(eq(t.payer, payer), eq(t.reverted_on, day), eq(t.account, account));
  const [row] = await reader.db.select({ reverts: count() }).from(t).where(isIts);
  return Number(row?.reverts ?? 0);
}

/** Adds to what is used, or takes from it. A day that has been cleaned up has nothing to give back. */
export async function change(tx: Tx, of: DayOfAccount, by: Partial<Used>): Promise<void> {
  const { facilitatorDays: t } = tx.tables;
  const used = await usedOn(tx, of);
  const sum = (name: keyof Used) => {
    const next = used[name] + (by[name] ?? 0n);
    return String(next > 0n ? next : 0n);
  };
  const set = { reserved: sum("reserved"), gas_burned: sum("gasBurned"), gas_used: sum("gasUsed") };
  const row = { account: of.account, day: of.day, ...set };
  await tx.db
    .insert(t)
    .values(row)
    .onConflictDoUpdate({ target: [t.account, t.day], set });
}
