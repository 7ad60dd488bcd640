// Gas that reverted transfers have burned. Each counts once, however often it is found and by whichever process.
import { and, eq, isNotNull, isNull } from "drizzle-orm";
import type { Tx } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { burn, lockDays, reserve, utcDay } from "../payments/daily-limits.ts";
import { findPayment } from "../payments/payments.ts";

/** A transfer of ours that reverted. */
export interface Reverted {
  readonly hash: Hex;
  readonly gasWei: bigint;
}

/** False when it was marked before. */
export async function markBurned(tx: Tx, { hash, gasWei }: Reverted): Promise<boolean> {
  const { facilitatorTransactions: t } = tx.tables;
  const rows = await tx.db
    .update(t)
    .set({ gas_burned: String(gasWei) })
    .where(and(eq(t.hash, hash), isNull(t.gas_burned)))
    .returning({ hash: t.hash });
  return rows.length > 0;
}

/**
 * A transfer reverted after its payment had failed for another reason: its gas counts on the UTC day of `now`, and the
 * payment's share of the ceiling, which was given back, is taken again. This is counted once.
 */
export async function countLate(tx: Tx, key: PaymentKey, reverted: Reverted, now: number): Promise<boolean> {
  const { facilitatorTransactions: t } = tx.tables;
  const known = await findPayment(tx, key);
  if (known === null) return false;
  const { account, day, value } = known;
  await lockDays(tx, account);
  if ((await findPayment(tx, key))?.status !== "failed") return false;
  const ofPayment = and(eq(t.payer, key.payer), eq(t.nonce, key.nonce), isNotNull(t.gas_burned));
  const [counted] = await tx.db.select({ hash: t.hash }).from(t).where(ofPayment).limit(1);
  if (!(await markBurned(tx, reverted))) return false;
  if (counted === undefined) await reserve(tx, { account, day }, BigInt(value));
  await burn(tx, { account, day: utcDay(now) }, reverted.gasWei);
  return true;
}
