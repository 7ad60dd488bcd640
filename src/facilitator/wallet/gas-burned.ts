// Gas that reverted transfers have burned. Each counts once, however often it is found and by whichever process.
import { and, eq, isNotNull, isNull } from "drizzle-orm";
import type { Tx } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { change, lockDays } from "../payments/guardrails.ts";
import { findPayment } from "../payments/payments.ts";

/** A transaction of ours in which a payment's transfer reverted, and what that cost. */
export interface Reverted {
  readonly hash: Hex;
  readonly gasWei: bigint;
}

/** False when it was marked before, for this payment. */
export async function markBurned(tx: Tx, { payer, nonce }: PaymentKey, { hash, gasWei }: Reverted): Promise<boolean> {
  const set = { gas_burned: String(gasWei) };
  // It is in one of the two, by whether the transaction makes one payment or several.
  for (const t of [tx.tables.facilitatorTransactions, tx.tables.facilitatorTransactionPayments]) {
    const own = and(eq(t.hash, hash), eq(t.payer, payer), eq(t.nonce, nonce));
    const rows = await tx.db
      .update(t)
      .set(set)
      .where(and(own, isNull(t.gas_burned)))
      .returning({ hash: t.hash });
    if (rows.length > 0) return true;
  }
  return false;
}

async function isAnyBurned(tx: Tx, { payer, nonce }: PaymentKey): Promise<boolean> {
  for (const t of [tx.tables.facilitatorTransactions, tx.tables.facilitatorTransactionPayments]) {
    const ofPayment = and(eq(t.payer, payer), eq(t.nonce, nonce), isNotNull(t.gas_burned));
    const [counted] = await tx.db.select({ hash: t.hash }).from(t).where(ofPayment).limit(1);
    if (counted !== undefined) return true;
  }
  return false;
}

/**
 * A transfer reverted after its payment had failed for another reason: its gas counts on this UTC day, and the
 * payment's share of the ceiling, which was given back, is taken again. This is counted once.
 */
export async function countLate(tx: Tx, key: PaymentKey, reverted: Reverted, on: string): Promise<boolean> {
  const known = await findPayment(tx, key);
  if (known === null) return false;
  const { account, day, value } = known;
  await lockDays(tx, account);
  if ((await findPayment(tx, key))?.status !== "failed") return false;
  const isCounted = await isAnyBurned(tx, key);
  if (!(await markBurned(tx, key, reverted))) return false;
  if (!isCounted) await change(tx, { account, day }, { reserved: BigInt(value) });
  await change(tx, { account, day: on }, { gasBurned: reverted.gasWei });
  const { facilitatorPayments: t } = tx.tables;
  await tx.db
    .update(t)
    .set({ reverted_on: on })
    .where(and(eq(t.payer, key.payer), eq(t.nonce, key.nonce)));
  return true;
}
