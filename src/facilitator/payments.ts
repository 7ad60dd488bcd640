// The facilitator's payments in the database: claimed, sent, settled or failed, and what of an account's daily
// ceiling they hold. Every transition is a write guarded by the states that its event may start from, so a payment
// is claimed once, sent once, and gives its reservation back at most once.
import { and, asc, eq, inArray, sql } from "drizzle-orm";
import type { Tables } from "../../db/schema.ts";
import { COLLECTION_EVENTS } from "../core/states.ts";
import type { Reader, Tx } from "../storage/store.ts";
import type { Authorization, Hex, PaymentKey } from "../x402/types.ts";
import { exceedsCeiling } from "./guardrails.ts";

export type FacilitatorPayment = Tables["facilitatorPayments"]["$inferSelect"];

/** What a claim stores. */
export interface Claim {
  readonly key: PaymentKey;
  readonly account: string;
  readonly authorization: Authorization;
  readonly signature: Hex;
  /** JSON of the requirements, normalised. */
  readonly requirements: string;
  /** What the account may have settled and under way in one UTC day, in smallest units. */
  readonly dailyCeiling: bigint;
}

/** A payment that this facilitator has promised to collect. */
export interface ClaimedPayment {
  readonly key: PaymentKey;
  readonly authorization: Authorization;
  readonly signature: Hex;
}

export interface Inclusion {
  readonly transaction_hash: Hex;
  readonly block_number: number;
  readonly block_hash: Hex;
}

export interface Failure {
  /** The exact reason, for the operator alone. */
  readonly reason: string;
  /** Who used the authorization instead of us, where it is known. */
  readonly foreign_transaction: Hex | null;
}

type Payments = Tables["facilitatorPayments"];

function hasKey(t: Payments, key: PaymentKey) {
  return and(
    eq(t.chain_id, key.chain_id),
    eq(t.token, key.token),
    eq(t.payer, key.payer),
    eq(t.nonce, key.nonce),
  );
}

export async function findPayment(reader: Reader, key: PaymentKey): Promise<FacilitatorPayment | null> {
  const { facilitatorPayments: t } = reader.tables;
  const [row] = await reader.db.select().from(t).where(hasKey(t, key));
  return row ?? null;
}

export function claimedPayment(row: FacilitatorPayment): ClaimedPayment {
  return {
    key: { chain_id: row.chain_id, token: row.token, payer: row.payer, nonce: row.nonce },
    authorization: {
      from: row.payer,
      to: row.pay_to,
      value: BigInt(row.value),
      validAfter: BigInt(row.valid_after),
      validBefore: BigInt(row.valid_before),
      nonce: row.nonce,
    },
    signature: row.signature,
  };
}

/** The UTC day of `now` (milliseconds), `2026-11-21`. */
export function utcDay(now: number): string {
  return new Date(now).toISOString().slice(0, 10);
}

/**
 * Takes the payment and its share of the account's ceiling on the UTC day of `now`, both or neither. `taken`: there
 * is a record of it already. `ceiling`: the share would exceed the ceiling, and nothing was stored.
 */
export async function claimPayment(
  tx: Tx,
  claim: Claim,
  now: number,
): Promise<"claimed" | "taken" | "ceiling"> {
  const { key, account, authorization, dailyCeiling } = claim;
  const day = utcDay(now);
  await lockCeiling(tx, account);
  if ((await findPayment(tx, key)) !== null) return "taken";
  const reserved = await reservedOn(tx, account, day);
  if (exceedsCeiling(reserved, authorization.value, dailyCeiling)) return "ceiling";
  const { facilitatorPayments } = tx.tables;
  const inserted = await tx.db
    .insert(facilitatorPayments)
    .values({
      ...key,
      account,
      status: "claimed",
      pay_to: authorization.to,
      value: String(authorization.value),
      valid_after: String(authorization.validAfter),
      valid_before: String(authorization.validBefore),
      signature: claim.signature,
      requirements: claim.requirements,
      day,
      attempts: 1,
      created_at: now,
      updated_at: now,
    })
    .onConflictDoNothing()
    .returning({ nonce: facilitatorPayments.nonce });
  // Another account's claim of the same payment holds another lock.
  if (inserted.length === 0) return "taken";
  await setReserved(tx, account, day, reserved + authorization.value);
  return "claimed";
}

/** Whoever changes the reservations of an account holds its lock, taken before any row of a payment is written. */
function lockCeiling(tx: Tx, account: string): Promise<void> {
  return tx.lock(`ceiling:${account}`);
}

/** What of the account's ceiling is taken on `day`. */
export async function reservedOn(reader: Reader, account: string, day: string): Promise<bigint> {
  const { facilitatorDays: t } = reader.tables;
  const [row] = await reader.db
    .select({ reserved: t.reserved })
    .from(t)
    .where(and(eq(t.account, account), eq(t.day, day)));
  return row === undefined ? 0n : BigInt(row.reserved);
}

async function setReserved(tx: Tx, account: string, day: string, amount: bigint): Promise<void> {
  const { facilitatorDays: t } = tx.tables;
  const reserved = String(amount);
  await tx.db
    .insert(t)
    .values({ account, day, reserved })
    .onConflictDoUpdate({ target: [t.account, t.day], set: { reserved } });
}

/** On the day of the claim, whatever the day is now. A day that has been cleaned up has nothing to give back to. */
async function giveBack(tx: Tx, { account, day, value }: Reservation): Promise<void> {
  const { facilitatorDays: t } = tx.tables;
  const left = (await reservedOn(tx, account, day)) - BigInt(value);
  await tx.db
    .update(t)
    .set({ reserved: String(left < 0n ? 0n : left) })
    .where(and(eq(t.account, account), eq(t.day, day)));
}

type Reservation = Pick<FacilitatorPayment, "account" | "day" | "value">;

/**
 * Its first transaction is signed and stored in the same write; it may be broadcast from now on. False when the
 * payment is not claimed (any more): nothing may be broadcast then.
 */
export async function markSent(tx: Tx, key: PaymentKey, hash: Hex, now: number): Promise<boolean> {
  const { facilitatorPayments: t } = tx.tables;
  const { from, to } = COLLECTION_EVENTS.send;
  const rows = await tx.db
    .update(t)
    .set({ status: to, transaction_hash: hash, updated_at: now })
    .where(and(hasKey(t, key), inArray(t.status, [...from])))
    .returning({ nonce: t.nonce });
  return rows.length > 0;
}

/**
 * One more transaction for it is stored in the same write. False when the payment has ended: nothing may be broadcast
 * then. Its row is held until the commit, so nobody records it as failed beside.
 */
export async function markSentAgain(tx: Tx, key: PaymentKey, now: number): Promise<boolean> {
  const { facilitatorPayments: t } = tx.tables;
  const rows = await tx.db
    .update(t)
    .set({ updated_at: now })
    .where(and(hasKey(t, key), eq(t.status, COLLECTION_EVENTS.send.to)))
    .returning({ nonce: t.nonce });
  return rows.length > 0;
}

/** A transaction of ours moved the money. False when that is known already, or the payment is not under way. */
export async function recordSettled(
  tx: Tx,
  key: PaymentKey,
  inclusion: Inclusion,
  now: number,
): Promise<boolean> {
  const { facilitatorPayments: t } = tx.tables;
  const { from, to } = COLLECTION_EVENTS.settle;
  const rows = await tx.db
    .update(t)
    .set({
      status: to,
      transaction_hash: inclusion.transaction_hash,
      block_number: inclusion.block_number,
      block_hash: inclusion.block_hash,
      updated_at: now,
      ended_at: now,
    })
    .where(and(hasKey(t, key), inArray(t.status, [...from])))
    .returning({ nonce: t.nonce });
  return rows.length > 0;
}

/**
 * This facilitator can't collect it any more; its share of the ceiling is free again. False when it has ended, or is
 * in another state than the one that this was found out about: another process may have sent what was only claimed.
 */
export async function recordFailed(
  tx: Tx,
  key: PaymentKey,
  failure: Failure,
  { was, now }: { readonly was: (typeof COLLECTION_EVENTS.fail.from)[number]; readonly now: number },
): Promise<boolean> {
  const account = await lockAccountOf(tx, key);
  if (account === null) return false;
  const { facilitatorPayments: t } = tx.tables;
  const { to } = COLLECTION_EVENTS.fail;
  const [row] = await tx.db
    .update(t)
    .set({
      status: to,
      reason: failure.reason,
      foreign_transaction: failure.foreign_transaction,
      updated_at: now,
      ended_at: now,
    })
    .where(and(hasKey(t, key), eq(t.account, account), eq(t.status, was)))
    .returning({ account: t.account, day: t.day, value: t.value });
  if (row === undefined) return false;
  await giveBack(tx, row);
  return true;
}

/**
 * Undoes a claim for which certainly nothing was signed and stored, so that the payment can be presented again.
 * False when it is not claimed (any more).
 */
export async function withdrawClaim(tx: Tx, key: PaymentKey): Promise<boolean> {
  const account = await lockAccountOf(tx, key);
  if (account === null) return false;
  const { facilitatorPayments: t } = tx.tables;
  const [row] = await tx.db
    .delete(t)
    .where(and(hasKey(t, key), eq(t.account, account), eq(t.status, "claimed")))
    .returning({ account: t.account, day: t.day, value: t.value });
  if (row === undefined) return false;
  await giveBack(tx, row);
  return true;
}

/** Two works that each hold what the other waits for would be a deadlock: so the lock comes before the row. */
async function lockAccountOf(tx: Tx, key: PaymentKey): Promise<string | null> {
  const payment = await findPayment(tx, key);
  if (payment === null) return null;
  await lockCeiling(tx, payment.account);
  return payment.account;
}

/** The block that held it is not part of the chain any more. It keeps its reservation, for it may land again. */
export async function recordReorganised(tx: Tx, key: PaymentKey, now: number): Promise<boolean> {
  const { facilitatorPayments: t } = tx.tables;
  const { from, to } = COLLECTION_EVENTS.reorganise;
  const rows = await tx.db
    .update(t)
    .set({ status: to, block_number: null, block_hash: null, updated_at: now, ended_at: null })
    .where(and(hasKey(t, key), inArray(t.status, [...from])))
    .returning({ nonce: t.nonce });
  return rows.length > 0;
}

/** One more request for a payment that has a record. */
export async function countAttempt(tx: Tx, key: PaymentKey): Promise<void> {
  const { facilitatorPayments: t } = tx.tables;
  await tx.db
    .update(t)
    .set({ attempts: sql`${t.attempts} + 1` })
    .where(hasKey(t, key));
}

/** The words of the partial index, without which SQLite would scan the table. */
function isOpen(t: Payments) {
  return sql`${t.status} in ('claimed', 'sent')`;
}

/** Claims that nothing was ever broadcast for, the oldest first. */
export function claimedWithoutTransaction(reader: Reader, limit: number): Promise<FacilitatorPayment[]> {
  const { facilitatorPayments: t } = reader.tables;
  return reader.db
    .select()
    .from(t)
    .where(and(isOpen(t), eq(t.status, "claimed")))
    .orderBy(asc(t.created_at))
    .limit(limit)
    .execute();
}

/** Payments whose outcome is open: claimed and sent ones. */
export function openPayments(reader: Reader): Promise<FacilitatorPayment[]> {
  const { facilitatorPayments: t } = reader.tables;
  return reader.db.select().from(t).where(isOpen(t)).orderBy(asc(t.created_at)).execute();
}
