// The open work of the wallets, in memory: the pending nonces (those not certainly used yet, each with all transactions
// signed for it) and the payments that depend on them. The rows in the database are the truth; the watcher works on
// this copy of them.
import type { CollectionStatus } from "../../core/states.ts";
import type { Hex } from "../../x402/types.ts";
import { type ClaimedPayment, claimedPayment, type FacilitatorPayment, paymentName } from "../payments/payments.ts";
import type { TransactionRow } from "./transactions.ts";

/** Where a wallet's nonce was used. */
export interface UsedNonce {
  /** Null when the transaction is not ours. */
  readonly hash: Hex | null;
  /** By its receipt. */
  readonly succeeded: boolean;
  /** What its gas cost us. */
  readonly gasWei: bigint;
  readonly blockNumber: number;
  readonly blockHash: Hex;
}

export interface PendingNonce {
  readonly wallet: Hex;
  readonly nonce: number;
  /** By replacement, the newest last. */
  readonly transactions: [TransactionRow, ...TransactionRow[]];
  /** Null for one that only fills a gap. */
  readonly payment: PendingPayment | null;
  inclusion: UsedNonce | null;
  /** When its newest transaction is due to be broadcast (performance.now). */
  broadcastAt: number;
  /** Broadcasts of the newest transaction. */
  broadcasts: number;
}

export interface PendingPayment extends ClaimedPayment {
  status: CollectionStatus;
  readonly pendingNonces: Set<PendingNonce>;
  /** A transaction with another wallet nonce is on its way to the store. */
  moving: boolean;
  /** Searches so far for the transaction that used the authorization. */
  lookUps: number;
  /** Nobody can have used the authorization before this height of the chain. */
  readonly sinceBlock: number;
}

/** A node that counts wrongly once leads to a nonce far ahead; nobody waits for what has such a nonce. */
export const REACH = 4096;

export type PendingNonces = ReturnType<typeof createPendingNonces>;

export function newestOf(pendingNonce: PendingNonce): TransactionRow {
  return pendingNonce.transactions.at(-1) ?? pendingNonce.transactions[0];
}

/**
 * Its newest transaction would make a payment that has ended. It must not land any more, even on a reorganised chain:
 * a transaction that does nothing uses up the nonce.
 */
export function isObsolete(pendingNonce: PendingNonce): boolean {
  return pendingNonce.payment?.status !== "sent" && newestOf(pendingNonce).payer !== null;
}

export function createPendingNonces() {
  const pendingNonces = new Map<string, PendingNonce>();
  const payments = new Map<string, PendingPayment>();
  const hashes = new Set<Hex>();
  const counts = new Map<Hex, number>();
  const place = (wallet: Hex, nonce: number) => `${wallet}:${nonce}`;

  function paymentOf(claimed: ClaimedPayment, status: CollectionStatus, sinceBlock: number): PendingPayment {
    const name = paymentName(claimed.key);
    const known = payments.get(name);
    if (known !== undefined) return known;
    const fresh = { pendingNonces: new Set<PendingNonce>(), moving: false, lookUps: 0 };
    const payment: PendingPayment = { ...claimed, ...fresh, status, sinceBlock };
    payments.set(name, payment);
    return payment;
  }

  /** Whether its nonce can be the next one before long. */
  function isInReach({ wallet, nonce }: PendingNonce): boolean {
    return nonce < (counts.get(wallet) ?? Number.POSITIVE_INFINITY) + REACH;
  }

  /** Forgets a payment that has ended and has no pending nonce any more. */
  function forget(payment: PendingPayment): void {
    if (payment.pendingNonces.size === 0 && payment.status !== "sent") payments.delete(paymentName(payment.key));
  }

  return {
    all: (): Iterable<PendingNonce> => pendingNonces.values(),
    payments: (): IterableIterator<PendingPayment> => payments.values(),
    of: (wallet: Hex, nonce: number): PendingNonce | undefined => pendingNonces.get(place(wallet, nonce)),
    /** Those of a wallet whose nonce is in no block yet, by nonce. */
    waiting: (wallet: Hex): PendingNonce[] =>
      [...pendingNonces.values()]
        .filter((pendingNonce) => pendingNonce.wallet === wallet && pendingNonce.inclusion === null)
        .sort((a, b) => a.nonce - b.nonce),
    wallets: (): Set<Hex> => new Set([...pendingNonces.values()].map(({ wallet }) => wallet)),
    /** How many wait, by wallet, within reach. */
    loads(): ReadonlyMap<Hex, number> {
      const loads = new Map<Hex, number>();
      for (const pendingNonce of pendingNonces.values()) {
        if (pendingNonce.inclusion === null && isInReach(pendingNonce)) {
          loads.set(pendingNonce.wallet, (loads.get(pendingNonce.wallet) ?? 0) + 1);
        }
      }
      return loads;
    },
    /** The wallet's nonces below this are used in the chain. */
    advance: (wallet: Hex, count: number): void => void counts.set(wallet, count),
    isInReach,
    /** Takes in a stored transaction. The payment must be known, or given by its row. */
    add(row: TransactionRow, claimed: ClaimedPayment | null, status: CollectionStatus): PendingNonce {
      const name = place(row.wallet, row.wallet_nonce);
      hashes.add(row.hash);
      const known = pendingNonces.get(name);
      if (known !== undefined) {
        known.transactions.push(row);
        known.transactions.sort((a, b) => a.replacement - b.replacement);
        Object.assign(known, { broadcastAt: 0, broadcasts: 0 });
        return known;
      }
      const payment = claimed === null ? null : paymentOf(claimed, status, row.stored_at_block);
      const pendingNonce: PendingNonce = {
        wallet: row.wallet,
        nonce: row.wallet_nonce,
        transactions: [row],
        payment,
        inclusion: null,
        broadcastAt: 0,
        broadcasts: 0,
      };
      pendingNonces.set(name, pendingNonce);
      payment?.pendingNonces.add(pendingNonce);
      return pendingNonce;
    },
    /** Takes in a payment that has no open transaction. */
    adopt: (row: FacilitatorPayment, sinceBlock: number): PendingPayment =>
      paymentOf(claimedPayment(row), row.status, sinceBlock),
    holds: (hash: Hex): boolean => hashes.has(hash),
    remove(pendingNonce: PendingNonce): void {
      pendingNonces.delete(place(pendingNonce.wallet, pendingNonce.nonce));
      for (const { hash } of pendingNonce.transactions) hashes.delete(hash);
      const { payment } = pendingNonce;
      if (payment === null) return;
      payment.pendingNonces.delete(pendingNonce);
      forget(payment);
    },
    forget,
  };
}
