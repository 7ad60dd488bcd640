// The open work of the wallets, in memory: the pending nonces (wallet nonces not certainly used yet, each with all transactions
// signed for it) and the payments that depend on them; several payments may share a nonce. This is a copy of rows in the
// database, reloaded once it is ten seconds old, since another process with the wallets' keys may store transactions too.
import type { Chain } from "../../chain/chain.ts";
import type { Receipt } from "../../chain/json-rpc.ts";
import type { CollectionStatus } from "../../core/states.ts";
import type { StoreTools, Tx } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { keyOf } from "../../x402/verify.ts";
import type { ClaimedPayment, FacilitatorPayment } from "../payments/payments.ts";
import { claimedPayment, paymentName, sentPayments, storedPayment } from "../payments/payments.ts";
import type { WalletLeases } from "./leases.ts";
import type { OpenTransaction, TransactionRow } from "./transactions.ts";
import { openTransactions, pays, sharedParts, transactionsOf, transactionsWith } from "./transactions.ts";
import type { WalletLimits } from "./wallet.ts";

/** The transaction and the block that used a wallet's nonce. */
export interface UsedNonce extends Pick<Receipt, "succeeded" | "gasWei" | "blockNumber" | "blockHash"> {
  /** Null when the transaction is not ours. */
  readonly hash: Hex | null;
  /** The payments whose money the transaction moved, by its events. */
  readonly paid: ReadonlySet<PendingPayment>;
}

export interface PendingNonce {
  readonly wallet: Hex;
  readonly nonce: number;
  /** In order of replacement, newest last. */
  readonly transactions: [TransactionRow, ...TransactionRow[]];
  /** The payments of all its transactions; empty for a filled gap. A replacement may make fewer payments than the first. */
  readonly payments: Set<PendingPayment>;
  inclusion: UsedNonce | null;
  /** When the newest transaction is due for broadcast (performance.now), and how often it was broadcast. */
  broadcastAt: number;
  broadcasts: number;
  /** Consecutive checks that found the nonce used, but no receipt of ours. */
  looksInVain: number;
}

export interface PendingPayment extends ClaimedPayment {
  status: CollectionStatus;
  readonly pendingNonces: Set<PendingNonce>;
  /** A transaction with another wallet nonce is on its way to the store. */
  moving: boolean;
  /** Searches so far for the transaction that used the authorization. */
  lookUps: number;
  /** The block height before which nobody can have used the authorization. */
  readonly sinceBlock: number;
}

/** How far ahead of the chain's count a nonce may be. A node's wrong count can lead to one further ahead; nothing waits for it. */
export const REACH = 4096;

export type PendingNonces = ReturnType<typeof createPendingNonces>;

/** The dependencies that all parts of the wallets share. */
export interface WalletParts extends StoreTools {
  readonly chain: Chain;
  readonly leases: WalletLeases;
  readonly pendingNonces: PendingNonces;
  readonly limits: WalletLimits;
  /** Tells the watcher that there is something to broadcast or to watch. */
  wake(): void;
  /** Has the watcher check the chain again soon, even without a new block. */
  lookAgain(): void;
  /** Marks the pending nonces as stale, so that the watcher's next round reloads them. */
  reload(): void;
  /** Discards the wallet's known next nonce, so that chain and store are asked for it. */
  resynchronise(wallet: Hex): void;
}

/** Whether memory knows every open transaction of the payment, save one being stored: an unknown one may still collect it. */
export async function areAllKnown(tx: Tx, key: PaymentKey, { of }: Pick<PendingNonces, "of">, storing?: Hex) {
  const rows = await transactionsOf(tx, key);
  return rows.every((row) => row.hash === storing || !row.open || of(row.wallet, row.wallet_nonce) !== undefined);
}

export const newestOf = (pendingNonce: PendingNonce): TransactionRow =>
  pendingNonce.transactions.at(-1) ?? pendingNonce.transactions[0];

/**
 * Whether the nonce's newest transaction would make a payment that has ended. Such a transaction must not land, even after a
 * reorganisation: a replacement that makes only the open payments, or none, uses up the nonce.
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
  const nonceKey = (wallet: Hex, nonce: number) => `${wallet}:${nonce}`;

  function paymentOf(claimed: ClaimedPayment, status: CollectionStatus, sinceBlock: number): PendingPayment {
    return payments.getOrInsertComputed(paymentName(claimed.key), () => {
      const fresh = { pendingNonces: new Set<PendingNonce>(), moving: false, lookUps: 0 };
      return { ...claimed, ...fresh, status, sinceBlock };
    });
  }

  /** The nonce below which the wallet's nonces can soon be next in line. */
  const reach = (wallet: Hex): number => (counts.get(wallet) ?? Number.MAX_SAFE_INTEGER - REACH) + REACH;

  /** Whether no known block includes the nonce, which can soon be next in line. */
  const isOpen = ({ wallet, nonce, inclusion }: PendingNonce) => inclusion === null && nonce < reach(wallet);

  /** Removes the payment if it has ended and has no pending nonce any more. */
  function forget(payment: PendingPayment): void {
    if (payment.pendingNonces.size === 0 && payment.status !== "sent") payments.delete(paymentName(payment.key));
  }

  function remove(pendingNonce: PendingNonce): void {
    pendingNonces.delete(nonceKey(pendingNonce.wallet, pendingNonce.nonce));
    for (const { hash } of pendingNonce.transactions) hashes.delete(hash);
    for (const payment of pendingNonce.payments) {
      payment.pendingNonces.delete(pendingNonce);
      forget(payment);
    }
  }

  return {
    all: (): IteratorObject<PendingNonce> => pendingNonces.values(),
    payments: (): IteratorObject<PendingPayment> => payments.values(),
    of: (wallet: Hex, nonce: number): PendingNonce | undefined => pendingNonces.get(nonceKey(wallet, nonce)),
    /** The wallet's pending nonces that no known block includes, in order of nonce. */
    waiting: (wallet: Hex): PendingNonce[] =>
      [...pendingNonces.values()]
        .filter((pendingNonce) => pendingNonce.wallet === wallet && pendingNonce.inclusion === null)
        .sort((a, b) => a.nonce - b.nonce),
    wallets: (): Set<Hex> => new Set([...pendingNonces.values()].map(({ wallet }) => wallet)),
    /** How many payments of the wallet wait at nonces within reach; a nonce without payments counts as one. */
    load(wallet: Hex): number {
      let load = 0;
      for (const each of pendingNonces.values())
        if (each.wallet === wallet && isOpen(each)) load += Math.max(1, each.payments.size);
      return load;
    },
    reach,
    /** Notes the chain's transaction count of the wallet: the nonces below it are used. */
    advance: (wallet: Hex, count: number): void => void counts.set(wallet, count),
    isOpen,
    /** Adds a stored transaction with the payments that it makes, due for broadcast at once. */
    add(row: TransactionRow, known: readonly (ClaimedPayment & Pick<PendingPayment, "status">)[]): PendingNonce {
      const name = nonceKey(row.wallet, row.wallet_nonce);
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
    /** Adds a payment that has no open transaction. */
    adopt: (row: FacilitatorPayment, sinceBlock: number): PendingPayment =>
      paymentOf(claimedPayment(row), row.status, sinceBlock),
    holds: (hash: Hex): boolean => hashes.has(hash),
    knows: (payment: Pick<PaymentKey, "payer" | "nonce">): boolean => payments.has(paymentName(payment)),
    remove,
    forget,
    /**
     * Removes the nonces of wallets that are not kept, and the payments without a remaining nonce. A nonce of another wallet
     * stays while one of its payments also depends on a kept wallet, because both nonces decide that payment's outcome.
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

export function createNonceSync(parts: Pick<WalletParts, "chain" | "store" | "pendingNonces" | "leases">) {
  const { chain, store, pendingNonces, leases } = parts;
  let loadedAt = Number.NEGATIVE_INFINITY;

  async function addRow(row: TransactionRow): Promise<void> {
    const keys = row.payments.map(({ payer, nonce }) => keyOf(chain.network, { from: payer, nonce }));
    const stored = await Promise.all(keys.map((key) => storedPayment(store.read, key)));
    if (pendingNonces.holds(row.hash)) return;
    const found = stored.filter((payment) => payment !== null);
    const known = found.map((payment) => ({ ...claimedPayment(payment), status: payment.status }));
    const pendingNonce = pendingNonces.add(row, known);
    const used = recordedUse(row, found, pendingNonce.payments);
    if (used !== null) pendingNonce.inclusion = used;
  }

  async function addRows(hashes: readonly Hex[]): Promise<void> {
    for (const row of await transactionsWith(store.read, hashes)) await addRow(row);
  }

  /** Adds sent payments without an open transaction, where this process holds the wallet of the first transaction. */
  async function adopt(): Promise<void> {
    for (const { payment, wallet } of await sentPayments(store.read)) {
      if (pendingNonces.knows(payment) || (wallet !== null && !leases.holds(wallet))) continue;
      const blocks = (await transactionsOf(store.read, payment)).map((row) => row.stored_at_block);
      pendingNonces.adopt(payment, blocks.length === 0 ? 0 : Math.min(...blocks));
    }
  }

  /** Other wallets' transactions that make payments known here: all transactions of a payment decide its outcome. */
  async function shared(others: readonly OpenTransaction[]): Promise<Hex[]> {
    const multiple = others.filter(({ payer }) => payer === null).map(({ hash }) => hash);
    const known = [...others, ...(await sharedParts(store.read, multiple))].filter(
      ({ payer, nonce }) => payer !== null && nonce !== null && pendingNonces.knows({ payer, nonce }),
    );
    return [...new Set(known.map(({ hash }) => hash))];
  }

  /** Adds the open transactions and payments in the database that concern this process and are not known yet. */
  async function load(): Promise<void> {
    const unknown = (await openTransactions(store.read)).filter(({ hash }) => !pendingNonces.holds(hash));
    const { own = [], others = [] } = Object.groupBy(unknown, ({ wallet }) =>
      leases.holds(wallet) ? "own" : "others",
    );
    await addRows(own.map(({ hash }) => hash));
    await adopt();
    await addRows(await shared(others));
    loadedAt = performance.now();
  }

  return {
    load,
    /** Loads the pending nonces, unless they were loaded within the last ten seconds. */
    async refresh(): Promise<void> {
      if (performance.now() - loadedAt >= FRESH_MS) await load();
    },
    invalidate(): void {
      loadedAt = Number.NEGATIVE_INFINITY;
    },
  };
}

/** The use of the nonce by this transaction, as its payments' records show it; null when none of them settled by it. */
function recordedUse({ hash }: TransactionRow, found: readonly FacilitatorPayment[], payments: Set<PendingPayment>) {
  const settled = found.filter(({ status, transaction_hash }) => status === "settled" && transaction_hash === hash);
  const { block_number: blockNumber = null, block_hash: blockHash = null } = settled[0] ?? {};
  if (blockNumber === null || blockHash === null) return null;
  const names = new Set(settled.map(paymentName));
  const paid = new Set([...payments].filter(({ key }) => names.has(paymentName(key))));
  return { hash, succeeded: true, paid, gasWei: 0n, blockNumber, blockHash };
}
