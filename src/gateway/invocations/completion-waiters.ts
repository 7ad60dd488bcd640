// Callers that wait for a call to end (`Prefer: wait`). An end in this process wakes them at once. An end on another
// replica is found by one query every second for all of them.

import { Fault } from "../../core/fault.ts";
import { isEnded } from "../../core/states.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairShare } from "../../kernel/share.ts";
import { inTurns } from "../../kernel/turns.ts";
import { createEndWaiters, unlessAborted, withDeadline } from "../../kernel/wait.ts";
import type { InvocationKey, InvocationRow } from "./service.ts";

/** @param endedAmong those of these calls that have ended */
export function createCompletionWaiters(endedAmong: (keys: readonly InvocationKey[]) => Promise<readonly string[]>) {
  const places = createFairShare({ size: MAX.waitingCallers });
  const waiters = createEndWaiters<InvocationKey>({
    nameOf: ({ id }) => id,
    lookAgainMs: 1000,
    endedAmong,
    // Thousands may wait for one call, and each reads it again when woken, so they take turns.
    wake: ({ tenant }, goOn) =>
      inTurns(() => {
        goOn();
        return false;
      }, tenant),
  });
  const releasing = new AbortController();
  const released = releasing.signal;

  /** From the release on not for long, however long it has taken by then: the store may be what is stuck. */
  function inTime(reading: Promise<InvocationRow>): Promise<InvocationRow> {
    return unlessAborted(released, reading).catch((error) => {
      if (!released.aborted) throw error;
      return withDeadline(1000, reading, () => new Fault("unavailable", "the gateway is stopping"));
    });
  }

  return {
    announce: waiters.announce,
    /** Answers all waiting callers with what is known, now and from now on, since the process is about to end. */
    release() {
      releasing.abort();
      waiters.release();
    },
    /**
     * The invocation, read by `read`, once it has ended; or as it is after `seconds`, when `signal` aborts, or at the
     * release. At once if too many callers of the tenant wait already.
     *
     * @throws Fault `unavailable` when nothing is known of it at the release; what `read` throws
     */
    async wait(
      key: InvocationKey,
      seconds: number,
      signal: AbortSignal,
      read: () => Promise<InvocationRow>,
    ): Promise<InvocationRow> {
      if (places.take(key.tenant) !== null) return read();
      let known: InvocationRow | null = null;
      async function look(): Promise<InvocationRow> {
        const last = known;
        try {
          // At the release too, since the call may have ended with the process's last work.
          known = await inTime(read());
          return known;
        } catch (error) {
          if (released.aborted && last !== null) return last;
          throw error;
        }
      }
      try {
        return await waiters.wait({
          key,
          ms: seconds * 1000,
          signal,
          look,
          isEnded: ({ status }: InvocationRow) => isEnded(status),
        });
      } finally {
        places.giveBack(key.tenant);
      }
    },
  };
}

export type CompletionWaiters = ReturnType<typeof createCompletionWaiters>;
