// Requests that wait for a payment to end. An outcome decided in this process is announced and wakes them at once. One
// that was decided in another process is found by looking: one query now and then for all of them.
import { createEndWaiters } from "../../kernel/wait.ts";
import type { Store } from "../../storage/store.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { type FacilitatorPayment, openAmong, paymentName, readPayment } from "../payments/payments.ts";

/** Other processes work for wallets only on a database that can be shared. A look is for lost answers elsewhere. */
const LOOK_AGAIN_MS = { shared: 250, alone: 1000 };

export type SettlementWaiters = ReturnType<typeof createSettlementWaiters>;

export function createSettlementWaiters(store: Store) {
  const waiters = createEndWaiters<PaymentKey>({
    nameOf: paymentName,
    lookAgainMs: LOOK_AGAIN_MS[store.isShared ? "shared" : "alone"],
    async endedAmong(keys) {
      const open = await openAmong(store.read, keys);
      return keys.map(paymentName).filter((name) => !open.has(name));
    },
  });

  return {
    /** After the write that changed the payment is durable. */
    announce: (key: PaymentKey): void => waiters.announce(paymentName(key)),
    /** Ends all waits, now and from now on, since the process is about to end: each gets the payment as it is. */
    release: waiters.release,
    /**
     * The payment once it is settled or failed, or as it is after `ms` or at the release; null when there is none.
     *
     * @throws Fault `unavailable` when the last look finds no database
     */
    wait: (key: PaymentKey, ms: number): Promise<FacilitatorPayment | null> =>
      waiters.wait({ key, ms, look: (isLast) => look(key, isLast), isEnded }),
  };

  /** Undefined when the database is away and there is time left to look again. */
  async function look(key: PaymentKey, isLast: () => boolean): Promise<FacilitatorPayment | null | undefined> {
    try {
      return await readPayment(store.read, key);
    } catch (error) {
      if (isLast()) throw error;
      return undefined;
    }
  }
}

function isEnded(row: FacilitatorPayment | null): boolean {
  return row === null || row.status === "settled" || row.status === "failed";
}
