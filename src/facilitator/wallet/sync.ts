// Brings the pending nonces in line with the database: at the start, when a wallet is taken over, and now and then, since
// another process with the same keys may have stored transactions as well.

import { TOKEN_ADDRESS } from "../../chain/token.ts";
import type { Store } from "../../storage/store.ts";
import { CHAIN_ID } from "../../x402/kind.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import {
  claimedPayment,
  type FacilitatorPayment,
  findPayment,
  paymentName,
  sentPayments,
} from "../payments/payments.ts";
import type { WalletLeases } from "./leases.ts";
import type { PendingNonces, PendingPayment, UsedNonce } from "./pending.ts";
import {
  type OpenTransaction,
  openTransactions,
  type PaymentPart,
  partsOf,
  type TransactionRow,
  transactionsOf,
  transactionsWith,
} from "./transactions.ts";

const FRESH_MS = 10_000;

interface NonceSyncOptions {
  readonly store: Store;
  readonly pendingNonces: PendingNonces;
  readonly leases: Pick<WalletLeases, "holds">;
}

export type NonceSync = ReturnType<typeof createNonceSync>;

export function createNonceSync({ store, pendingNonces, leases }: NonceSyncOptions) {
  let loadedAt = Number.NEGATIVE_INFINITY;

  function take(row: TransactionRow, found: readonly FacilitatorPayment[]): void {
    if (pendingNonces.holds(row.hash)) return;
    const pendingNonce = pendingNonces.add(
      row,
      found.map((payment) => ({ ...claimedPayment(payment), status: payment.status })),
    );
    const used = recordedUse(row, found, pendingNonce.payments);
    if (used !== null) pendingNonce.inclusion = used;
  }

  async function paymentsOf({ payments }: TransactionRow): Promise<FacilitatorPayment[]> {
    const found = await Promise.all(payments.map((part) => findPayment(store.read, keyOf(part))));
    return found.filter((payment) => payment !== null);
  }

  async function takeAll(hashes: readonly Hex[]): Promise<void> {
    for (const row of await transactionsWith(store.read, hashes)) take(row, await paymentsOf(row));
  }

  const namesKnown = () => new Set([...pendingNonces.payments()].map(({ key }) => paymentName(key)));

  /** Sent payments of which no transaction is open: those whose first one is by a wallet that this process works for. */
  async function adopt(): Promise<void> {
    const known = namesKnown();
    for (const { payment, wallet } of await sentPayments(store.read)) {
      if (known.has(paymentName(payment)) || (wallet !== null && !leases.holds(wallet))) continue;
      const blocks = (await transactionsOf(store.read, payment)).map((row) => row.stored_at_block);
      pendingNonces.adopt(payment, blocks.length === 0 ? 0 : Math.min(...blocks));
    }
  }

  /** Those of other wallets that make payments which are known here: all of them decide what becomes of a payment. */
  async function shared(others: readonly OpenTransaction[]): Promise<Hex[]> {
    if (others.length === 0) return [];
    const known = namesKnown();
    const parts = await partsOf(
      store.read,
      others.filter(({ payer }) => payer === null).map(({ hash }) => hash),
    );
    const all = [...others, ...parts];
    const isKnown = ({ payer, nonce }: (typeof all)[number]) =>
      payer !== null && nonce !== null && known.has(paymentName({ payer, nonce }));
    return [...new Set(all.filter(isKnown).map(({ hash }) => hash))];
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
    /** The database holds something that is not known here, so the next refresh reads it. */
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

function keyOf({ payer, nonce }: PaymentPart): PaymentKey {
  return { chain_id: CHAIN_ID, token: TOKEN_ADDRESS, payer, nonce };
}
