// The open work of the wallets, in memory: the pending nonces (those not certainly used yet, each with all transactions
// signed for it) and the payments that depend on them, of which several may share a nonce. It is a copy of the rows in the
// database, read again now and then, since another process with the same keys may have stored transactions as well.
import type { Chain } from "../../chain/chain.ts";
import type { Receipt } from "../../chain/json-rpc.ts";
import type { Log } from "../../core/log.ts";
import type { CollectionStatus } from "../../core/states.ts";
import type { Clock } from "../../core/time.ts";
import type { Store, Tx } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { keyOf } from "../../x402/verify.ts";
import {
  type ClaimedPayment,
  claimedPayment,
  type FacilitatorPayment,
  paymentName,
  sentPayments,
  storedPayment,
} from "../payments/payments.ts";
import type { WalletLeases } from "./leases.ts";
import {
  type OpenTransaction,
  openTransactions,
  pays,
  sharedParts,
  type TransactionRow,
  transactionsOf,
  transactionsWith,
} from "./transactions.ts";

/** Where a wallet's nonce was used. */
export interface UsedNonce extends Pick<Receipt, "succeeded" | "gasWei" | "blockNumber" | "blockHash"> {
  /** Null when the transaction is not ours. */
  readonly hash: Hex | null;
  /** The payments that it moved the money of, by its own events. */
  readonly paid: ReadonlySet<PendingPayment>;
}

export interface PendingNonce {
  readonly wallet: Hex;
  readonly nonce: number;
  /** By replacement, the newest last. */
  readonly transactions: [TransactionRow, ...TransactionRow[]];
  /** Those of all its transactions; none for one that only fills a gap. A replacement may make fewer than the first. */
  readonly payments: Set<PendingPayment>;
  inclusion: UsedNonce | null;
  /** When its newest transaction is due to be broadcast (performance.now), and how often it was. */
  broadcastAt: number;
  broadcasts: number;
  /** Looks by which its nonce was used, and that found no receipt of ours. */
  looksInVain: number;
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

export type KnownPayment = ClaimedPayment & Pick<PendingPayment, "status">;

/** A node that counts wrongly once leads to a nonce far ahead; nobody waits for what has such a nonce. */
export const REACH = 4096;

export type PendingNonces = ReturnType<typeof createPendingNonces>;

/** What every part of the wallets works with. */
export interface WalletParts {
  readonly chain: Chain;
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly leases: WalletLeases;
  readonly pendingNonces: PendingNonces;
  /** Wei per gas. */
  readonly maxFee: bigint;
  /** There is something to broadcast, or to watch. */
  wake(): void;
  /** The chain is to be looked at soon, even if there is no new block. */
  lookAgain(): void;
  /** The database holds something that is not known here, so the next look reads it. */
  reload(): void;
  /** Chain and store are to be asked for the wallet's next nonce. */
  resynchronise(wallet: Hex): void;
}

/**
 * Whether every open transaction of the payment is known here, but for one that is being stored. One that another process
 * has stored may still collect it.
 */
export async function areAllKnown(
  tx: Tx,
  key: PaymentKey,
  { of }: Pick<PendingNonces, "of">,
  storing: Hex | null = null,
): Promise<boolean> {
  const rows = await transactionsOf(tx, key);
  return rows.every((row) => row.hash === storing || !row.open || of(row.wallet, row.wallet_nonce) !== undefined);
}

export function newestOf(pendingNonce: PendingNonce): TransactionRow {
  return pendingNonce.transactions.at(-1) ?? pendingNonce.transactions[0];
}

/**
 * Its newest transaction would make a payment that has ended. It must not land any more, even on a reorganised chain:
 * one that makes only the others, or does nothing, uses up the nonce.
 */
export function isObsolete(pendingNonce: PendingNonce): boolean {
  const newest = newestOf(pendingNonce);
  const open = [...pendingNonce.payments].filter(({ status }) => status === "sent");
  return newest.payments.length > open.filter(({ key }) => pays(newest, key)).length;
}

function nonceOf(row: TransactionRow) {
  const { wallet, wallet_nonce: nonce } = row;
  const transactions: PendingNonce["transactions"] = [row];
  return { wallet, nonce, transactions, payments: new Set<PendingPayment>(), inclusion: null, looksInVain: 0 };
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

  /** Nonces of the wallet below this one can be the next one before long. */
  function reach(wallet: Hex): number {
    return (counts.get(wallet) ?? Number.MAX_SAFE_INTEGER - REACH) + REACH;
  }

  const isInReach = ({ wallet, nonce }: PendingNonce): boolean => nonce < reach(wallet);

  /** Forgets a payment that has ended and has no pending nonce any more. */
  function forget(payment: PendingPayment): void {
    if (payment.pendingNonces.size === 0 && payment.status !== "sent") payments.delete(paymentName(payment.key));
  }

  function remove(pendingNonce: PendingNonce): void {
    pendingNonces.delete(place(pendingNonce.wallet, pendingNonce.nonce));
    for (const { hash } of pendingNonce.transactions) hashes.delete(hash);
    for (const payment of pendingNonce.payments) {
      payment.pendingNonces.delete(pendingNonce);
      forget(payment);
    }
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
    /** How many payments of the wallet wait, within reach; a nonce without any counts as one. */
    load(wallet: Hex): number {
      let load = 0;
      for (const each of pendingNonces.values()) {
        const isWaiting = each.wallet === wallet && each.inclusion === null && isInReach(each);
        if (isWaiting) load += Math.max(1, each.payments.size);
      }
      return load;
    },
    reach,
    /** The wallet's nonces below this are used in the chain. */
    advance: (wallet: Hex, count: number): void => void counts.set(wallet, count),
    isInReach,
    /** Takes in a stored transaction, with the payments that it makes. */
    add(row: TransactionRow, known: readonly KnownPayment[]): PendingNonce {
      const name = place(row.wallet, row.wallet_nonce);
      hashes.add(row.hash);
      const before = pendingNonces.get(name);
      before?.transactions.push(row);
      before?.transactions.sort((a, b) => a.replacement - b.replacement);
      const isDue = { broadcastAt: 0, broadcasts: 0 };
      const pendingNonce = before === undefined ? { ...nonceOf(row), ...isDue } : Object.assign(before, isDue);
      pendingNonces.set(name, pendingNonce);
      for (const each of known) {
        const payment = paymentOf(each, each.status, row.stored_at_block);
        pendingNonce.payments.add(payment);
        payment.pendingNonces.add(pendingNonce);
      }
      return pendingNonce;
    },
    /** Takes in a payment that has no open transaction. */
    adopt: (row: FacilitatorPayment, sinceBlock: number): PendingPayment =>
      paymentOf(claimedPayment(row), row.status, sinceBlock),
    holds: (hash: Hex): boolean => hashes.has(hash),
    knows: (payment: Pick<PaymentKey, "payer" | "nonce">): boolean => payments.has(paymentName(payment)),
    remove,
    forget,
    /**
     * Lets go of the wallets that are not kept, and of the payments that nothing of the others makes. A nonce of another
     * wallet stays while a payment of it depends on a kept one too, because both decide what becomes of that payment.
     */
    release(isKept: (wallet: Hex) => boolean): void {
      const hasKept = (payment: PendingPayment) => [...payment.pendingNonces].some(({ wallet }) => isKept(wallet));
      const gone = [...pendingNonces.values()].filter(
        ({ wallet, payments }) => !isKept(wallet) && ![...payments].some(hasKept),
      );
      for (const pendingNonce of gone) remove(pendingNonce);
      for (const [name, payment] of payments) if (payment.pendingNonces.size === 0) payments.delete(name);
    },
  };
}

const FRESH_MS = 10_000;

export function createNonceSync({
  chain,
  store,
  pendingNonces,
  leases,
}: Pick<WalletParts, "chain" | "store" | "pendingNonces" | "leases">) {
  let loadedAt = Number.NEGATIVE_INFINITY;

  async function take(row: TransactionRow): Promise<void> {
    const keys = row.payments.map(({ payer, nonce }) => keyOf(chain.network, { from: payer, nonce }));
    const stored = await Promise.all(keys.map((key) => storedPayment(store.read, key)));
    if (pendingNonces.holds(row.hash)) return;
    const found = stored.filter((payment) => payment !== null);
    const known = found.map((payment) => ({ ...claimedPayment(payment), status: payment.status }));
    const pendingNonce = pendingNonces.add(row, known);
    const used = recordedUse(row, found, pendingNonce.payments);
    if (used !== null) pendingNonce.inclusion = used;
  }

  async function takeAll(hashes: readonly Hex[]): Promise<void> {
    for (const row of await transactionsWith(store.read, hashes)) await take(row);
  }

  /** Sent payments of which no transaction is open: those whose first one is by a wallet that this process works for. */
  async function adopt(): Promise<void> {
    for (const { payment, wallet } of await sentPayments(store.read)) {
      if (pendingNonces.knows(payment) || (wallet !== null && !leases.holds(wallet))) continue;
      const blocks = (await transactionsOf(store.read, payment)).map((row) => row.stored_at_block);
      pendingNonces.adopt(payment, blocks.length === 0 ? 0 : Math.min(...blocks));
    }
  }

  /** Those of other wallets that make payments which are known here: all of them decide what becomes of a payment. */
  async function shared(others: readonly OpenTransaction[]): Promise<Hex[]> {
    const joint = others.filter(({ payer }) => payer === null);
    const parts = await sharedParts(
      store.read,
      joint.map(({ hash }) => hash),
    );
    const known = [...others, ...parts].filter(
      ({ payer, nonce }) => payer !== null && nonce !== null && pendingNonces.knows({ payer, nonce }),
    );
    return [...new Set(known.map(({ hash }) => hash))];
  }

  /** Takes in what is open in the database, concerns this process, and is not known yet. */
  async function load(): Promise<void> {
    const unknown = (await openTransactions(store.read)).filter(({ hash }) => !pendingNonces.holds(hash));
    const { own = [], others = [] } = Object.groupBy(unknown, ({ wallet }) =>
      leases.holds(wallet) ? "own" : "others",
    );
    await takeAll(own.map(({ hash }) => hash));
    await adopt();
    await takeAll(await shared(others));
    loadedAt = performance.now();
  }

  return {
    load,
    /** Loads the pending nonces, unless that was done lately. */
    async refresh(): Promise<void> {
      if (performance.now() - loadedAt >= FRESH_MS) await load();
    },
    invalidate(): void {
      loadedAt = Number.NEGATIVE_INFINITY;
    },
  };
}

/** How the transaction used its nonce, as far as the records of its payments tell: null when none settled by it. */
function recordedUse(
  { hash }: TransactionRow,
  found: readonly FacilitatorPayment[],
  payments: ReadonlySet<PendingPayment>,
): UsedNonce | null {
  const settled = found.filter(({ status, transaction_hash }) => status === "settled" && transaction_hash === hash);
  const { block_number: blockNumber = null, block_hash: blockHash = null } = settled[0] ?? {};
  if (blockNumber === null || blockHash === null) return null;
  const names = new Set(settled.map(paymentName));
  const paid = new Set([...payments].filter(({ key }) => names.has(paymentName(key))));
  return { hash, succeeded: true, paid, gasWei: 0n, blockNumber, blockHash };
}
