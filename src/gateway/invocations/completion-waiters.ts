// Callers that wait for a call to end (`Prefer: wait`). An end in this process wakes them at once. An end on another
// replica is found by one query every second for all of them.
import { withDeadline } from "../../concurrency/deadline.ts";
import { createFairShare } from "../../concurrency/fair-share.ts";
import { inTurns } from "../../concurrency/turns.ts";
import { isEnded } from "../../core/states.ts";
import type { InvocationKey, InvocationRow } from "./service.ts";

const LOOK_AGAIN_MS = 1000;
const LAST_LOOK_MS = 1000;
/** IDs in one query. */
const LOOKED_FOR_MAX = 500;
/** Beyond this a caller is answered at once: `wait` is only a preference (RFC 7240, section 4.3). */
const WAITING_MAX = 8192;

interface Listeners {
  readonly key: InvocationKey;
  readonly wakes: Set<() => void>;
}

/** @param endedAmong those of these calls that have ended */
export function createCompletionWaiters(endedAmong: (keys: readonly InvocationKey[]) => Promise<readonly string[]>) {
  const places = createFairShare({ size: WAITING_MAX });
  const waiting = new Map<string, Listeners>();
  let released = false;
  let isLooking = false;

  function announce(id: string): void {
    for (const wake of waiting.get(id)?.wakes ?? []) wake();
  }

  async function lookAgain(): Promise<void> {
    const keys = [...waiting.values()].map(({ key }) => key);
    for (let at = 0; at < keys.length; at += LOOKED_FOR_MAX) {
      for (const id of await endedAmong(keys.slice(at, at + LOOKED_FOR_MAX))) announce(id);
    }
  }

  function scheduleLook(): void {
    if (isLooking || waiting.size === 0) return;
    isLooking = true;
    const timer = setTimeout(async () => {
      // If the store is away, the next round asks again.
      await lookAgain().catch(() => {});
      isLooking = false;
      scheduleLook();
    }, LOOK_AGAIN_MS);
    timer.unref();
  }

  /** Resolves when the end is announced, or after `ms`. */
  function chanceOf(key: InvocationKey, ms: number, signal: AbortSignal): { passed: Promise<void>; forget(): void } {
    const { promise, resolve } = Promise.withResolvers<void>();
    // Thousands may wait for one call, and each reads it again when woken, so they take turns.
    const wake = () =>
      inTurns(() => {
        resolve();
        return false;
      }, key.tenant);
    const listeners = waiting.get(key.id) ?? { key, wakes: new Set() };
    waiting.set(key.id, listeners);
    listeners.wakes.add(wake);
    const timer = setTimeout(wake, ms);
    signal.addEventListener("abort", wake);
    function forget() {
      clearTimeout(timer);
      signal.removeEventListener("abort", wake);
      listeners.wakes.delete(wake);
      if (listeners.wakes.size === 0) waiting.delete(key.id);
    }
    return { passed: promise, forget };
  }

  return {
    announce,
    /** Answers all waiting callers with what is known, now and from now on, since the process is about to end. */
    release() {
      released = true;
      for (const { wakes } of waiting.values()) for (const wake of wakes) wake();
    },
    /**
     * The invocation, read by `look`, once it has ended; or as it is after `seconds`, when `signal` aborts, or at the
     * release. At once if too many callers of the tenant wait already.
     */
    async wait(
      key: InvocationKey,
      seconds: number,
      signal: AbortSignal,
      look: () => Promise<InvocationRow>,
    ): Promise<InvocationRow> {
      if (places.take(key.tenant) !== null) return look();
      const until = performance.now() + seconds * 1000;
      try {
        for (;;) {
          const left = until - performance.now();
          // Listening starts before looking, so that an end in between is not missed.
          const chance = chanceOf(key, Math.max(0, left), signal);
          scheduleLook();
          try {
            const row = await look();
            if (isEnded(row.status) || left <= 0 || signal.aborted || released) return row;
            await chance.passed;
            // The call may have ended with the process's last work. But the store may be what is stuck.
            if (released) return await withDeadline(LAST_LOOK_MS, look(), () => null).catch(() => row);
          } finally {
            chance.forget();
          }
        }
      } finally {
        places.giveBack(key.tenant);
      }
    },
  };
}

export type CompletionWaiters = ReturnType<typeof createCompletionWaiters>;
