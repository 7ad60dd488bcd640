// The facilitator's payments in the database: claimed, sent, settled or failed, and what they hold of an account's
// day and of a payer's balance. Every transition is a write guarded by the states that its event may start from, so a
// payment is claimed once, sent once, and gives its reservation back at most once.
//
// A claim belongs to the attempt that made it, and carries its name. An attempt may continue late, after a pause or a
// lost answer, and find another claim under the same key: the same authorization on other terms. So whoever sends, fails
// or withdraws a claim names the claim that it has read; if another one is stored, nothing changes.
// In one file, since each transition is right only beside the others.
import { and, eq, inArray, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { COLLECTION_EVENTS } from "../../core/states.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import type { Authorization, Hex, PaymentKey } from "../../x402/types.ts";
import { change, lockDays, revertsOf, usedOn } from "./daily-limits.ts";
import {
  exceedsCeiling,
  exceedsGas,
  exceedsGasAtOnce,
  exceedsGasOfAll,
  exceedsOpen,
  isShutOut,
  type Limits,
} from "./guardrails.ts";
import { gasReserved, heldOf, lockPayer, type Measured, type PaymentsTable } from "./held-funds.ts";
import type { SimulatedGas } from "./simulated-gas.ts";

export type FacilitatorPayment = Tables["facilitatorPayments"]["$inferSelect"];

/** A payment that this facilitator has promised to collect. */
export interface ClaimedPayment {
  readonly key: PaymentKey;
  /** The attempt that made the claim: text that no other attempt has. */
  readonly claim: string;
  readonly authorization: Authorization;
  readonly signature: Hex;
}

/** What a claim stores, and what it is measured against. */
export interface PaymentClaim extends ClaimedPayment {
  readonly account: string;
  /** JSON of the requirements, normalised. */
  readonly requirements: string;
  readonly limits: Pick<Limits, "dailyCeiling" | "dailyGasWei" | "dailyGasAllWei">;
  /** The UTC day by the chain. */
  readonly day: string;
  readonly balance: Measured;
  /** Wei that its revert may cost, where that is in the hands of the payer's code; else 0. */
  readonly gasAtRisk: bigint;
  /** Whether the payer has code. */
  readonly hasCode: boolean;
  /** Wei that it may cost, whatever becomes of it; 0 where that has no bound. */
  readonly gasHeld: bigint;
  readonly gas: SimulatedGas;
}

/**
 * `taken`: there is a record of it already. `ceiling`, `gas`: the account's limit of the day is reached. `reverts`: too
 * many payments of the payer reverted on the day. `held`: the payer's balance does not suffice for this beside what it has
 * under way; `gas held`: nor does the account's gas of the day beside what it may burn.
 */
export type Claimed = "claimed" | "taken" | "ceiling" | "gas" | "reverts" | "held" | "gas held";

export interface IncludedTransaction {
  readonly transaction_hash: Hex;
  readonly block_number: number;
  readonly block_hash: Hex;
}

export interface PaymentFailure {
  /** The exact reason, for the operator alone. */
  readonly reason: string;
  /** Who used the authorization instead of us, where it is known. */
  readonly foreign_transaction: Hex | null;
  /** Wei burned by reverted transactions of ours for this payment; null when none reverted. */
  readonly gas_burned: bigint | null;
}

function hasKey(t: PaymentsTable, key: PaymentKey) {
  return and(eq(t.chain_id, key.chain_id), eq(t.token, key.token), eq(t.payer, key.payer), eq(t.nonce, key.nonce));
}

/** For maps in memory, where chain and token are the same for all. */
export function paymentName({ payer, nonce }: Pick<PaymentKey, "payer" | "nonce">): string {
  return `${payer}:${nonce}`;
}

export async function findPayment(reader: Reader, key: PaymentKey): Promise<FacilitatorPayment | null> {
  const { facilitatorPayments: t } = reader.tables;
  const [row] = await reader.db.select().from(t).where(hasKey(t, key));
  return row ?? null;
}

export function claimedPayment(row: FacilitatorPayment): ClaimedPayment {
  return {
    key: { chain_id: row.chain_id, token: row.token, payer: row.payer, nonce: row.nonce },
    claim: row.claim,
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

/**
 * Takes the payment, with its share of the account's day and of the payer's balance; or stores nothing.
 */
export async function claimPayment(tx: Tx, claim: PaymentClaim, now: number): Promise<Claimed> {
  const { key, account, authorization, limits, balance, gas, gasAtRisk: more, gasHeld } = claim;
  const { value } = authorization;
  const of = { account, day: claim.day };
  await lockDays(tx, account);
  await lockPayer(tx, key.payer);
  if ((await findPayment(tx, key)) !== null) return "taken";
  const { reserved, gasBurned, gasUsed } = await usedOn(tx, of);
  if (exceedsCeiling(reserved, value, limits.dailyCeiling)) return "ceiling";
  if (exceedsGas(gasBurned, limits.dailyGasWei)) return "gas";
  if (isShutOut(await revertsOf(tx, of, key.payer), claim.hasCode)) return "reverts";
  if (exceedsGasOfAll(gasUsed, gasHeld, limits.dailyGasAllWei)) return "gas held";
  const ofPayer = await heldOf(tx, key.payer, balance);
  if (ofPayer.value + value > balance.amount) return "held";
  if (limits.dailyGasWei > 0n && exceedsOpen(ofPayer.open, claim.hasCode)) return "gas held";
  if (limits.dailyGasWei > 0n && more > 0n) {
    const held = await gasReserved(tx, account, key.payer);
    if (exceedsGasAtOnce({ burned: gasBurned, ...held, more }, limits.dailyGasWei)) return "gas held";
  }
  const { facilitatorPayments } = tx.tables;
  const inserted = await tx.db
    .insert(facilitatorPayments)
    .values({
      ...key,
      account,
      status: "claimed",
      claim: claim.claim,
      pay_to: authorization.to,
      value: String(value),
      valid_after: String(authorization.validAfter),
      valid_before: String(authorization.validBefore),
      signature: claim.signature,
      requirements: claim.requirements,
      day: of.day,
      gas_reserved: String(more),
      gas_held: String(gasHeld),
      wallet: gas.from,
      gas_limit: String(gas.limit),
      may_share: gas.mayShare,
      attempts: 1,
      created_at: now,
      updated_at: now,
    })
    .onConflictDoNothing()
    .returning({ nonce: facilitatorPayments.nonce });
  if (inserted.length === 0) return "taken";
  await change(tx, of, { reserved: value, gasUsed: gasHeld });
  return "claimed";
}

/**
 * Its first transaction is signed and stored in the same write; it may be broadcast from now on. False when this claim
 * is gone: nothing may be broadcast then.
 */
export async function markSent(
  tx: Tx,
  { key, claim }: Pick<ClaimedPayment, "key" | "claim">,
  hash: Hex,
  now: number,
): Promise<boolean> {
  const { facilitatorPayments: t } = tx.tables;
  const { from, to } = COLLECTION_EVENTS.send;
  const rows = await tx.db
    .update(t)
    .set({ status: to, transaction_hash: hash, updated_at: now })
    .where(and(hasKey(t, key), eq(t.claim, claim), inArray(t.status, [...from])))
    .returning({ nonce: t.nonce });
  return rows.length > 0;
}

/**
 * One more transaction for it is stored in the same write. False when the payment has ended: nothing may be broadcast
 * then. Its row is locked until the commit, so nobody records a failure at the same time.
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

/**
 * A transaction of ours moved the money. False when that is known already, or the payment is not under way.
 *
 * @param cost wei that it took in place of what it held; null where that has no bound
 */
export async function recordSettled(
  tx: Tx,
  key: PaymentKey,
  inclusion: IncludedTransaction,
  now: number,
  cost: bigint | null = null,
): Promise<boolean> {
  const account = cost === null ? null : await lockAccountOf(tx, key);
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
    .returning(reservation(t));
  const [row] = rows;
  if (row !== undefined && cost !== null && account !== null) await countCost(tx, key, row, cost);
  return rows.length > 0;
}

/** Its part of its day's gas is what it cost, in place of what it held. A reorganisation may make that come again. */
async function countCost(tx: Tx, key: PaymentKey, row: Reservation, cost: bigint): Promise<void> {
  const { facilitatorPayments: t } = tx.tables;
  await change(tx, row, { gasUsed: cost - BigInt(row.gas_held) });
  await tx.db
    .update(t)
    .set({ gas_held: String(cost) })
    .where(hasKey(t, key));
}

/** The state in which a payment was found to have failed: which claim, or on which UTC day by the chain. */
export type FailedAs =
  | { readonly was: "sent"; readonly day: string }
  | { readonly was: "claimed"; readonly claim: string };

/**
 * This facilitator can't collect it any more. Its share of the ceiling is free again, unless a transaction reverted:
 * then it stays taken for its day, and the gas burned counts on the day on which that was found. False when it has ended, or is no longer in the state in which it was found to fail: another process may
 * have sent what was only claimed.
 */
export async function recordFailed(
  tx: Tx,
  key: PaymentKey,
  failure: PaymentFailure,
  { now, ...as }: FailedAs & { readonly now: number },
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
      ...(failure.gas_burned !== null && as.was === "sent" && { reverted_on: as.day }),
      updated_at: now,
      ended_at: now,
    })
    .where(
      and(
        hasKey(t, key),
        eq(t.account, account),
        eq(t.status, as.was),
        as.was === "claimed" ? eq(t.claim, as.claim) : undefined,
      ),
    )
    .returning(reservation(t));
  if (row === undefined) return false;
  const burned = failure.gas_burned;
  if (burned === null || as.was === "claimed") {
    // What was sent may still cost as much: a transaction that takes its place, or one that reverts late.
    const gasUsed = as.was === "claimed" ? -BigInt(row.gas_held) : 0n;
    await change(tx, row, { reserved: -BigInt(row.value), gasUsed });
    return true;
  }
  await change(tx, { account, day: as.day }, { gasBurned: burned });
  if (row.gas_held !== "0") await countCost(tx, key, row, burned);
  return true;
}

/**
 * Undoes a claim for which certainly nothing was signed and stored, so that the payment can be presented again.
 * False when this claim is gone.
 */
export async function withdrawClaim(tx: Tx, { key, claim }: Pick<ClaimedPayment, "key" | "claim">): Promise<boolean> {
  const account = await lockAccountOf(tx, key);
  if (account === null) return false;
  const { facilitatorPayments: t } = tx.tables;
  const [row] = await tx.db
    .delete(t)
    .where(and(hasKey(t, key), eq(t.account, account), eq(t.claim, claim), eq(t.status, "claimed")))
    .returning(reservation(t));
  if (row === undefined) return false;
  await change(tx, row, { reserved: -BigInt(row.value), gasUsed: -BigInt(row.gas_held) });
  return true;
}

/** It counts on the day of the claim, whatever the day is now. */
function reservation({ account, day, value, gas_held }: PaymentsTable) {
  return { account, day, value, gas_held };
}

type Reservation = Pick<FacilitatorPayment, "account" | "day" | "value" | "gas_held">;

/** The lock comes before the row: see lockDays. */
async function lockAccountOf(tx: Tx, key: PaymentKey): Promise<string | null> {
  const payment = await findPayment(tx, key);
  if (payment === null) return null;
  await lockDays(tx, payment.account);
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
