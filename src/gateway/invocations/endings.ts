// Who waits for which call to end (`Prefer: wait`). An end in this process is announced and wakes at once; one
// on another replica is found by looking again every second.
import { isEnded } from "../../core/states.ts";
import type { InvocationRow } from "./service.ts";

const LOOK_AGAIN_MS = 1000;

export interface Endings {
  announce(id: string): void;
  /** Lets go of whoever waits, now and from now on: the process is about to end, and they get what there is. */
  release(): void;
  /**
   * The invocation as `look` gives it once it has ended, or as it is after `seconds`, when `signal` aborts or at
   * the release.
   */
  wait(
    id: string,
    seconds: number,
    signal: AbortSignal,
    look: () => Promise<InvocationRow>,
  ): Promise<InvocationRow>;
}

export function createEndings(): Endings {
  const waiting = new Map<string, Set<() => void>>();
  let released = false;

  /** Resolves at the next announcement, or after `ms`. */
  function nextChance(
    id: string,
    ms: number,
    signal: AbortSignal,
  ): { passed: Promise<void>; forget(): void } {
    const { promise, resolve } = Promise.withResolvers<void>();
    const wake = () => resolve();
    const listeners = waiting.get(id) ?? new Set();
    waiting.set(id, listeners.add(wake));
    const timer = setTimeout(wake, ms);
    signal.addEventListener("abort", wake);
    function forget() {
      clearTimeout(timer);
      signal.removeEventListener("abort", wake);
      listeners.delete(wake);
      if (listeners.size === 0) waiting.delete(id);
    }
    return { passed: promise, forget };
  }

  return {
    announce(id) {
      for (const wake of waiting.get(id) ?? []) wake();
    },
    release() {
      released = true;
      for (const listeners of waiting.values()) for (const wake of listeners) wake();
    },
    async wait(id, seconds, signal, look) {
      const until = performance.now() + seconds * 1000;
      for (;;) {
        const left = until - performance.now();
        // Listening starts before looking, so that an end in between is not missed.
        const chance = nextChance(id, Math.max(0, Math.min(left, LOOK_AGAIN_MS)), signal);
        try {
          const row = await look();
          if (isEnded(row.status) || left <= 0 || signal.aborted || released) return row;
          await chance.passed;
        } finally {
          chance.forget();
        }
      }
    },
  };
}
