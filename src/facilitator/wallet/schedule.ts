// When the watcher has work: transactions were stored, or the chain is to be looked at again. Sender and broadcaster
// note it here and the watcher reads it, so neither of them has to know the watcher, which calls both.
import type { Log } from "../../core/log.ts";

/** After a failed step, or an answer of a node, the chain is looked at again although there is no new block. */
const LOOK_AGAIN_MS = 1000;

export type WatchSchedule = ReturnType<typeof createWatchSchedule>;

export function createWatchSchedule(log: Log) {
  /** When the chain is looked at although there is no new block (performance.now). */
  let lookAt = Number.POSITIVE_INFINITY;
  let listener = () => {};
  let stopped = false;

  /** The chain is to be looked at soon, even if there is no new block. */
  function lookAgain(): void {
    lookAt = Math.min(lookAt, performance.now() + LOOK_AGAIN_MS);
  }

  return {
    lookAgain,
    isLookDue: (): boolean => performance.now() >= lookAt,
    /** A look begins: what asked for one before is met by it. */
    looking(): void {
      lookAt = Number.POSITIVE_INFINITY;
    },
    /** There is something to broadcast, or to watch. */
    wake(): void {
      if (!stopped) listener();
    },
    onWake(listen: () => void): void {
      listener = listen;
    },
    /** Runs a step whose failure must not hold up the others. Never rejects. */
    async attempt(step: string, work: () => Promise<void>): Promise<void> {
      if (stopped) return;
      try {
        await work();
      } catch (error) {
        log.debug("chain_watcher_failed", { step, error });
        lookAgain();
      }
    },
    isStopped: (): boolean => stopped,
    /** No step is begun any more. */
    stop(): void {
      stopped = true;
    },
  };
}
