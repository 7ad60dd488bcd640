// Requests that wait for a payment to end. An outcome decided in this process is announced and wakes them at once. One
// that was decided in another process is found by looking: one query now and then for all of them.
import type { Store } from "../../storage/store.ts";
import type { PaymentKey } from "../../x402/types.ts";
import { openAmong } from "../payments/open-payments.ts";
import { type FacilitatorPayment, findPayment, paymentName } from "../payments/payments.ts";

/** Other processes work for wallets only on a database that can be shared. A look is for lost answers elsewhere. */
const LOOK_AGAIN_MS = { postgres: 250, sqlite: 1000 };

export type SettlementWaiters = ReturnType<typeof createSettlementWaiters>;

interface Listeners {
  readonly key: PaymentKey;
  readonly wakes: Set<() => void>;
}

export function createSettlementWaiters(store: Store) {
  const waiting = new Map<string, Listeners>();
  let released = false;
  let isLooking = false;

  function announce(key: PaymentKey): void {
    for (const wake of waiting.get(paymentName(key))?.wakes ?? []) wake();
  }

  /** Wakes those whose payment has ended, or is gone. */
  async function lookForAll(): Promise<void> {
    const all = [...waiting.values()].map(({ key }) => key);
    const open = await openAmong(store.read, all);
    for (const key of all) if (!open.has(paymentName(key))) announce(key);
  }

  function scheduleLook(): void {
    if (isLooking || waiting.size === 0) return;
    isLooking = true;
    setTimeout(async () => {
      // If the store is away, the next look asks again.
      await lookForAll().catch(() => {});
      isLooking = false;
      scheduleLook();
    }, LOOK_AGAIN_MS[store.dialect]).unref();
  }

  /** Resolves at the next announcement, or after `ms`. */
  function nextChance(key: PaymentKey, ms: number): { passed: Promise<void>; forget(): void } {
    const name = paymentName(key);
    const { promise, resolve } = Promise.withResolvers<void>();
    const listeners = waiting.get(name) ?? { key, wakes: new Set() };
    waiting.set(name, listeners);
    listeners.wakes.add(resolve);
    const timer = setTimeout(resolve, ms);
    function forget() {
      clearTimeout(timer);
      listeners.wakes.delete(resolve);
      if (listeners.wakes.size === 0) waiting.delete(name);
    }
    return { passed: promise, forget };
  }

  return {
    /** After the write that changed the payment is durable. */
    announce,
    /** Ends all waits, now and from now on, since the process is about to end: each gets the payment as it is. */
    release(): void {
      released = true;
      for (const { wakes } of waiting.values()) for (const wake of wakes) wake();
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
        const chance = nextChance(key, Math.max(0, left));
        scheduleLook();
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
