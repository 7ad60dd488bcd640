// The worker that judges signatures: started when it is first needed, ended when it has had nothing to do for long.
// Whatever it has when it dies, or does not answer, is given back.
import type { Log } from "../../core/log.ts";
import type { Payment } from "../types.ts";
import type { SignedBy } from "../verify.ts";

export type SignedAuthorization = Pick<Payment, "authorization" | "signature">;
/** Null where judging throws. */
export type Verdict = SignedBy | null;
/** Once `ready`, then the answers to one batch after the other. */
export type FromVerifier = "ready" | readonly Verdict[];

export interface ThreadOptions {
  readonly log: Pick<Log, "debug" | "error">;
  readonly spawn?: () => Worker;
  /** How long it stays with nothing to do. */
  readonly idleMs?: number;
  /** How long it may take to get ready, or to answer. */
  readonly stuckMs?: number;
}

export interface ThreadEvents<Batch> {
  /** It takes batches from now on. */
  ready(): void;
  answered(batch: Batch, answers: readonly Verdict[]): void;
  /** It is gone with these. */
  lost(batches: readonly Batch[]): void;
}

/** It takes 7 to 10 MB, which come back when it ends; to start it takes 40 ms of another core (measured, compiled). */
const IDLE_MS = 30_000;

/** See createWorkerPool: in the compiled binary a worker is found by its path below `src`. */
function spawnWorker(): Worker {
  return Bun.isStandaloneExecutable
    ? new Worker("./x402/verifier/worker.ts")
    : new Worker(new URL("./worker.ts", import.meta.url).href);
}

export function createVerifierThread<Batch extends readonly SignedAuthorization[]>(
  { log, spawn = spawnWorker, idleMs = IDLE_MS, stuckMs = 10_000 }: ThreadOptions,
  events: ThreadEvents<Batch>,
) {
  let worker: Worker | null = null;
  let isReady = false;
  let isClosed = false;
  let batches: Batch[] = [];
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
    judge(batch: Batch): void {
      batches.push(batch);
      // A clone of an authorization takes 2 µs, and judging it 700.
      worker?.postMessage(batch.map(({ authorization, signature }) => ({ authorization, signature })));
      watch();
    },
    close(): void {
      isClosed = true;
      end();
    },
  };
}
