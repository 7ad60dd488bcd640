// Brings the pending nonces in line with the database, at the start and now and then: another process with the same keys
// may have stored transactions as well.
import type { Store } from "../../storage/store.ts";
import { CHAIN_ID } from "../../x402/kind.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { TOKEN_ADDRESS } from "../chain/token.ts";
import { openPayments } from "../payments/open-payments.ts";
import { claimedPayment, type FacilitatorPayment, findPayment, paymentName } from "../payments/payments.ts";
import type { PendingNonces } from "./pending.ts";
import { openHashes, type TransactionRow, transactionsOf, transactionsWith } from "./transactions.ts";

const FRESH_MS = 10_000;

export function createNonceSync(store: Store, pendingNonces: PendingNonces) {
  let loadedAt = Number.NEGATIVE_INFINITY;

  function take(row: TransactionRow, payment: FacilitatorPayment | null): void {
    if (pendingNonces.holds(row.hash)) return;
    const claimed = payment === null ? null : claimedPayment(payment);
    const pendingNonce = pendingNonces.add(row, claimed, payment?.status ?? "failed");
    if (payment?.status !== "settled" || payment.transaction_hash !== row.hash) return;
    const { block_number: blockNumber, block_hash: blockHash } = payment;
    if (blockNumber !== null && blockHash !== null)
      pendingNonce.inclusion = { hash: row.hash, succeeded: true, gasWei: 0n, blockNumber, blockHash };
  }

  /** Takes in what is open in the database and not known yet. */
  async function load(): Promise<void> {
    const unknown = (await openHashes(store.read)).filter((hash) => !pendingNonces.holds(hash));
    for (const row of await transactionsWith(store.read, unknown)) {
      const key = keyOf(row);
      take(row, key === null ? null : await findPayment(store.read, key));
    }
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

/** Null for a transaction that makes no payment. */
function keyOf({ payer, nonce }: TransactionRow): PaymentKey | null {
  if (payer === null || nonce === null) return null;
  return { chain_id: CHAIN_ID, token: TOKEN_ADDRESS, payer, nonce };
}
