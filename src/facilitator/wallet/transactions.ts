// The facilitator's transactions: their content and their rows in the database. A transaction transfers one payment, or several
// through Multicall3, or sends nothing to the wallet itself, which only uses up the wallet nonce once its payments have ended.
// A row is stored before the signed bytes leave the process.
import { and, asc, desc, eq, gte, isNotNull, isNull, lt, or } from "drizzle-orm";
import { oneOf, type Tables } from "../../../db/schema.ts";
import type { Fees } from "../../chain/fees.ts";
import { aggregateData, GAS_MAX, MULTICALL3, SHARED_GAS, transferData } from "../../chain/token.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import type { Network } from "../../x402/network.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { change, lockDays } from "../payments/guardrails.ts";
import { type ClaimedPayment, inGroups, storedPayment } from "../payments/payments.ts";
import type { Signer } from "./signer.ts";

type StoredTransaction = Tables["facilitatorTransactions"]["$inferSelect"];

export interface PaymentPart extends Pick<PaymentKey, "payer" | "nonce"> {
  /** The payment's part of the transaction's gas limit. */
  readonly gas: bigint;
}

export interface TransactionRow extends StoredTransaction {
  /** Empty for a transaction that only uses up the nonce. */
  readonly payments: readonly PaymentPart[];
}

/** A payment to send, and the gas that it may use. */
export interface PaymentTransfer {
  readonly payment: ClaimedPayment;
  readonly gas: bigint;
}

/** The exact gas of a transfer of nothing. */
const NOTHING_GAS = 21_000n;

/** The nonce, fees and time that a transaction is signed and stored with. */
export interface Position {
  readonly nonce: number;
  readonly replacement: number;
  readonly fees: Fees;
  /** The number of the chain's newest block. */
  readonly block: number;
  /** Milliseconds. */
  readonly now: number;
}

/** A payment's gas is capped, however much was estimated, so that the transaction fits into a block. */
function partOf({ payment, gas }: PaymentTransfer): PaymentPart {
  const { from: payer, nonce } = payment.authorization;
  return { payer, nonce, gas: gas < GAS_MAX ? gas : GAS_MAX };
}

export type TransactionContent = ReturnType<typeof contentOf>;

/** The content that makes these payments: the transfer itself for one, a Multicall3 call for several, an empty one for none. */
export function contentOf({ token: { key } }: Network, wallet: Hex, transfers: readonly PaymentTransfer[]) {
  const payments = transfers.map(partOf);
  if (transfers.length === 0) return { to: wallet, data: "0x" as Hex, gas: NOTHING_GAS, payments };
  const gas = payments.reduce((sum, part) => sum + part.gas, 0n);
  const calls = transfers.map(({ payment: { authorization, signature } }) => transferData(authorization, signature));
  const [only] = calls;
  if (only !== undefined && calls.length === 1) return { to: key, data: only, gas, payments };
  return { to: MULTICALL3, data: aggregateData(key, calls), gas: gas + SHARED_GAS, payments };
}

/** Whether the transaction makes this payment, alone or with others. */
export const pays = ({ payments }: Pick<TransactionRow, "payments">, { payer, nonce }: PaymentKey): boolean =>
  payments.some((part) => part.payer === payer && part.nonce === nonce);

export async function signRow(signer: Signer, content: TransactionContent, position: Position) {
  const { to, data, gas, payments } = content;
  const only = payments.length === 1 ? payments[0] : undefined;
  const { nonce, replacement, fees, block, now } = position;
  const { raw, hash } = await signer.sign({ nonce, to, data, gas, fees });
  return {
    hash,
    wallet: signer.address,
    wallet_nonce: nonce,
    replacement,
    payer: only?.payer ?? null,
    nonce: only?.nonce ?? null,
    raw,
    gas: String(gas),
    max_fee: String(fees.maxFee),
    max_priority_fee: String(fees.maxPriorityFee),
    open: true,
    gas_burned: null,
    stored_at_block: block,
    created_at: now,
    payments,
  };
}

/** @throws UniqueViolation when another process with the wallet's key has taken one of the wallet nonces */
export async function insertTransactions(tx: Tx, rows: readonly TransactionRow[]): Promise<void> {
  const { facilitatorTransactions, facilitatorTransactionPayments } = tx.tables;
  await tx.db.insert(facilitatorTransactions).values(rows.map(({ payments: _, ...stored }) => stored));
  for (const { hash, payments } of rows) {
    if (payments.length < 2) continue;
    const parts = payments.map(({ gas, ...key }) => ({ hash, ...key, gas: String(gas), gas_burned: null }));
    await tx.db.insert(facilitatorTransactionPayments).values(parts);
  }
}

async function withPayments(reader: Reader, stored: readonly StoredTransaction[]): Promise<TransactionRow[]> {
  const { facilitatorTransactionPayments: t } = reader.tables;
  const hashes = stored.filter(({ payer }) => payer === null).map(({ hash }) => hash);
  const found = hashes.length === 0 ? [] : await reader.db.select().from(t).where(oneOf(t.hash, hashes));
  const byHash = Map.groupBy(found, ({ hash }) => hash);
  return stored.map((row) => {
    const { hash, payer, nonce } = row;
    if (payer !== null && nonce !== null) return { ...row, payments: [{ payer, nonce, gas: BigInt(row.gas) }] };
    const parts = byHash.get(hash) ?? [];
    return { ...row, payments: parts.map((part) => ({ payer: part.payer, nonce: part.nonce, gas: BigInt(part.gas) })) };
  });
}

/** Whether these rows are stored; rows of one write are stored together or not at all. */
export async function areStored(reader: Reader, rows: readonly TransactionRow[]): Promise<boolean> {
  const { facilitatorTransactions: t } = reader.tables;
  const hashes = rows.map(({ hash }) => hash);
  const found = await reader.db.select({ hash: t.hash }).from(t).where(oneOf(t.hash, hashes));
  return found.length === rows.length;
}

export type OpenTransaction = Pick<StoredTransaction, "hash" | "wallet" | "payer" | "nonce">;

/** All transactions whose wallet nonce is not certainly used yet. */
export function openTransactions(reader: Reader): Promise<OpenTransaction[]> {
  const { facilitatorTransactions: t } = reader.tables;
  const { hash, wallet, payer, nonce } = t;
  return reader.db.select({ hash, wallet, payer, nonce }).from(t).where(eq(t.open, true)).execute();
}

export async function openWallets(reader: Reader): Promise<Hex[]> {
  const { facilitatorTransactions: t } = reader.tables;
  const rows = await reader.db.selectDistinct({ wallet: t.wallet }).from(t).where(eq(t.open, true));
  return rows.map(({ wallet }) => wallet);
}

/** The payments of these transactions, for those that make several payments. */
export function sharedParts(reader: Reader, hashes: readonly Hex[]) {
  const { facilitatorTransactionPayments: t } = reader.tables;
  const { hash, payer, nonce } = t;
  return inGroups(hashes, async (some) => reader.db.select({ hash, payer, nonce }).from(t).where(oneOf(t.hash, some)));
}

/** The transactions with these hashes, ordered by wallet nonce and replacement. */
export async function transactionsWith(reader: Reader, hashes: readonly Hex[]): Promise<TransactionRow[]> {
  const { facilitatorTransactions: t } = reader.tables;
  const stored = await inGroups(hashes, async (some) => reader.db.select().from(t).where(oneOf(t.hash, some)));
  const rows = await inGroups(stored, (some) => withPayments(reader, some));
  return rows.sort((a, b) => a.wallet_nonce - b.wallet_nonce || a.replacement - b.replacement);
}

/** The wallet's nonces from `from` on that have a stored transaction, ascending. */
export async function storedNonces({ db, tables }: Reader, wallet: Hex, from: number): Promise<number[]> {
  const { facilitatorTransactions: t } = tables;
  const isFrom = and(eq(t.wallet, wallet), gte(t.wallet_nonce, from));
  const rows = await db.selectDistinct({ nonce: t.wallet_nonce }).from(t).where(isFrom).orderBy(asc(t.wallet_nonce));
  return rows.map(({ nonce }) => nonce);
}

/** The wallet's highest nonce under `below` that has a stored transaction; -1 when there is none. */
export async function highestNonce({ db, tables }: Reader, wallet: Hex, below: number): Promise<number> {
  const { facilitatorTransactions: t } = tables;
  const isBelow = and(eq(t.wallet, wallet), lt(t.wallet_nonce, below));
  const columns = { nonce: t.wallet_nonce };
  const [row] = await db.select(columns).from(t).where(isBelow).orderBy(desc(t.wallet_nonce)).limit(1);
  return row?.nonce ?? -1;
}

/** Every stored transaction that makes this payment, oldest first. */
export async function transactionsOf(reader: Reader, { payer, nonce }: PaymentKey): Promise<TransactionRow[]> {
  const { facilitatorTransactions: t, facilitatorTransactionPayments: part } = reader.tables;
  // The hashes are passed as values, since Postgres uses no index for `or … in (select …)`.
  const isPart = and(eq(part.payer, payer), eq(part.nonce, nonce));
  const shared = await reader.db.select({ hash: part.hash }).from(part).where(isPart);
  const hashes = shared.map(({ hash }) => hash);
  const alone = and(eq(t.payer, payer), eq(t.nonce, nonce));
  const isAny = hashes.length === 0 ? alone : or(alone, oneOf(t.hash, hashes));
  const rows = await reader.db.select().from(t).where(isAny).orderBy(asc(t.created_at));
  return withPayments(reader, rows);
}

/** Reopens nonces that the chain reports as unused. False when none of the nonces was closed. */
export async function reopenNonces(tx: Tx, wallet: Hex, nonces: readonly number[]): Promise<boolean> {
  const { facilitatorTransactions: t } = tx.tables;
  const isClosed = and(eq(t.wallet, wallet), oneOf(t.wallet_nonce, [...nonces]), eq(t.open, false));
  const reopened = await tx.db.update(t).set({ open: true }).where(isClosed).returning({ hash: t.hash });
  return reopened.length > 0;
}

/** Closes nonces that were used deep enough in the chain to be final. */
export async function closeNonces(tx: Tx, usedNonces: readonly { readonly wallet: Hex; readonly nonce: number }[]) {
  const { facilitatorTransactions: t } = tx.tables;
  await inGroups(usedNonces, async (some) => {
    const isAmong = or(...some.map(({ wallet, nonce }) => and(eq(t.wallet, wallet), eq(t.wallet_nonce, nonce))));
    await tx.db.update(t).set({ open: false }).where(isAmong);
    return [];
  });
}

/** A transaction of ours in which a payment's transfer reverted, and the gas burned. Each counts once per payment. */
export interface Reverted {
  readonly hash: Hex;
  readonly gasWei: bigint;
}

/** Marks the payment's gas in the transaction as burned. False when that was marked before. */
export async function markBurned(tx: Tx, { payer, nonce }: PaymentKey, { hash, gasWei }: Reverted): Promise<boolean> {
  const set = { gas_burned: String(gasWei) };
  // A transaction of one payment holds the mark in its own row, a shared one in the payment's part.
  for (const t of [tx.tables.facilitatorTransactions, tx.tables.facilitatorTransactionPayments]) {
    const own = and(eq(t.hash, hash), eq(t.payer, payer), eq(t.nonce, nonce), isNull(t.gas_burned));
    const rows = await tx.db.update(t).set(set).where(own).returning({ hash: t.hash });
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
 * Counts a transfer that reverted after its payment had failed for another reason: the gas counts on the UTC day `on`, and
 * the payment's share of the ceiling, given back at the failure, is taken again. False when it was counted before.
 */
export async function countLateRevert(tx: Tx, key: PaymentKey, reverted: Reverted, on: string): Promise<boolean> {
  const known = await storedPayment(tx, key);
  if (known === null) return false;
  const { account, day, value } = known;
  await lockDays(tx, account);
  if ((await storedPayment(tx, key))?.status !== "failed") return false;
  const isCounted = await isAnyBurned(tx, key);
  if (!(await markBurned(tx, key, reverted))) return false;
  if (!isCounted) await change(tx, { account, day }, { reserved: BigInt(value) });
  await change(tx, { account, day: on }, { gasBurned: reverted.gasWei });
  const { facilitatorPayments: t } = tx.tables;
  const isPayment = and(eq(t.payer, key.payer), eq(t.nonce, key.nonce));
  await tx.db.update(t).set({ reverted_on: on }).where(isPayment);
  return true;
}
