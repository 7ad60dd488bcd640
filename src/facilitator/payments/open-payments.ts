// The payments that are under way, for those who resume or count them.
import { and, asc, count, eq } from "drizzle-orm";
import { oneOf } from "../../../db/schema.ts";
import type { Reader } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { isOpen } from "./held-funds.ts";
import { type FacilitatorPayment, paymentName } from "./payments.ts";

/** A statement that names more than this would be slow to plan. */
const NAMED_MAX = 100;

/** Claims for which nothing was ever broadcast, the oldest first. */
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

/** The number of open payments of each account that has any, in one walk along their index. */
export async function openByAccount(reader: Reader): Promise<ReadonlyMap<string, number>> {
  const { facilitatorPayments: t } = reader.tables;
  const rows = await reader.db
    .select({ account: t.account, open: count() })
    .from(t)
    .where(isOpen(t))
    .groupBy(t.account);
  return new Map(rows.map(({ account, open }) => [account, Number(open)]));
}

export interface SentPayment {
  readonly payment: FacilitatorPayment;
  /** That of its first transaction. */
  readonly wallet: Hex | null;
}

/** Payments of which a transaction is stored, and whose outcome is open. */
export function sentPayments(reader: Reader): Promise<SentPayment[]> {
  const { facilitatorPayments: t, facilitatorTransactions: first } = reader.tables;
  return reader.db
    .select({ payment: t, wallet: first.wallet })
    .from(t)
    .leftJoin(first, eq(first.hash, t.transaction_hash))
    .where(and(isOpen(t), eq(t.status, "sent")))
    .orderBy(asc(t.created_at))
    .execute();
}

/** The names of those that are claimed or sent. The index by payer is taken, since the payer names few of them. */
export async function openAmong(reader: Reader, keys: readonly PaymentKey[]): Promise<ReadonlySet<string>> {
  const { facilitatorPayments: t } = reader.tables;
  const payers = [...new Set(keys.map(({ payer }) => payer))];
  const open = new Set<string>();
  for (let start = 0; start < payers.length; start += NAMED_MAX) {
    const rows = await reader.db
      .select({ payer: t.payer, nonce: t.nonce })
      .from(t)
      .where(and(oneOf(t.payer, payers.slice(start, start + NAMED_MAX)), isOpen(t)));
    for (const row of rows) open.add(paymentName(row));
  }
  return open;
}
