// What of the wallets' business is open, in memory: the pending nonces (a wallet's nonces that are not used for certain yet,
// each with all the transactions signed for it) and the payments that hang on them. The rows in the database are
// the truth; this is what the watcher works on.
import type { CollectionStatus } from "../../core/states.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { type ClaimedPayment, claimedPayment, type FacilitatorPayment } from "../payments.ts";
import type { TransactionRow } from "./transactions.ts";

/** Where a wallet's nonce was used. */
export interface UsedNonce {
  /** Null when it is none of ours. */
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
  /** How often it was looked for who used the authorization. */
  lookUps: number;
  /** The chain's height before which nobody can have used the authorization. */
  readonly sinceBlock: number;
}

/** A node that counts wrongly for once leads to a nonce far away: what stands there is not waited for. */
export const REACH = 4096;

export interface PendingNonces {
  all(): Iterable<PendingNonce>;
  payments(): IterableIterator<PendingPayment>;
  of(wallet: Hex, nonce: number): PendingNonce | undefined;
  /** Those of a wallet whose nonce is in no block yet, by nonce. */
  waiting(wallet: Hex): PendingNonce[];
  wallets(): Set<Hex>;
  /** How many wait, by wallet, within reach. */
  loads(): ReadonlyMap<Hex, number>;
  /** The wallet's nonces below this are used in the chain. */
  advance(wallet: Hex, count: number): void;
  /** Whether its nonce can be the next one before long. */
  isInReach(pendingNonce: PendingNonce): boolean;
  /** Takes in a stored transaction. The payment must be known, or given by its row. */
  add(row: TransactionRow, payment: ClaimedPayment | null, status: CollectionStatus): PendingNonce;
  /** Takes in a payment that has no open transaction. */
  adopt(row: FacilitatorPayment, sinceBlock: number): PendingPayment;
  holds(hash: Hex): boolean;
  remove(pendingNonce: PendingNonce): void;
  /** Forgets a payment that has ended and has no pending nonce any more. */
  forget(payment: PendingPayment): void;
}

export function newestOf(pendingNonce: PendingNonce): TransactionRow {
  return pendingNonce.transactions.at(-1) ?? pendingNonce.transactions[0];
}

/**
 * Its newest transaction would make a payment that has ended. Whatever a reorganised chain would say to that, it must
 * not land any more: the nonce is used up by one that does nothing.
 */
export function isObsolete(pendingNonce: PendingNonce): boolean {
  return pendingNonce.payment?.status !== "sent" && newestOf(pendingNonce).payer !== null;
}

function nameOf({ payer, nonce }: PaymentKey): string {
  return `${payer}:${nonce}`;
}

export function createPendingNonces(): PendingNonces {
  const pendingNonces = new Map<string, PendingNonce>();
  const payments = new Map<string, PendingPayment>();
  const hashes = new Set<Hex>();
  const counts = new Map<Hex, number>();
  const place = (wallet: Hex, nonce: number) => `${wallet}:${nonce}`;

  function paymentOf(claimed: ClaimedPayment, status: CollectionStatus, sinceBlock: number): PendingPayment {
    const name = nameOf(claimed.key);
    const known = payments.get(name);
    if (known !== undefined) return known;
    const payment: PendingPayment = {
      ...claimed,
      status,
      pendingNonces: new Set(),
      moving: false,
      lookUps: 0,
      sinceBlock,
    };
    payments.set(name, payment);
    return payment;
  }

  function isInReach({ wallet, nonce }: PendingNonce): boolean {
    return nonce < (counts.get(wallet) ?? Number.POSITIVE_INFINITY) + REACH;
  }

  function forget(payment: PendingPayment): void {
    if (payment.pendingNonces.size === 0 && payment.status !== "sent") payments.delete(nameOf(payment.key));
  }

  return {
    all: () => pendingNonces.values(),
    payments: () => payments.values(),
    of: (wallet, nonce) => pendingNonces.get(place(wallet, nonce)),
    waiting: (wallet) =>
      [...pendingNonces.values()]
        .filter((pendingNonce) => pendingNonce.wallet === wallet && pendingNonce.inclusion === null)
        .sort((a, b) => a.nonce - b.nonce),
    wallets: () => new Set([...pendingNonces.values()].map(({ wallet }) => wallet)),
    loads() {
      const loads = new Map<Hex, number>();
      for (const pendingNonce of pendingNonces.values()) {
        if (pendingNonce.inclusion === null && isInReach(pendingNonce)) {
          loads.set(pendingNonce.wallet, (loads.get(pendingNonce.wallet) ?? 0) + 1);
        }
      }
      return loads;
    },
    advance: (wallet, count) => void counts.set(wallet, count),
    isInReach,
    add(row, claimed, status) {
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
    adopt: (row, sinceBlock) => paymentOf(claimedPayment(row), row.status, sinceBlock),
    holds: (hash) => hashes.has(hash),
    remove(pendingNonce) {
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
