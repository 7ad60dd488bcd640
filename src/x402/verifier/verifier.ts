// Whose signature a payment carries, for many callers. Judging one takes 0.7 ms of a core. A tenant's only one is judged
// on the main thread, one such per turn, so it waits behind nobody's many. The others are judged by a worker, one of each
// tenant in turn; while there is none, because few wait, or it starts, or has died, the main thread judges them in its turns.

import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairShare, createRoundRobin } from "../../kernel/share.ts";
import { inTurns } from "../../kernel/turns.ts";
import type { Hex } from "../types.ts";
import { checkSignature, type SignedAuthorization, type SignedBy } from "../verify.ts";

/** With no more than these the main thread is done before a worker has started. */
const FEW = 4;
/** Per message, about 6 ms of the worker. */
const BATCH = 8;
/** What the main thread judges of the queue takes its turns as one tenant's work does. */
const TURN = "signatures of payments";

type Signed = Omit<SignedAuthorization, "domain">;
/** Null where judging throws. */
export type Verdict = SignedBy | null;
/** Once `ready`, then the answers to one batch after the other. */
export type FromVerifier = "ready" | readonly Verdict[];

interface Waiting extends SignedAuthorization, PromiseWithResolvers<SignedBy> {
  readonly owner: string;
}

export interface VerifierOptions {
  /** Of the token of all payments. */
  readonly domain: Hex;
  readonly log: Pick<Log, "debug" | "error">;
  readonly waitingMax?: number;
  readonly spawn?: () => Worker;
  /** How long the worker stays with nothing to do. */
  readonly idleMs?: number;
  /** How long it may take to get ready, or to answer. */
  readonly stuckMs?: number;
}

export type Verifier = ReturnType<typeof createVerifier>;

export function createVerifier({ domain, waitingMax = MAX.verifications, ...options }: VerifierOptions) {
  const places = createFairShare({ size: waitingMax });
  const queue = createRoundRobin<Waiting>();
  let isTurnDue = false;
  let isOnlyOneDue = false;
  const thread = createVerifierThread(options, {
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
    async signedBy(owner: string, { authorization, signature }: Signed): Promise<SignedBy> {
      if (places.take(owner) !== null) {
        throw new Fault("unavailable", "too many payments wait to be verified", { retryAfterSeconds: 1 });
      }
      const waiting = { owner, domain, authorization, signature, ...Promise.withResolvers<SignedBy>() };
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

interface ThreadEvents {
  /** It takes batches from now on. */
  ready(): void;
  answered(batch: readonly Waiting[], answers: readonly Verdict[]): void;
  /** It is gone with these. */
  lost(batches: readonly (readonly Waiting[])[]): void;
}

/** The worker takes 7 to 10 MB, which come back when it ends; to start it takes 40 ms of another core (measured, compiled). */
const IDLE_MS = 30_000;

/** See createWorkerPool: in the compiled binary a worker is found by its path below `src`. */
function spawnWorker(): Worker {
  return Bun.isStandaloneExecutable
    ? new Worker("./x402/verifier/worker.ts")
    : new Worker(new URL("./worker.ts", import.meta.url).href);
}

/** The worker: started when it is first needed, ended when it has long had nothing to do. What it has not answered comes back. */
function createVerifierThread(
  { log, spawn = spawnWorker, idleMs = IDLE_MS, stuckMs = 10_000 }: Omit<VerifierOptions, "domain" | "waitingMax">,
  events: ThreadEvents,
) {
  let worker: Worker | null = null;
  let isReady = false;
  let isClosed = false;
  let batches: (readonly Waiting[])[] = [];
  let startableAt = Number.NEGATIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;

  function launch(): void {
    try {
      const next = spawn();
      worker = next;
      next.onmessage = ({ data }: MessageEvent<FromVerifier>) => next === worker && receive(data);
      next.onmessageerror = () => next === worker && bury("its message could not be read");
      next.onerror = (event) => next === worker && bury(event.message);
      next.addEventListener("close", () => next === worker && bury("it ended"));
      watch();
    } catch (error) {
      bury(error instanceof Error ? error.message : "it could not be started");
    }
  }

  function receive(message: FromVerifier): void {
    if (message === "ready") {
      log.debug("verifier_ready");
      isReady = true;
      watch();
      events.ready();
      return;
    }
    const batch = batches.shift();
    watch();
    if (batch !== undefined) events.answered(batch, message);
  }

  /** What has no answer by then ends it; and so does having nothing to answer. */
  function watch(): void {
    clearTimeout(timer);
    const isIdle = isReady && batches.length === 0;
    // With nothing to do it keeps no process alive.
    if (isIdle) worker?.unref();
    else worker?.ref();
    timer = isIdle ? setTimeout(end, idleMs) : setTimeout(() => bury("it does not answer"), stuckMs);
    timer.unref();
  }

  function bury(reason: string): void {
    log.error("verifier_died", { reason, batches: batches.length });
    // After a death the main thread judges alone for so long.
    startableAt = performance.now() + 5_000;
    end();
  }

  function end(): void {
    clearTimeout(timer);
    const [last, lost] = [worker, batches];
    [worker, isReady, batches] = [null, false, []];
    last?.terminate();
    events.lost(lost);
  }

  return {
    /** Without effect while there is one, or when one has died lately. */
    start(): void {
      if (worker === null && !isClosed && performance.now() >= startableAt) launch();
    },
    /** Whether there is a worker that takes batches. */
    isReady: (): boolean => isReady,
    // The second one is there when the first is done, so that the worker need not wait for the main thread.
    hasRoom: (): boolean => isReady && batches.length < 2,
    /** There must be room. */
    judge(batch: readonly Waiting[]): void {
      batches.push(batch);
      // A clone of an authorization takes 2 µs, and judging it 700.
      worker?.postMessage(batch.map(({ domain, authorization, signature }) => ({ domain, authorization, signature })));
      watch();
    },
    close(): void {
      isClosed = true;
      end();
    },
  };
}
