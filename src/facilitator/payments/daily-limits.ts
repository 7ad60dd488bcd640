// What an account has used of its limits on a UTC day: the part of its ceiling that settled and open payments hold,
// and the gas that its reverted transactions have burned. Whoever changes it holds the account's lock.
import { and, count, eq } from "drizzle-orm";
import type { Reader, Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";

export interface DayOfAccount {
  readonly account: string;
  /** `2026-11-21` */
  readonly day: string;
}

export interface Used {
  /** Smallest units of the token. */
  readonly reserved: bigint;
  /** Wei, of reverted transactions. */
  readonly gasBurned: bigint;
  /** Wei, of all transactions, with what open payments hold; counted only where that has a bound. */
  readonly gasUsed: bigint;
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
    .select({ reserved: t.reserved, gas_burned: t.gas_burned, gas_used: t.gas_used })
    .from(t)
    .where(and(eq(t.account, account), eq(t.day, day)));
  return {
    reserved: BigInt(row?.reserved ?? 0),
    gasBurned: BigInt(row?.gas_burned ?? 0),
    gasUsed: BigInt(row?.gas_used ?? 0),
  };
}

/** How many payments of the payer for this account reverted on the day. Another account's reverts are no matter of its own. */
export async function revertsOf(reader: Reader, { account, day }: DayOfAccount, payer: Hex): Promise<number> {
  const { facilitatorPayments: t } = reader.tables;
  const [row] = await reader.db
    .select({ reverts: count() })
    .from(t)
    .where(and(eq(t.payer, payer), eq(t.reverted_on, day), eq(t.account, account)));
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
  await tx.db
    .insert(t)
    .values({ account: of.account, day: of.day, ...set })
    .onConflictDoUpdate({ target: [t.account, t.day], set });
}
