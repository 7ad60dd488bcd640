// Who waits for which call to end (`Prefer: wait`). An end in this process is announced and wakes at once; one on
// another replica is found by looking again every second, for all who wait together.
import { createFairShare } from "../../concurrency/fair-share.ts";
import { inTurns } from "../../concurrency/turns.ts";
import { isEnded } from "../../core/states.ts";
import type { InvocationKey, InvocationRow } from "./service.ts";

const LOOK_AGAIN_MS = 1000;
/** IDs of one question. */
const LOOKED_FOR_MAX = 500;
/** Who finds no place gets its answer at once: to wait is a preference (RFC 7240, section 4.3). */
const WAITING_MAX = 8192;

export interface CompletionWaiters {
  announce(id: string): void;
  /** Lets go of whoever waits, now and from now on: the process is about to end, and they get what there is. */
  release(): void;
  /**
   * The invocation as `look` gives it once it has ended, or as it is after `seconds`, when `signal` aborts, at the
   * release, or at once where so many of the tenant's wait already.
   */
  wait(
    key: InvocationKey,
    seconds: number,
    signal: AbortSignal,
    look: () => Promise<InvocationRow>,
  ): Promise<InvocationRow>;
}

interface Listeners {
  readonly key: InvocationKey;
  readonly wakes: Set<() => void>;
}

/** @param endedAmong those of these calls that have ended */
export function createCompletionWaiters(
  endedAmong: (keys: readonly InvocationKey[]) => Promise<readonly string[]>,
): CompletionWaiters {
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
      // A store that is away is asked again.
      await lookAgain().catch(() => {});
      isLooking = false;
      scheduleLook();
    }, LOOK_AGAIN_MS);
    timer.unref();
  }

  /** Resolves when the end is announced, or after `ms`. */
  function chanceOf(
    key: InvocationKey,
    ms: number,
    signal: AbortSignal,
  ): { passed: Promise<void>; forget(): void } {
    const { promise, resolve } = Promise.withResolvers<void>();
    // Of one call thousands may wait, and each reads it again: so each in its turn, by whatever it is woken.
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
    release() {
      released = true;
      for (const { wakes } of waiting.values()) for (const wake of wakes) wake();
    },
    async wait(key, seconds, signal, look) {
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
            // The store may be what everything waits for.
            if (released) return row;
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
