// The facilitator's payments in the database: claimed, sent, settled or failed, and what each holds of its account's day
// and of its payer's balance. Every transition is a write guarded by the states that its event may start from, so a
// payment is claimed once, sent once, and gives its reservation back at most once.
//
// A claim belongs to the attempt that made it, and carries that attempt's id. An attempt may continue late, after a pause or
// a lost response, and find another claim under the same key: the same authorization on other terms. So an attempt that
// sends, fails or withdraws a claim names the claim that it has read; if another claim is stored, nothing changes.
import { and, asc, count, eq, gt, inArray, ne, or, type SQL, sql } from "drizzle-orm";
import { oneOf, type Tables } from "../../../db/schema.ts";
import type { Balance } from "../../chain/chain.ts";
import type { Receipt } from "../../chain/json-rpc.ts";
import { COLLECTION_EVENTS, type CollectionStatus } from "../../core/states.ts";
import { bindAll, prepared, preparedRow, type Reader, type Tx } from "../../storage/store.ts";
import type { Hex, Payment, PaymentKey } from "../../x402/types.ts";
import type { DayOfAccount, Limits } from "./guardrails.ts";
import * as guardrails from "./guardrails.ts";

export type FacilitatorPayment = Tables["facilitatorPayments"]["$inferSelect"];

/** A payment that this facilitator has committed itself to collect. */
export interface ClaimedPayment extends Pick<Payment, "authorization" | "signature"> {
  readonly key: PaymentKey;
  /** The id of the attempt that made the claim, unique among all attempts. */
  readonly claim: string;
}

/** What a claim stores, and the limits and the balance that it is checked against. The day is by the chain's time. */
export interface PaymentClaim extends ClaimedPayment, DayOfAccount {
  /** The requirements as canonical JSON. */
  readonly requirements: string;
  readonly limits: Pick<Limits, "dailyCeiling" | "dailyGasWei" | "dailyGasAllWei">;
  readonly balance: Measured;
  /** Wei that a revert may cost, where the payer's code can cause one; 0 otherwise. */
  readonly gasAtRisk: bigint;
  readonly hasCode: boolean;
  /** Wei that the payment may cost whatever its outcome; 0 where that has no limit. */
  readonly gasHeld: bigint;
  readonly gas: Gas;
}

/**
 * `taken`: the payment has a record already. `ceiling`, `gas`: the account's daily limit is reached. `reverts`: too many
 * payments of the payer reverted on the day. `held`: the payer's balance does not suffice on top of its open payments.
 * `gas held`: the account's daily gas does not suffice on top of what open payments may burn.
 */
export type Claimed = "claimed" | "taken" | "ceiling" | "gas" | "reverts" | "held" | "gas held";

export interface PaymentFailure {
  /** The exact reason, for the operator alone. */
  readonly reason: string;
  /** Who used the authorization instead of us, where it is known. */
  readonly foreign_transaction: Hex | null;
  /** Wei burned by reverted transactions of ours for this payment; null when none reverted. */
  readonly gas_burned: bigint | null;
}

const hasKey = (t: PaymentsTable, key: { readonly [K in keyof PaymentKey]: PaymentKey[K] | SQL }) =>
  and(eq(t.chain_id, key.chain_id), eq(t.token, key.token), eq(t.payer, key.payer), eq(t.nonce, key.nonce));

/** `hasKey` with the named values of a prepared query. */
const hasGivenKey = (t: PaymentsTable) => hasKey(t, bindAll(t, ["chain_id", "token", "payer", "nonce"]));

/** Runs a query for all items in groups of 100, since a statement that names more is slow to plan. */
export async function inGroups<T, R>(items: readonly T[], find: (some: T[]) => Promise<R[]>): Promise<R[]> {
  const found: R[] = [];
  for (let at = 0; at < items.length; at += 100) {
    for (const each of await find(items.slice(at, at + 100))) found.push(each);
  }
  return found;
}

/** A key for maps in memory; chain and token are left out, since a process has only one of each. */
export const paymentName = ({ payer, nonce }: Pick<PaymentKey, "payer" | "nonce">): string => `${payer}:${nonce}`;

export const storedPayment: (reader: Reader, key: PaymentKey) => Promise<FacilitatorPayment | null> = preparedRow(
  ({ db, tables: { facilitatorPayments: t } }) => db.select().from(t).where(hasGivenKey(t)),
);

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

/** Changes a payment that is in one of the states `from`. The columns `names` get the values of their names. */
const preparedChange = (
  { from, to }: { readonly from: readonly CollectionStatus[]; readonly to: CollectionStatus },
  names: readonly (keyof FacilitatorPayment)[],
  also?: (t: PaymentsTable) => SQL | undefined,
) =>
  prepared(({ db, tables: { facilitatorPayments: t } }: Tx) => {
    const set = { ...bindAll(t, [...names]), status: to };
    const isFrom = and(hasGivenKey(t), inArray(t.status, [...from]), also?.(t));
    return db.update(t).set(set).where(isFrom).returning(reservation(t));
  });

const sendClaim = preparedChange(COLLECTION_EVENTS.send, ["transaction_hash", "updated_at"], (t) =>
  eq(t.claim, bindAll(t, ["claim"]).claim),
);

const sent = COLLECTION_EVENTS.send.to;
const touchSent = preparedChange({ from: [sent], to: sent }, ["updated_at"]);

const INCLUSION = ["block_number", "block_hash", "updated_at", "ended_at"] as const;
const settlePayment = preparedChange(COLLECTION_EVENTS.settle, ["transaction_hash", ...INCLUSION]);
const reopenPayment = preparedChange(COLLECTION_EVENTS.reorganise, INCLUSION);

const insertClaim = prepared(({ db, tables: { facilitatorPayments: t } }: Tx) =>
  db.insert(t).values(bindAll(t)).onConflictDoNothing().returning({ nonce: t.nonce }),
);

/** Claims the payment, with its share of the account's day and of the payer's balance; or stores nothing. */
export async function claimPayment(tx: Tx, claim: PaymentClaim, now: number): Promise<Claimed> {
  const { key, account, day, authorization, limits, balance, gas, gasAtRisk: more, gasHeld } = claim;
  const { value } = authorization;
  const of = { account, day };
  await guardrails.lockDays(tx, account);
  // Only a claim takes this lock, and after the account's, so there is no deadlock.
  await tx.lock(`payer:${key.payer}`);
  if ((await storedPayment(tx, key)) !== null) return "taken";
  const { reserved, gasBurned, gasUsed } = await guardrails.usedOn(tx, of);
  if (guardrails.exceedsCeiling(reserved, value, limits.dailyCeiling)) return "ceiling";
  if (guardrails.exceedsGas(gasBurned, limits.dailyGasWei)) return "gas";
  if (guardrails.isShutOut(await guardrails.revertsOf(tx, of, key.payer), claim.hasCode)) return "reverts";
  if (guardrails.exceedsGasOfAll(gasUsed, gasHeld, limits.dailyGasAllWei)) return "gas held";
  const ofPayer = await heldOf(tx, key.payer, balance);
  if (ofPayer.value + value > balance.amount) return "held";
  if (limits.dailyGasWei > 0n && guardrails.exceedsOpen(ofPayer.open, claim.hasCode)) return "gas held";
  if (limits.dailyGasWei > 0n && more > 0n) {
    const held = await gasReserved(tx, account, key.payer);
    if (guardrails.exceedsGasAtOnce({ burned: gasBurned, ...held, more }, limits.dailyGasWei)) return "gas held";
  }
  const row: FacilitatorPayment = {
    ...{ chain_id: key.chain_id, token: key.token, payer: key.payer, nonce: key.nonce },
    account,
    status: "claimed",
    claim: claim.claim,
    pay_to: authorization.to,
    value: String(value),
    valid_after: String(authorization.validAfter),
    valid_before: String(authorization.validBefore),
    signature: claim.signature,
    requirements: claim.requirements,
    day,
    gas_reserved: String(more),
    gas_held: String(gasHeld),
    reverted_on: null,
    wallet: gas.from,
    gas_limit: String(gas.limit),
    may_share: gas.mayShare,
    attempts: 1,
    ...{ transaction_hash: null, block_number: null, block_hash: null },
    ...{ reason: null, foreign_transaction: null },
    ...{ created_at: now, updated_at: now, ended_at: null },
  };
  if ((await insertClaim(tx).execute(row)).length === 0) return "taken";
  await guardrails.change(tx, of, { reserved: value, gasUsed: gasHeld });
  return "claimed";
}

/**
 * Marks the claim as sent, in the write that stores the payment's first signed transaction, which may be broadcast after the
 * commit. False when this claim is gone: nothing may be broadcast then.
 */
export const markSent = async (tx: Tx, { key, claim }: Pick<ClaimedPayment, "key" | "claim">, hash: Hex, now: number) =>
  (await sendClaim(tx).execute({ ...key, claim, transaction_hash: hash, updated_at: now })).length > 0;

/**
 * Locks a sent payment's row in the write that stores another transaction for the payment, so that no failure is recorded
 * until the commit. False when the payment has ended: nothing may be broadcast then.
 */
export const markSentAgain = async (tx: Tx, key: PaymentKey, now: number): Promise<boolean> =>
  (await touchSent(tx).execute({ ...key, updated_at: now })).length > 0;

/**
 * Records that a transaction of ours moved the money. False when that is recorded already, or the payment is not open.
 * @param cost wei that the payment cost, which replaces the amount held for it; null where that has no limit
 */
export async function recordSettled(
  tx: Tx,
  key: PaymentKey,
  { hash, blockNumber, blockHash }: Pick<Receipt, "hash" | "blockNumber" | "blockHash">,
  now: number,
  cost: bigint | null = null,
): Promise<boolean> {
  const inclusion = { transaction_hash: hash, block_number: blockNumber, block_hash: blockHash };
  const account = cost === null ? null : await lockAccountOf(tx, key);
  const [row] = await settlePayment(tx).execute({ ...key, ...inclusion, updated_at: now, ended_at: now });
  if (row !== undefined && cost !== null && account !== null) await countCost(tx, key, row, cost);
  return row !== undefined;
}

/** Replaces the gas that the payment held on its day by its cost. After a reorganisation this may happen once more. */
async function countCost(tx: Tx, key: PaymentKey, row: Reservation, cost: bigint): Promise<void> {
  const { facilitatorPayments: t } = tx.tables;
  await guardrails.change(tx, row, { gasUsed: cost - BigInt(row.gas_held) });
  const set = { gas_held: String(cost) };
  await tx.db.update(t).set(set).where(hasKey(t, key));
}

/**
 * Records that this facilitator can't collect the payment any more. The payment's share of the ceiling is given back, unless
 * a transaction reverted: then the share stays taken, and the gas burned counts on the day on which the revert was found.
 * False when the payment has left the state in which it failed: another process may have sent what was only claimed.
 * @param as the state that it failed in: `claimed`, with the claim; or `sent`, with the UTC day by the chain's time
 */
export async function recordFailed(
  tx: Tx,
  key: PaymentKey,
  failure: PaymentFailure,
  { now, ...as }: { readonly now: number } & ({ was: "sent"; day: string } | { was: "claimed"; claim: string }),
): Promise<boolean> {
  const account = await lockAccountOf(tx, key);
  if (account === null) return false;
  const burned = failure.gas_burned;
  const set = {
    status: COLLECTION_EVENTS.fail.to,
    reason: failure.reason,
    foreign_transaction: failure.foreign_transaction,
    ...(burned !== null && as.was === "sent" && { reverted_on: as.day }),
    updated_at: now,
    ended_at: now,
  };
  const { facilitatorPayments: t } = tx.tables;
  const isClaim = as.was === "claimed" ? eq(t.claim, as.claim) : undefined;
  const isIt = and(hasKey(t, key), eq(t.status, as.was), eq(t.account, account), isClaim);
  const [row] = await tx.db.update(t).set(set).where(isIt).returning(reservation(t));
  if (row === undefined) return false;
  if (burned === null || as.was === "claimed") {
    // A sent payment may still cost the gas that it holds, by a replacement transaction or by a late revert.
    const gasUsed = as.was === "claimed" ? -BigInt(row.gas_held) : 0n;
    await guardrails.change(tx, row, { reserved: -BigInt(row.value), gasUsed });
    return true;
  }
  await guardrails.change(tx, { account, day: as.day }, { gasBurned: burned });
  if (row.gas_held !== "0") await countCost(tx, key, row, burned);
  return true;
}

/** Deletes a claim that certainly has no stored transaction, so the payment may come again. False when the claim is gone. */
export async function withdrawClaim(tx: Tx, { key, claim }: Pick<ClaimedPayment, "key" | "claim">): Promise<boolean> {
  const account = await lockAccountOf(tx, key);
  if (account === null) return false;
  const { facilitatorPayments: t } = tx.tables;
  const isIt = and(hasKey(t, key), eq(t.account, account), eq(t.claim, claim), eq(t.status, "claimed"));
  const [row] = await tx.db.delete(t).where(isIt).returning(reservation(t));
  if (row === undefined) return false;
  await guardrails.change(tx, row, { reserved: -BigInt(row.value), gasUsed: -BigInt(row.gas_held) });
  return true;
}

type Reservation = Pick<FacilitatorPayment, "account" | "day" | "value" | "gas_held">;

/** The columns of a reservation, which counts on the day of the claim, whatever the day is now. */
const reservation = ({ account, day, value, gas_held }: PaymentsTable) => ({ account, day, value, gas_held });

/** Locks the account of the payment, before any write of the payment's row: see lockDays. Null when there is no record. */
async function lockAccountOf(tx: Tx, key: PaymentKey): Promise<string | null> {
  const payment = await storedPayment(tx, key);
  if (payment === null) return null;
  await guardrails.lockDays(tx, payment.account);
  return payment.account;
}

/** Reopens a settled payment whose block left the chain. The payment keeps its reservation, since it may land again. */
export async function recordReorganised(tx: Tx, key: PaymentKey, now: number): Promise<boolean> {
  const values = { ...key, block_number: null, block_hash: null, updated_at: now, ended_at: null };
  return (await reopenPayment(tx).execute(values)).length > 0;
}

export async function countAttempt(tx: Tx, key: PaymentKey): Promise<void> {
  const { facilitatorPayments: t } = tx.tables;
  const set = { attempts: sql`${t.attempts} + 1` };
  await tx.db.update(t).set(set).where(hasKey(t, key));
}

/** The result of a simulation, valid only for the wallet `from`. */
export interface Gas {
  readonly limit: bigint;
  readonly from: Hex;
  /** Whether it may share a transaction with other payments. */
  readonly mayShare: boolean;
}

/** The gas as simulated for the claim; null for a claim by an earlier version, which did not store it. */
export function simulatedGas({ wallet, gas_limit, may_share }: FacilitatorPayment): Gas | null {
  if (wallet === null || gas_limit === null) return null;
  return { limit: BigInt(gas_limit), from: wallet, mayShare: may_share === true };
}

/** The payer's balance at a block, which a claim is checked against. */
export type Measured = Pick<Balance, "amount" | "block"> & {
  /** Nonces of open payments whose authorization had been used or cancelled by the end of the block. */
  readonly landed?: ReadonlySet<Hex>;
};

type PaymentsTable = Tables["facilitatorPayments"];

/** Exactly the condition of the partial indexes; with any other, SQLite would scan the table. */
const isOpen = (t: PaymentsTable) => sql`${t.status} in ('claimed', 'sent')`;

/**
 * What our transfers can still take from the payer's balance at a block: the sum of the open payments (claimed or sent) and of
 * those settled after that block; and the number of open ones. The sum is complete: each payment was claimed first, under the
 * payer's lock; one settled by that block is in the balance already; a failed one can't land. So our transfers for a payer
 * never make each other revert, however old the balance is and whichever process made them. Open and settled payments are read
 * in one statement, since a payment that settles between two statements could be missing in both. A payment that landed by the
 * block and is not recorded yet (`landed`) takes nothing more. What a reorganisation undoes counts once it is noticed.
 *
 * The query names only the payer, since there is one token on one chain; so the indexes by payer are used.
 */
export async function heldOf(tx: Tx, payer: Hex, { block, landed }: Pick<Measured, "block" | "landed">) {
  const rows = await openOrLater(tx).execute({ payer, block_number: block });
  const held = rows.filter(({ nonce, status }) => status === "settled" || landed?.has(nonce) !== true);
  return {
    value: held.reduce((sum, { value }) => sum + BigInt(value), 0n),
    open: rows.filter(({ status }) => status !== "settled").length,
  };
}

const openOrLater = prepared(({ db, tables: { facilitatorPayments: t } }: Reader) => {
  const { payer, block_number } = bindAll(t, ["payer", "block_number"]);
  const isLater = and(sql`${t.status} = 'settled'`, gt(t.block_number, block_number));
  const columns = { nonce: t.nonce, status: t.status, value: t.value };
  const isHeld = and(eq(t.payer, payer), or(isOpen(t), isLater));
  return db.select(columns).from(t).where(isHeld);
});

/** The nonces of the payer's sent payments, oldest first, as those are the likeliest to be in a block. */
export async function sentNonces(reader: Reader, payer: Hex): Promise<Hex[]> {
  const { facilitatorPayments: t } = reader.tables;
  const isSent = and(eq(t.payer, payer), isOpen(t), eq(t.status, "sent"));
  // Each nonce costs a request to a node.
  const rows = await reader.db.select({ nonce: t.nonce }).from(t).where(isSent).orderBy(asc(t.created_at)).limit(50);
  return rows.map(({ nonce }) => nonce);
}

/** Wei that the account's open payments may burn by their payers' code: in all, and for this payer (`own`). */
async function gasReserved(tx: Tx, account: string, payer: Hex): Promise<{ reserved: bigint; own: bigint }> {
  const { facilitatorPayments: t } = tx.tables;
  const isAny = and(eq(t.account, account), isOpen(t), ne(t.gas_reserved, "0"));
  const rows = await tx.db.select({ wei: t.gas_reserved, payer: t.payer }).from(t).where(isAny);
  const sumOf = (those: typeof rows) => those.reduce((sum, { wei }) => sum + BigInt(wei), 0n);
  return { reserved: sumOf(rows), own: sumOf(rows.filter((row) => row.payer === payer)) };
}

/** Claims that no transaction was stored for, oldest first. */
export function claimedWithoutTransaction(reader: Reader, limit: number): Promise<FacilitatorPayment[]> {
  const { facilitatorPayments: t } = reader.tables;
  const isClaimed = and(isOpen(t), eq(t.status, "claimed"));
  return reader.db.select().from(t).where(isClaimed).orderBy(asc(t.created_at)).limit(limit).execute();
}

/** The number of open payments of each account that has any, in one scan of their index. */
export async function openByAccount(reader: Reader): Promise<Map<string, number>> {
  const { facilitatorPayments: t } = reader.tables;
  const counting = reader.db.select({ account: t.account, open: count() }).from(t).where(isOpen(t));
  const rows = await counting.groupBy(t.account);
  return new Map(rows.map(({ account, open }) => [account, Number(open)]));
}

/** Payments with a stored transaction and no outcome yet, each with the wallet of its first transaction. */
export function sentPayments(reader: Reader) {
  const { facilitatorPayments: t, facilitatorTransactions: first } = reader.tables;
  return reader.db
    .select({ payment: t, wallet: first.wallet })
    .from(t)
    .leftJoin(first, eq(first.hash, t.transaction_hash))
    .where(and(isOpen(t), eq(t.status, "sent")))
    .orderBy(asc(t.created_at))
    .execute();
}

/** The names of the payers' open payments. The query names payers only, so the index by payer is used; each has few. */
export async function openAmong(reader: Reader, keys: readonly PaymentKey[]): Promise<ReadonlySet<string>> {
  const { facilitatorPayments: t } = reader.tables;
  const payers = [...new Set(keys.map(({ payer }) => payer))];
  const open = await inGroups(payers, async (some) => {
    const isAmong = and(oneOf(t.payer, some), isOpen(t));
    return reader.db.select({ payer: t.payer, nonce: t.nonce }).from(t).where(isAmong);
  });
  return new Set(open.map(paymentName));
}
