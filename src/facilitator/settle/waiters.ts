// Who waits for which payment to end. An outcome decided in this process is announced and wakes at once; one that
// was decided elsewhere is found by looking at the row again every second.
import type { Store } from "../../storage/store.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { type FacilitatorPayment, findPayment } from "../payments.ts";

const LOOK_AGAIN_MS = 1000;

export interface SettlementWaiters {
  /** After the write that changed the payment is durable. */
  announce(key: PaymentKey): void;
  /** Lets go of whoever waits, now and from now on: the process is about to end, and they get what there is. */
  release(): void;
  /**
   * The payment once it is settled or failed, or as it is after `ms` or at the release; null when there is none.
   *
   * @throws Fault `unavailable` when the last look finds no database
   */
  wait(key: PaymentKey, ms: number): Promise<FacilitatorPayment | null>;
}

export function createSettlementWaiters(store: Store): SettlementWaiters {
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
    announce(key) {
      for (const wake of waiting.get(nameOf(key)) ?? []) wake();
    },
    release() {
      released = true;
      for (const listeners of waiting.values()) for (const wake of listeners) wake();
    },
    async wait(key, ms) {
      const until = performance.now() + ms;
      for (;;) {
        const left = until - performance.now();
        const isLast = () => left <= 0 || released;
        // Listening starts before looking, so that an outcome in between is not missed.
        const chance = nextChance(nameOf(key), Math.max(0, Math.min(left, LOOK_AGAIN_MS)));
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

  /** Undefined when the database is away, and there is time left to look again. */
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

function nameOf({ payer, nonce }: PaymentKey): string {
  return `${payer}:${nonce}`;
}
