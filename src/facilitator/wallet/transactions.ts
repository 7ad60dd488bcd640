// The facilitator's transactions: what a wallet nonce is used for (the payment's transfer, or a transfer of nothing to
// the wallet itself, where the nonce must be used and the payment is over), and its row in the database. A row is stored
// before its bytes leave the process, so a crash loses sight of nothing that may be on its way to a block.
import { and, asc, eq, gte, inArray, or } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import type { Authorization, Hex, PaymentKey } from "../../x402/types.ts";
import type { Fees } from "../chain/fees.ts";
import { GAS_MAX, TOKEN_ADDRESS, transferData } from "../chain/token.ts";
import type { ClaimedPayment } from "../payments/payments.ts";
import type { Signer, Unsigned } from "./signer.ts";

export type TransactionRow = Tables["facilitatorTransactions"]["$inferSelect"];

/** One wallet nonce of one wallet. */
export interface WalletNonce {
  readonly wallet: Hex;
  readonly nonce: number;
}

/** A statement that names more than this would be slow to plan. */
const NAMED_MAX = 100;

/** What a transfer of nothing costs, exactly. */
const NOTHING_GAS = 21_000n;

export interface TransactionContent {
  readonly to: Hex;
  readonly data: Hex;
  readonly gas: bigint;
  /** Null for one that only uses up the nonce. */
  readonly payment: Pick<Authorization, "from" | "nonce"> | null;
}

export interface Position {
  readonly nonce: number;
  readonly replacement: number;
  readonly fees: Fees;
  /** The chain's newest block now. */
  readonly block: number;
  /** Milliseconds. */
  readonly now: number;
}

/** The gas is capped, however much was estimated, so that a block has room for it. */
export function transfer({ authorization, signature }: ClaimedPayment, gas: bigint): TransactionContent {
  return {
    to: TOKEN_ADDRESS,
    data: transferData(authorization, signature),
    gas: gas < GAS_MAX ? gas : GAS_MAX,
    payment: authorization,
  };
}

export function nothing(wallet: Hex): TransactionContent {
  return { to: wallet, data: "0x", gas: NOTHING_GAS, payment: null };
}

/** @throws what the signer throws */
export async function signRow(
  signer: Signer,
  content: TransactionContent,
  position: Position,
): Promise<TransactionRow> {
  const { to, data, gas, payment } = content;
  const { nonce, replacement, fees, block, now } = position;
  const unsigned: Unsigned = { nonce, to, data, gas, fees };
  const { raw, hash } = await signer.sign(unsigned);
  return {
    hash,
    wallet: signer.address,
    wallet_nonce: nonce,
    replacement,
    payer: payment?.from ?? null,
    nonce: payment?.nonce ?? null,
    raw,
    gas: String(gas),
    max_fee: String(fees.maxFee),
    max_priority_fee: String(fees.maxPriorityFee),
    open: true,
    gas_burned: null,
    stored_at_block: block,
    created_at: now,
  };
}

/** @throws UniqueViolation when a wallet nonce among them is taken, by another process with the same key */
export async function insertTransactions(tx: Tx, rows: readonly TransactionRow[]): Promise<void> {
  await tx.db.insert(tx.tables.facilitatorTransactions).values([...rows]);
}

/** Whether all of them are stored; they are stored together or not at all. */
export async function areStored(reader: Reader, rows: readonly TransactionRow[]): Promise<boolean> {
  const { facilitatorTransactions: t } = reader.tables;
  const hashes = rows.map(({ hash }) => hash);
  const found = await reader.db.select({ hash: t.hash }).from(t).where(inArray(t.hash, hashes));
  return found.length === rows.length;
}

/** The hashes of all whose wallet nonce is not used for certain yet. */
export async function openHashes(reader: Reader): Promise<Hex[]> {
  const { facilitatorTransactions: t } = reader.tables;
  const rows = await reader.db.select({ hash: t.hash }).from(t).where(eq(t.open, true));
  return rows.map(({ hash }) => hash);
}

/** By wallet, nonce and replacement. */
export async function transactionsWith(reader: Reader, hashes: readonly Hex[]): Promise<TransactionRow[]> {
  const { facilitatorTransactions: t } = reader.tables;
  const rows: TransactionRow[] = [];
  for (let start = 0; start < hashes.length; start += NAMED_MAX) {
    const some = hashes.slice(start, start + NAMED_MAX);
    rows.push(...(await reader.db.select().from(t).where(inArray(t.hash, some))));
  }
  return rows.sort((a, b) => a.wallet_nonce - b.wallet_nonce || a.replacement - b.replacement);
}

/** The wallet's nonces from this one on for which something is stored, ascending. */
export async function storedNonces(reader: Reader, wallet: Hex, from: number): Promise<number[]> {
  const { facilitatorTransactions: t } = reader.tables;
  const rows = await reader.db
    .selectDistinct({ nonce: t.wallet_nonce })
    .from(t)
    .where(and(eq(t.wallet, wallet), gte(t.wallet_nonce, from)))
    .orderBy(asc(t.wallet_nonce));
  return rows.map(({ nonce }) => nonce);
}

/** Every transaction for this payment that was ever signed, the oldest first. */
export function transactionsOf(reader: Reader, { payer, nonce }: PaymentKey): Promise<TransactionRow[]> {
  const { facilitatorTransactions: t } = reader.tables;
  return reader.db
    .select()
    .from(t)
    .where(and(eq(t.payer, payer), eq(t.nonce, nonce)))
    .orderBy(asc(t.created_at))
    .execute();
}

/** The chain says that the nonces are not used. False when nothing is stored for any of them that was closed. */
export async function reopenNonces(tx: Tx, wallet: Hex, nonces: readonly number[]): Promise<boolean> {
  const { facilitatorTransactions: t } = tx.tables;
  const reopened = await tx.db
    .update(t)
    .set({ open: true })
    .where(and(eq(t.wallet, wallet), inArray(t.wallet_nonce, [...nonces]), eq(t.open, false)))
    .returning({ hash: t.hash });
  return reopened.length > 0;
}

/** Their wallet nonces are used, deep enough in the chain. */
export async function closeNonces(tx: Tx, places: readonly WalletNonce[]): Promise<void> {
  const { facilitatorTransactions: t } = tx.tables;
  for (let start = 0; start < places.length; start += NAMED_MAX) {
    const some = places.slice(start, start + NAMED_MAX);
    await tx.db
      .update(t)
      .set({ open: false })
      .where(or(...some.map(({ wallet, nonce }) => and(eq(t.wallet, wallet), eq(t.wallet_nonce, nonce)))));
  }
}
