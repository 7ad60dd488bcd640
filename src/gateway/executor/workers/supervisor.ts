// Keeps one worker alive: starts it, replaces it when it dies, and slows down when deaths follow one another.
import type { Log } from "../../../core/log.ts";
import type { DecoderShare } from "../../../http/client/decode.ts";
import { createLender } from "./decoder-loans.ts";
import { type FromWorker, type Result, resultsOf, type ToWorker, type WorkerStart } from "./messages.ts";

export interface SupervisorEvents {
  /** A worker takes work from now on. */
  onReady(): void;
  onResults(results: readonly Result[]): void;
  /** @param failedStarts deaths in a row without ever having been ready */
  onDeath(failedStarts: number): void;
}

/** A worker that lived this long starts the count of deaths again. */
const CALM_MS = 10_000;
const PAUSE_MS_MIN = 50;
const PAUSE_MS_MAX = 5000;
const CLOSE_TIMEOUT_MS = 3000;

export interface SupervisorOptions {
  readonly decoders: DecoderShare;
  readonly log: Log;
  readonly spawn: () => Worker;
}

export function createSupervisor(start: WorkerStart, options: SupervisorOptions, events: SupervisorEvents) {
  const { decoders, log, spawn } = options;
  let worker: Worker | null = null;
  let isReady = false;
  let isClosed = false;
  let spawnedAt = 0;
  let deaths = 0;
  let failedStarts = 0;
  let respawn: ReturnType<typeof setTimeout> | undefined;
  /** Made by close(), so that no earlier death has settled it. */
  let closed: PromiseWithResolvers<void> | null = null;

  const lender = createLender(decoders, (news) => worker?.postMessage({ kind: "loans", news }));

  function launch(): void {
    spawnedAt = performance.now();
    try {
      const next = spawn();
      worker = listenTo(next, log, {
        message: (message) => next === worker && receive(message),
        closed: () => next === worker && bury(),
      });
      worker.postMessage(start);
    } catch (error) {
      log.error("worker_not_started", { error });
      bury();
    }
  }

  function receive(message: FromWorker): void {
    switch (message.kind) {
      case "ready":
        isReady = true;
        events.onReady();
        break;
      case "done":
        events.onResults(resultsOf(message.results));
        break;
      case "loans":
        lender.asked(message.requests);
        break;
      case "closed":
        closed?.resolve();
        break;
    }
  }

  function bury(): void {
    worker = null;
    lender.clear();
    failedStarts = isReady ? 0 : failedStarts + 1;
    isReady = false;
    closed?.resolve();
    events.onDeath(failedStarts);
    if (isClosed) return;
    deaths = performance.now() - spawnedAt > CALM_MS ? 1 : deaths + 1;
    const pause = deaths === 1 ? 0 : Math.min(PAUSE_MS_MIN * 2 ** (deaths - 2), PAUSE_MS_MAX);
    log.error("worker_died", { deaths, respawn_in_ms: pause });
    respawn = setTimeout(launch, pause);
  }

  return {
    /** Launches the first worker. Called once. */
    start: launch,
    /** Whether there is a worker that takes work. */
    isReady: () => isReady,
    /** Hands a message to the worker, which must be ready. */
    post(message: ToWorker, transfer: ArrayBuffer[]) {
      worker?.postMessage(message, transfer);
    },
    /** Ends a stuck worker as if it had died. */
    replace() {
      const stuck = worker;
      if (stuck === null) return;
      // Do not wait for its `close`, which comes only when the thread has ended.
      bury();
      stuck.terminate();
    },
    /** Lets the worker close its sessions, then ends it for good. */
    async close() {
      isClosed = true;
      clearTimeout(respawn);
      const last = worker;
      if (last === null) return;
      closed ??= Promise.withResolvers<void>();
      last.postMessage({ kind: "close" } satisfies ToWorker);
      const timer = setTimeout(closed.resolve, CLOSE_TIMEOUT_MS);
      await closed.promise;
      clearTimeout(timer);
      worker = null;
      last.terminate();
    },
  };
}

export type Supervisor = ReturnType<typeof createSupervisor>;

/**
 * An uncaught error fires `error`, then `close`; process.exit and terminate() fire `close` alone (measured,
 * from source and compiled). A message that can't be read has lost outcomes, so its worker goes too.
 */
function listenTo(worker: Worker, log: Log, handlers: { message(message: FromWorker): void; closed(): void }): Worker {
  worker.onmessage = ({ data }: MessageEvent<FromWorker>) => {
    if (data.kind === "blocked") log.warn(data.event, data.fields);
    else handlers.message(data);
  };
  worker.onmessageerror = () => worker.terminate();
  worker.onerror = (event) => log.error("worker_failed", { message: event.message });
  worker.addEventListener("close", () => handlers.closed());
  return worker;
}
