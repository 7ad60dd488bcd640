// How much of a payer's balance is held by payments that this facilitator has under way. Without that, a payer could have
// one balance spent many times over, and all but the first transfer would revert and burn gas.
import { and, asc, eq, gt, ne, or, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Balance } from "../../chain/chain.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";

/** What a claim is measured against. */
export type Measured = Pick<Balance, "amount" | "block"> & {
  /** Nonces of open payments whose authorization had been used or cancelled by the end of the block. */
  readonly landed?: ReadonlySet<Hex>;
};

/** Sent payments of one payer, each of which is a question to a node. */
const SENT_MAX = 50;

export type PaymentsTable = Tables["facilitatorPayments"];

/** The exact condition of the partial indexes, without which SQLite would scan the table. */
export function isOpen(t: PaymentsTable) {
  return sql`${t.status} in ('claimed', 'sent')`;
}

/** Only a claim takes this lock, after the lock of the account, so there is no deadlock. */
export function lockPayer(tx: Tx, payer: Hex): Promise<void> {
  return tx.lock(`payer:${payer}`);
}

/**
 * The sum of payments that are claimed or sent, with their number, and of those settled after the block whose balance it
 * is compared with. That is all that our transfers can still take from that balance: each was claimed first, under the payer's lock, so
 * none is missed; one that settled up to the block is in the balance already; one that failed can't land. So our
 * transfers for a payer never revert each other, however old the balance is by now, and whichever process made them.
 * Both kinds are read in one statement, because a payment that settles between two could be missing in both. One that
 * landed by that block and is not recorded yet (`landed`) takes nothing more from the balance, whoever used it. What a
 * reorganisation undoes counts once it has been noticed.
 *
 * The payer alone names the rows, for there is one token on one chain: so the indexes by payer are taken.
 */
export async function heldOf(
  tx: Tx,
  payer: Hex,
  { block, landed }: Pick<Measured, "block" | "landed">,
): Promise<{ readonly value: bigint; readonly open: number }> {
  const { facilitatorPayments: t } = tx.tables;
  const rows = await tx.db
    .select({ nonce: t.nonce, status: t.status, value: t.value })
    .from(t)
    .where(and(eq(t.payer, payer), or(isOpen(t), and(sql`${t.status} = 'settled'`, gt(t.block_number, block)))));
  const held = rows.filter(({ nonce, status }) => status === "settled" || landed?.has(nonce) !== true);
  return {
    value: held.reduce((sum, { value }) => sum + BigInt(value), 0n),
    open: rows.filter(({ status }) => status !== "settled").length,
  };
}

/** The nonces of the payer's sent payments, those first that are the likeliest to be in a block. */
export async function sentNonces(reader: Reader, payer: Hex): Promise<Hex[]> {
  const { facilitatorPayments: t } = reader.tables;
  const rows = await reader.db
    .select({ nonce: t.nonce })
    .from(t)
    .where(and(eq(t.payer, payer), isOpen(t), eq(t.status, "sent")))
    .orderBy(asc(t.created_at))
    .limit(SENT_MAX);
  return rows.map(({ nonce }) => nonce);
}

/** Wei that its open payments may burn by their payers' code, and those of this payer. Read under the account's lock, so no claim comes between. */
export async function gasReserved(tx: Tx, account: string, payer: Hex): Promise<{ reserved: bigint; own: bigint }> {
  const { facilitatorPayments: t } = tx.tables;
  const rows = await tx.db
    .select({ wei: t.gas_reserved, payer: t.payer })
    .from(t)
    .where(and(eq(t.account, account), isOpen(t), ne(t.gas_reserved, "0")));
  const sumOf = (those: typeof rows) => those.reduce((sum, { wei }) => sum + BigInt(wei), 0n);
  return { reserved: sumOf(rows), own: sumOf(rows.filter((row) => row.payer === payer)) };
}
