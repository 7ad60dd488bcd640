// What of a payer's balance is spoken for by what this facilitator has under way for it: without that, the payer could
// have one balance spent many times over, and all but the first transfer would revert and burn gas.
import { and, asc, eq, gt, ne, or, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";

/** What a payer had of the token by the end of a block. */
export interface Balance {
  readonly amount: bigint;
  readonly block: number;
  readonly hash: Hex;
}

/** What a claim is measured against. */
export type Measured = Pick<Balance, "amount" | "block"> & {
  /** Nonces of open payments whose authorization had been used or cancelled by the end of the block. */
  readonly landed?: ReadonlySet<Hex>;
};

/** Of one payer, that are asked for one by one. */
const SENT_MAX = 50;

export type PaymentsTable = Tables["facilitatorPayments"];

/** The words of the partial indexes, without which SQLite would scan the table. */
export function isOpen(t: PaymentsTable) {
  return sql`${t.status} in ('claimed', 'sent')`;
}

/** Only a claim takes it, behind the lock of the account; so nobody who holds it waits for one who waits for it. */
export function lockPayer(tx: Tx, payer: Hex): Promise<void> {
  return tx.lock(`payer:${payer}`);
}

/**
 * What is claimed and sent, and what was settled in a block after this one, whose balance is compared with it. That is
 * all that our transfers can still take from that balance: each was claimed first, under the payer's lock, so none is
 * missed; one that settled up to the block is in the balance already; one that failed can't land. So our transfers
 * for a payer never revert each other, however old the balance is by now, and whichever process made them. Both kinds
 * are read in one statement: a payment that settles between two could be in neither. One that has landed by that block
 * and is not recorded yet is in the balance already, or somebody else's; either way it takes nothing more from it. What
 * a reorganisation takes back counts once that has been noticed.
 *
 * The payer alone names the rows, for there is one token on one chain: so the indexes by payer are taken.
 */
export async function heldOf(
  tx: Tx,
  payer: Hex,
  { block, landed }: Pick<Measured, "block" | "landed">,
): Promise<bigint> {
  const { facilitatorPayments: t } = tx.tables;
  const rows = await tx.db
    .select({ nonce: t.nonce, status: t.status, value: t.value })
    .from(t)
    .where(
      and(eq(t.payer, payer), or(isOpen(t), and(sql`${t.status} = 'settled'`, gt(t.block_number, block)))),
    );
  const held = rows.filter(({ nonce, status }) => status === "settled" || landed?.has(nonce) !== true);
  return held.reduce((sum, { value }) => sum + BigInt(value), 0n);
}

/** The nonces of what is sent for the payer, those first that are the likeliest to be in a block. */
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

/** Wei that its open payments may burn by the code of their payers. Read behind the account's lock, so no claim of it comes between. */
export async function gasReserved(tx: Tx, account: string): Promise<bigint> {
  const { facilitatorPayments: t } = tx.tables;
  const rows = await tx.db
    .select({ wei: t.gas_reserved })
    .from(t)
    .where(and(eq(t.account, account), isOpen(t), ne(t.gas_reserved, "0")));
  return rows.reduce((sum, { wei }) => sum + BigInt(wei), 0n);
}
