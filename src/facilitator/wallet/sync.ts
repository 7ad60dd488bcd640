// Brings the pending nonces in line with the database, at the start and now and then: another process with the same keys
// may have stored transactions as well.
import type { Store } from "../../storage/store.ts";
import { CHAIN_ID } from "../../x402/kind.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { TOKEN_ADDRESS } from "../chain/token.ts";
import { openPayments } from "../payments/open-payments.ts";
import { claimedPayment, type FacilitatorPayment, findPayment, paymentName } from "../payments/payments.ts";
import type { PendingNonces, PendingPayment, UsedNonce } from "./pending.ts";
import { openHashes, type PaymentPart, type TransactionRow, transactionsOf, transactionsWith } from "./transactions.ts";

const FRESH_MS = 10_000;

export function createNonceSync(store: Store, pendingNonces: PendingNonces) {
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

  /** Takes in what is open in the database and not known yet. */
  async function load(): Promise<void> {
    const unknown = (await openHashes(store.read)).filter((hash) => !pendingNonces.holds(hash));
    for (const row of await transactionsWith(store.read, unknown)) take(row, await paymentsOf(row));
    const known = new Set([...pendingNonces.payments()].map(({ key }) => paymentName(key)));
    for (const payment of await openPayments(store.read)) {
      if (payment.status !== "sent" || known.has(paymentName(payment))) continue;
      const blocks = (await transactionsOf(store.read, payment)).map((row) => row.stored_at_block);
      pendingNonces.adopt(payment, blocks.length === 0 ? 0 : Math.min(...blocks));
    }
    loadedAt = performance.now();
  }

  return {
    load,
    /** The same, unless it was done lately. */
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
