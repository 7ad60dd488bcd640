// Whose signature a payment carries, for many callers. Judging one takes 0.7 ms of a core. A tenant's only one is judged
// on the main thread, one such per turn, so it waits behind nobody's many. The others are judged by a worker, one of each
// tenant in turn; while there is none, because few wait, or it starts, or has died, the main thread judges them in its turns.

import { Fault } from "../../core/fault.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairShare, createRoundRobin } from "../../kernel/share.ts";
import { inTurns } from "../../kernel/turns.ts";
import { checkSignature, type SignedBy } from "../verify.ts";
import { createVerifierThread, type SignedAuthorization, type ThreadOptions } from "./thread.ts";

/** With no more than these the main thread is done before a worker has started. */
const FEW = 4;
/** Per message, about 6 ms of the worker. */
const BATCH = 8;
/** What the main thread judges of the queue takes its turns as one tenant's work does. */
const TURN = "signatures of payments";

interface Waiting extends SignedAuthorization, PromiseWithResolvers<SignedBy> {
  readonly owner: string;
}

export interface VerifierOptions extends ThreadOptions {
  readonly waitingMax?: number;
}

export type Verifier = ReturnType<typeof createVerifier>;

export function createVerifier({ waitingMax = MAX.verifications, ...options }: VerifierOptions) {
  const places = createFairShare({ size: waitingMax });
  const queue = createRoundRobin<Waiting>();
  let isTurnDue = false;
  let isOnlyOneDue = false;
  const thread = createVerifierThread<readonly Waiting[]>(options, {
    ready: handOver,
    answered(batch, answers) {
      // First, so that the worker has its next batch while callers go on here.
      handOver();
      for (const [at, waiting] of batch.entries()) {
        const answer = answers[at] ?? null;
        if (answer === null) judgeHere(waiting);
        else waiting.resolve(answer);
      }
    },
    lost(batches) {
      for (const waiting of batches.flat()) queue.add(waiting.owner, waiting);
      goOn();
    },
  });

  function judgeHere(waiting: Waiting): void {
    try {
      waiting.resolve(checkSignature(waiting));
    } catch (error) {
      waiting.reject(error);
    }
  }

  function handOver(): void {
    while (thread.hasRoom() && queue.size > 0) {
      const batch = Array.from({ length: Math.min(BATCH, queue.size) }, () => queue.next());
      thread.judge(batch.flatMap((next) => (next === undefined ? [] : [next.item])));
    }
  }

  function goOn(): void {
    if (isTurnDue || queue.size === 0) return;
    isTurnDue = true;
    inTurns(turn, TURN);
  }

  /** Returns whether the main thread has more to do. */
  function turn(): boolean {
    if (thread.isReady()) handOver();
    else {
      const next = queue.next();
      if (next !== undefined) judgeHere(next.item);
    }
    isTurnDue = queue.size > 0 && !thread.isReady();
    return isTurnDue;
  }

  function wait(waiting: Waiting): void {
    if (places.heldBy(waiting.owner) === 1 && !isOnlyOneDue) {
      isOnlyOneDue = true;
      inTurns(() => {
        isOnlyOneDue = false;
        judgeHere(waiting);
        return false;
      }, waiting.owner);
      return;
    }
    queue.add(waiting.owner, waiting);
    if (queue.size > FEW) thread.start();
    goOn();
  }

  return {
    /**
     * Judges as checkSignature does.
     *
     * @param owner the tenant or account that waits for it
     * @throws Fault `unavailable` when too many wait
     */
    async signedBy(owner: string, { authorization, signature }: SignedAuthorization): Promise<SignedBy> {
      if (places.take(owner) !== null) {
        throw new Fault("unavailable", "too many payments wait to be verified", { retryAfterSeconds: 1 });
      }
      const waiting = { owner, authorization, signature, ...Promise.withResolvers<SignedBy>() };
      wait(waiting);
      try {
        return await waiting.promise;
      } finally {
        places.giveBack(owner);
      }
    },
    /** Ends the worker. What still waits is judged here. */
    close: thread.close,
  };
}
