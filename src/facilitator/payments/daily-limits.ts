// What an account has used of its limits on a UTC day: the part of its ceiling that settled and open payments hold,
// and the gas that its reverted transactions have burned. Whoever changes it holds the account's lock.
import { and, eq } from "drizzle-orm";
import type { Reader, Tx } from "../../storage/store.ts";

export interface DayOfAccount {
  readonly account: string;
  /** `2026-11-21` */
  readonly day: string;
}

export interface Used {
  /** Smallest units of the token. */
  readonly reserved: bigint;
  /** Wei. */
  readonly gasBurned: bigint;
}

/** The UTC day of `now` (milliseconds), `2026-11-21`. */
export function utcDay(now: number): string {
  return new Date(now).toISOString().slice(0, 10);
}

/** Taken before any row of a payment is written, and before a payer's lock: another order could end in a deadlock. */
export function lockDays(tx: Tx, account: string): Promise<void> {
  return tx.lock(`ceiling:${account}`);
}

export async function usedOn(reader: Reader, { account, day }: DayOfAccount): Promise<Used> {
  const { facilitatorDays: t } = reader.tables;
  const [row] = await reader.db
    .select({ reserved: t.reserved, gas_burned: t.gas_burned })
    .from(t)
    .where(and(eq(t.account, account), eq(t.day, day)));
  return { reserved: BigInt(row?.reserved ?? 0), gasBurned: BigInt(row?.gas_burned ?? 0) };
}

export function reserve(tx: Tx, of: DayOfAccount, amount: bigint): Promise<void> {
  return change(tx, of, ({ reserved, gasBurned }) => ({ reserved: reserved + amount, gasBurned }));
}

/** A day that has been cleaned up has nothing to give back to. */
export function giveBack(tx: Tx, of: DayOfAccount, amount: bigint): Promise<void> {
  return change(tx, of, ({ reserved, gasBurned }) => ({
    reserved: reserved > amount ? reserved - amount : 0n,
    gasBurned,
  }));
}

export function burn(tx: Tx, of: DayOfAccount, wei: bigint): Promise<void> {
  return change(tx, of, ({ reserved, gasBurned }) => ({ reserved, gasBurned: gasBurned + wei }));
}

async function change(tx: Tx, of: DayOfAccount, next: (used: Used) => Used): Promise<void> {
  const { facilitatorDays: t } = tx.tables;
  const { reserved, gasBurned } = next(await usedOn(tx, of));
  const set = { reserved: String(reserved), gas_burned: String(gasBurned) };
  await tx.db
    .insert(t)
    .values({ account: of.account, day: of.day, ...set })
    .onConflictDoUpdate({ target: [t.account, t.day], set });
}
