// The limits of an account, per transaction and per UTC day, and its usage of a day, which changes under the account's lock.
// Amounts are in the token's smallest units, gas is in wei, and a value equal to a limit is allowed.
import { and, count, eq } from "drizzle-orm";
import { bindAll, prepared, preparedRow, type Reader, type Tx } from "../../storage/store.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex, Payment, Requirements } from "../../x402/types.ts";

/** An account that may settle. A limit is null where the deployment's default applies. */
export interface FacilitatorAccount {
  readonly name: string;
  readonly maxPerTransaction: bigint | null;
  readonly dailyCeiling: bigint | null;
}

export interface Limits {
  readonly maxPerTransaction: bigint;
  /** Per account and UTC day. */
  readonly dailyCeiling: bigint;
  /** Wei that an account's reverted transactions may burn per UTC day; 0 for no limit. */
  readonly dailyGasWei: bigint;
  /** Wei that all transactions of an account may cost per UTC day; 0 for no limit. */
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

/** Whether the problem is a daily one, which ends by itself on the chain's next UTC day. */
export const isOfDay = (problem: GuardrailProblem): boolean =>
  ["over_daily_ceiling", "over_daily_gas", "payer_reverted"].includes(problem);

export function limitsOf(account: Omit<FacilitatorAccount, "name">, defaults: Limits): Limits {
  return {
    ...defaults,
    maxPerTransaction: account.maxPerTransaction ?? defaults.maxPerTransaction,
    dailyCeiling: account.dailyCeiling ?? defaults.dailyCeiling,
  };
}

export const exceedsCeiling = (reserved: bigint, value: bigint, dailyCeiling: bigint): boolean =>
  reserved + value > dailyCeiling;

/** The last transaction of an account below the limit may exceed it. */
export const exceedsGas = (burned: bigint, dailyGasWei: bigint): boolean => dailyGasWei > 0n && burned > dailyGasWei;

/** Whether the payer had too many reverts for this account and day. A payer with code can cause them at no cost. */
export const isShutOut = (reverts: number, hasCode: boolean): boolean => reverts >= (hasCode ? 2 : 5);

/**
 * Whether a payer without code has as many open payments as allowed: one transaction that moves its money away can make all
 * of them revert. For a payer with code, the gas of each payment is reserved instead.
 */
export const exceedsOpen = (open: number, hasCode: boolean): boolean => !hasCode && open >= 256;

/** Whether `more` would exceed the daily limit on top of `used`. The first payment of a day may cost more than the limit. */
export const exceedsGasOfAll = (used: bigint, more: bigint, dailyGasAllWei: bigint): boolean =>
  dailyGasAllWei > 0n && used > 0n && used + more > dailyGasAllWei;

/**
 * Whether `more` would exceed the daily limit on top of what is `burned` and `reserved` for open payments, or would give one
 * payer more than an eighth of the limit (`own` is what it has reserved), so that no payer burns the gas of all. A payment
 * with nothing else reserved passes, since one alone may cost more than the limit when gas is expensive.
 */
export function exceedsGasAtOnce(
  { burned, reserved, own, more }: Readonly<Record<"burned" | "reserved" | "own" | "more", bigint>>,
  dailyGasWei: bigint,
): boolean {
  if (dailyGasWei === 0n || more === 0n) return false;
  const isOver = reserved > 0n && burned + reserved + more > dailyGasWei;
  return isOver || (own > 0n && 8n * (own + more) > dailyGasWei);
}

/** The first limit that the payment breaks, given what the account has used on the day; null when it breaks none. */
export function checkGuardrails(
  payment: Payment,
  requirements: Requirements,
  { network, used, limits }: { readonly network: Network; readonly used: Used; readonly limits: Limits },
): GuardrailProblem | null {
  const { value } = payment.authorization;
  // The deployment has one network and token, and every account may settle them.
  if (payment.network !== network.name || requirements.network !== network.name) return "kind_not_allowed";
  if (requirements.asset !== network.token.key) return "kind_not_allowed";
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
  /** A UTC day such as `2026-11-21`. */
  readonly day: string;
}

export interface Used {
  readonly reserved: bigint;
  /** Wei burned by reverted transactions. */
  readonly gasBurned: bigint;
  /** Wei spent by all transactions plus what open payments hold; counted only where dailyGasAllWei sets a limit. */
  readonly gasUsed: bigint;
}

/** The UTC day of `now` (milliseconds), such as `2026-11-21`. */
export const utcDay = (now: number): string => new Date(now).toISOString().slice(0, 10);

/** Takes the account's lock: before any row of a payment is written and before a payer's lock, or a deadlock could occur. */
export const lockDays = (tx: Tx, account: string): Promise<void> => tx.lock(`ceiling:${account}`);

const dayOfAccount = preparedRow(({ db, tables: { facilitatorDays: t } }) => {
  const { account, day } = bindAll(t, ["account", "day"]);
  const isDay = and(eq(t.account, account), eq(t.day, day));
  return db.select().from(t).where(isDay);
});

export async function usedOn(reader: Reader, of: DayOfAccount): Promise<Used> {
  const row = await dayOfAccount(reader, of);
  const amount = (text: string | undefined) => BigInt(text ?? 0);
  return { reserved: amount(row?.reserved), gasBurned: amount(row?.gas_burned), gasUsed: amount(row?.gas_used) };
}

/** How many payments of the payer for this account reverted on the day. */
export const revertsOf = async (reader: Reader, of: DayOfAccount, payer: Hex): Promise<number> =>
  Number((await revertsOfPayer(reader, { ...of, payer }))?.reverts ?? 0);

const revertsOfPayer = preparedRow(({ db, tables: { facilitatorPayments: t } }) => {
  const { payer, account, day } = bindAll(t, ["payer", "account", "day"]);
  const isRevertOfDay = and(eq(t.payer, payer), eq(t.reverted_on, day), eq(t.account, account));
  return db.select({ reverts: count() }).from(t).where(isRevertOfDay);
});

/** Adds the amounts, which may be negative, to what the day has used. A sum stays at 0 or above, even on a day cleaned up since. */
export async function change(tx: Tx, of: DayOfAccount, by: Partial<Used>): Promise<void> {
  const used = await usedOn(tx, of);
  const sum = (name: keyof Used) => {
    const next = used[name] + (by[name] ?? 0n);
    return String(next > 0n ? next : 0n);
  };
  const set = { reserved: sum("reserved"), gas_burned: sum("gasBurned"), gas_used: sum("gasUsed") };
  await setDay(tx).execute({ account: of.account, day: of.day, ...set });
}

const setDay = prepared(({ db, tables: { facilitatorDays: t } }: Tx) => {
  const { account, day, ...set } = bindAll(t);
  return db
    .insert(t)
    .values({ account, day, ...set })
    .onConflictDoUpdate({ target: [t.account, t.day], set });
});
