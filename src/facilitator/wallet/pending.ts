// What of the wallets' business is open, in memory: the slots (a wallet's nonces that are not used for certain yet,
// each with all the transactions signed for it) and the payments that hang on them. The rows in the database are
// the truth; this is what the watcher works on.
import type { CollectionStatus } from "../../core/states.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { type ClaimedPayment, claimedPayment, type FacilitatorPayment } from "../payments.ts";
import type { TransactionRow } from "./transactions.ts";

/** Where a wallet's nonce was used. */
export interface Inclusion {
  /** Null when it is none of ours. */
  readonly hash: Hex | null;
  /** By its receipt. */
  readonly succeeded: boolean;
  /** What its gas cost us. */
  readonly gasWei: bigint;
  readonly blockNumber: number;
  readonly blockHash: Hex;
}

export interface Slot {
  readonly wallet: Hex;
  readonly nonce: number;
  /** By replacement, the newest last. */
  readonly transactions: [TransactionRow, ...TransactionRow[]];
  /** Null for one that only fills a gap. */
  readonly payment: OpenPayment | null;
  inclusion: Inclusion | null;
  /** When its newest transaction is due to be broadcast (performance.now). */
  broadcastAt: number;
  /** Broadcasts of the newest transaction. */
  broadcasts: number;
}

export interface OpenPayment extends ClaimedPayment {
  status: CollectionStatus;
  readonly slots: Set<Slot>;
  /** A transaction with another wallet nonce is on its way to the store. */
  moving: boolean;
  /** How often it was looked for who used the authorization. */
  lookUps: number;
  /** The chain's height before which nobody can have used the authorization. */
  readonly sinceBlock: number;
}

/** A node that counts wrongly for once leads to a nonce far away: what stands there is not waited for. */
export const REACH = 4096;

export interface Slots {
  all(): Iterable<Slot>;
  payments(): IterableIterator<OpenPayment>;
  of(wallet: Hex, nonce: number): Slot | undefined;
  /** Those of a wallet whose nonce is in no block yet, by nonce. */
  waiting(wallet: Hex): Slot[];
  wallets(): Set<Hex>;
  /** How many wait, by wallet, within reach. */
  loads(): ReadonlyMap<Hex, number>;
  /** The wallet's nonces below this are used in the chain. */
  advance(wallet: Hex, count: number): void;
  /** Whether its nonce can be the next one before long. */
  isInReach(slot: Slot): boolean;
  /** Takes in a stored transaction. The payment must be known, or given by its row. */
  add(row: TransactionRow, payment: ClaimedPayment | null, status: CollectionStatus): Slot;
  /** Takes in a payment that has no open transaction. */
  adopt(row: FacilitatorPayment, sinceBlock: number): OpenPayment;
  holds(hash: Hex): boolean;
  remove(slot: Slot): void;
  /** Forgets a payment that has ended and has no slot any more. */
  forget(payment: OpenPayment): void;
}

export function newestOf(slot: Slot): TransactionRow {
  return slot.transactions.at(-1) ?? slot.transactions[0];
}

/**
 * Its newest transaction would make a payment that has ended. Whatever a reorganised chain would say to that, it must
 * not land any more: the nonce is used up by one that does nothing.
 */
export function isObsolete(slot: Slot): boolean {
  return slot.payment?.status !== "sent" && newestOf(slot).payer !== null;
}

function nameOf({ payer, nonce }: PaymentKey): string {
  return `${payer}:${nonce}`;
}

export function createSlots(): Slots {
  const slots = new Map<string, Slot>();
  const payments = new Map<string, OpenPayment>();
  const hashes = new Set<Hex>();
  const counts = new Map<Hex, number>();
  const place = (wallet: Hex, nonce: number) => `${wallet}:${nonce}`;

  function paymentOf(claimed: ClaimedPayment, status: CollectionStatus, sinceBlock: number): OpenPayment {
    const name = nameOf(claimed.key);
    const known = payments.get(name);
    if (known !== undefined) return known;
    const payment: OpenPayment = {
      ...claimed,
      status,
      slots: new Set(),
      moving: false,
      lookUps: 0,
      sinceBlock,
    };
    payments.set(name, payment);
    return payment;
  }

  function isInReach({ wallet, nonce }: Slot): boolean {
    return nonce < (counts.get(wallet) ?? Number.POSITIVE_INFINITY) + REACH;
  }

  function forget(payment: OpenPayment): void {
    if (payment.slots.size === 0 && payment.status !== "sent") payments.delete(nameOf(payment.key));
  }

  return {
    all: () => slots.values(),
    payments: () => payments.values(),
    of: (wallet, nonce) => slots.get(place(wallet, nonce)),
    waiting: (wallet) =>
      [...slots.values()]
        .filter((slot) => slot.wallet === wallet && slot.inclusion === null)
        .sort((a, b) => a.nonce - b.nonce),
    wallets: () => new Set([...slots.values()].map(({ wallet }) => wallet)),
    loads() {
      const loads = new Map<Hex, number>();
      for (const slot of slots.values()) {
        if (slot.inclusion === null && isInReach(slot)) {
          loads.set(slot.wallet, (loads.get(slot.wallet) ?? 0) + 1);
        }
      }
      return loads;
    },
    advance: (wallet, count) => void counts.set(wallet, count),
    isInReach,
    add(row, claimed, status) {
      const name = place(row.wallet, row.wallet_nonce);
      hashes.add(row.hash);
      const known = slots.get(name);
      if (known !== undefined) {
        known.transactions.push(row);
        known.transactions.sort((a, b) => a.replacement - b.replacement);
        Object.assign(known, { broadcastAt: 0, broadcasts: 0 });
        return known;
      }
      const payment = claimed === null ? null : paymentOf(claimed, status, row.stored_at_block);
      const slot: Slot = {
        wallet: row.wallet,
        nonce: row.wallet_nonce,
        transactions: [row],
        payment,
        inclusion: null,
        broadcastAt: 0,
        broadcasts: 0,
      };
      slots.set(name, slot);
      payment?.slots.add(slot);
      return slot;
    },
    adopt: (row, sinceBlock) => paymentOf(claimedPayment(row), row.status, sinceBlock),
    holds: (hash) => hashes.has(hash),
    remove(slot) {
      slots.delete(place(slot.wallet, slot.nonce));
      for (const { hash } of slot.transactions) hashes.delete(hash);
      const { payment } = slot;
      if (payment === null) return;
      payment.slots.delete(slot);
      forget(payment);
    },
    forget,
  };
}
