// The workers that make upstream calls, seen from the scheduler: a job goes in, exactly one outcome comes out.
// A worker that dies is replaced. The calls it was running end `internal`: the upstream may have seen them, and nothing
// is sent twice.
import type { Log } from "../../../core/log.ts";
import type { DecoderShare } from "../../../http/client/decode.ts";
import type { Job, Outcome, WorkerSettings } from "../job.ts";
import { lostCall } from "../outcome.ts";
import { isCounted } from "./messages.ts";
import { createWorkerHandle, type WorkerHandle } from "./worker-handle.ts";

export interface WorkerPool {
  /** Never rejects. The pool takes the job's body over: a large one is moved, not copied. */
  run(job: Job): Promise<Outcome>;
  /** Ends a running job with `cancelled`. An unknown id is ignored. */
  cancel(id: string): void;
  /** The outcome of a job is recorded, or never will be: until then a long response counts as memory of its worker. */
  recorded(id: string): void;
  /** Jobs whose outcome is not known yet. */
  readonly running: number;
  /** Takes no more jobs, ends those that run, closes the upstream sessions, ends the workers. */
  close(): Promise<void>;
}

export interface NewWorkerPool extends WorkerPool {
  /** Starts the workers, once. Jobs that come before that wait for them. */
  start(): void;
}

export interface WorkerPoolOptions {
  /** Workers. */
  readonly size: number;
  readonly settings: WorkerSettings;
  /** The memory that the decoders of all workers share with those of other threads. */
  readonly decoders: DecoderShare;
  readonly log: Log;
  /** For tests: makes the thread. */
  readonly spawn?: () => Worker;
  /** For tests: how late a job's outcome may be before its worker counts as stuck. */
  readonly graceMs?: number;
}

const GRACE_MS = 30_000;

/**
 * The worker is an entry point of its own. From source it lies beside this file; in the compiled binary this
 * file is part of the main entry, and the worker is found by its path below the common root of the entry
 * points, `src`.
 */
function spawnWorker(): Worker {
  return Bun.isStandaloneExecutable
    ? new Worker("./gateway/executor/workers/worker.ts")
    : new Worker(new URL("./worker.ts", import.meta.url).href);
}

export function createWorkerPool(options: WorkerPoolOptions): NewWorkerPool {
  const { size, settings, decoders, log, spawn = spawnWorker, graceMs = GRACE_MS } = options;
  const handles = Array.from({ length: size }, () =>
    createWorkerHandle({ settings, workers: size, decoders, log, spawn, graceMs }),
  );
  /** The worker of each job that runs, or whose response still counts as its memory. */
  const handleOf = new Map<string, WorkerHandle>();
  let isClosed = false;

  return {
    start() {
      for (const handle of handles) handle.start();
    },
    async run(job) {
      const handle = isClosed ? undefined : chooseHandle(handles, job);
      if (handle === undefined) return lostCall("the worker pool is closed");
      handleOf.set(job.id, handle);
      const outcome = await handle.run(job);
      if (!isCounted(outcome)) handleOf.delete(job.id);
      return outcome;
    },
    cancel(id) {
      handleOf.get(id)?.cancel(id);
    },
    recorded(id) {
      handleOf.get(id)?.recorded(id);
      handleOf.delete(id);
    },
    get running() {
      return handles.reduce((sum, handle) => sum + handle.load(), 0);
    },
    async close() {
      isClosed = true;
      await Promise.all(handles.map((handle) => handle.close()));
    },
  };
}

/** Jobs of one session key always meet in the same worker, where their session lives; others go where the least runs. */
function chooseHandle(handles: readonly WorkerHandle[], { session_key }: Job): WorkerHandle | undefined {
  if (session_key !== null) return handles[Number(Bun.hash(session_key) % BigInt(handles.length))];
  let least = handles[0];
  for (const handle of handles) {
    if (least !== undefined && handle.load() < least.load()) least = handle;
  }
  return least;
}
