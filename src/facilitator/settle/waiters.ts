// Requests that wait for a payment to end. An outcome decided in this process is announced and wakes them at once; one
// that was decided in another process is found by reading the row again every second.
import type { Store } from "../../storage/store.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { type FacilitatorPayment, findPayment, paymentName } from "../payments/payments.ts";

const LOOK_AGAIN_MS = 1000;

export type SettlementWaiters = ReturnType<typeof createSettlementWaiters>;

export function createSettlementWaiters(store: Store) {
  const waiting = new Map<string, Set<() => void>>();
  let released = false;

  /** Resolves at the next announcement, or after `ms`. */
  function nextChance(name: string, ms: number): { passed: Promise<void>; forget(): void } {
    const { promise, resolve } = Promise.withResolvers<void>();
    const listeners = waiting.get(name) ?? new Set();
    waiting.set(name, listeners.add(resolve));
    const timer = setTimeout(resolve, ms);
    function forget() {
      clearTimeout(timer);
      listeners.delete(resolve);
      if (listeners.size === 0) waiting.delete(name);
    }
    return { passed: promise, forget };
  }

  return {
    /** After the write that changed the payment is durable. */
    announce(key: PaymentKey): void {
      for (const wake of waiting.get(paymentName(key)) ?? []) wake();
    },
    /** Ends all waits, now and from now on, since the process is about to end: each gets the payment as it is. */
    release(): void {
      released = true;
      for (const listeners of waiting.values()) for (const wake of listeners) wake();
    },
    /**
     * The payment once it is settled or failed, or as it is after `ms` or at the release; null when there is none.
     *
     * @throws Fault `unavailable` when the last look finds no database
     */
    async wait(key: PaymentKey, ms: number): Promise<FacilitatorPayment | null> {
      const until = performance.now() + ms;
      for (;;) {
        const left = until - performance.now();
        const isLast = () => left <= 0 || released;
        // Listening starts before looking, so that an outcome in between is not missed.
        const chance = nextChance(paymentName(key), Math.max(0, Math.min(left, LOOK_AGAIN_MS)));
        try {
          const row = await look(key, isLast);
          if (row !== undefined && (isEnded(row) || isLast())) return row;
          await chance.passed;
        } finally {
          chance.forget();
        }
      }
    },
  };

  /** Undefined when the database is away and there is time left to look again. */
  async function look(key: PaymentKey, isLast: () => boolean) {
    try {
      return await findPayment(store.read, key);
    } catch (error) {
      if (isLast()) throw error;
      return undefined;
    }
  }
}

function isEnded(row: FacilitatorPayment | null): boolean {
  return row === null || row.status === "settled" || row.status === "failed";
}
