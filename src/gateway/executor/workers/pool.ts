// The pool of worker threads that make upstream calls, as the scheduler sees it: each job that goes in brings exactly one
// outcome. Jobs are handed only to workers that have said they are ready, so a job that waits here has certainly not run. A
// worker that dies is replaced, with a backoff if deaths follow one another. The calls that it was running end as `internal`:
// the upstream may have seen them, and nothing is sent twice.
import type { Log } from "../../../core/log.ts";
import { endsWithin } from "../../../kernel/wait.ts";
import type { FromWorker, Job, Outcome, Result, ToWorker, WorkerSettings, WorkerStart } from "../job.ts";
import { batchOfJobs, cancelledCall, charactersOf, isCounted, lostCall, resultsOf } from "../job.ts";

export type WorkerPool = Omit<ReturnType<typeof createWorkerPool>, "start">;

export interface WorkerPoolOptions {
  readonly size: number;
  readonly settings: WorkerSettings;
  readonly log: Log;
  /** Makes a thread; set by tests. */
  readonly spawn?: () => Worker;
  /** How long after its deadline a job's outcome may come before its worker counts as stuck; set by tests. */
  readonly graceMs?: number;
}

/**
 * The worker is an entry point of its own. When run from source it lies beside this file. In the compiled binary this file is
 * part of the main entry point, and the worker is found by its path below `src`, the common root of the entry points.
 */
function spawnWorker(): Worker {
  return Bun.isStandaloneExecutable
    ? new Worker("./gateway/executor/workers/worker.ts")
    : new Worker(new URL("./worker.ts", import.meta.url).href);
}

export function createWorkerPool(options: WorkerPoolOptions) {
  const handleOptions = { spawn: spawnWorker, graceMs: 30_000, ...options };
  const handles = Array.from({ length: options.size }, () => createWorkerHandle(handleOptions));
  /** The worker of each job that runs, or whose response still counts as memory of that worker. */
  const handleOf = new Map<string, WorkerHandle>();
  let isClosed = false;

  return {
    /** Starts the workers. Called once; jobs that come before wait for it. */
    start(): void {
      for (const handle of handles) handle.start();
    },
    /** Never rejects. The pool owns the job's body from here on: a large body is transferred, not copied. */
    async run(job: Job): Promise<Outcome> {
      const handle = isClosed ? undefined : chooseHandle(handles, job);
      if (handle === undefined) return lostCall("the worker pool is closed");
      handleOf.set(job.id, handle);
      const outcome = await handle.run(job);
      if (!isCounted(outcome)) handleOf.delete(job.id);
      return outcome;
    },
    /** Ends a running job as `cancelled`. Unknown IDs are ignored. */
    cancel(id: string): void {
      handleOf.get(id)?.cancel(id);
    },
    /** Says that an outcome is recorded, or never will be: until then a long response counts as memory of its worker. */
    recorded(id: string): void {
      handleOf.get(id)?.recorded(id);
      handleOf.delete(id);
    },
    /** Jobs whose outcome is not known yet. */
    get running(): number {
      return handles.reduce((sum, handle) => sum + handle.load(), 0);
    },
    /** Takes no more jobs, ends the running ones, closes the MCP sessions, and ends the workers. */
    async close(): Promise<void> {
      isClosed = true;
      await Promise.all(handles.map((handle) => handle.close()));
    },
  };
}

/** Jobs with the same session key always go to the same worker, which has their session; others go to the least busy one. */
function chooseHandle(handles: readonly WorkerHandle[], { session_key }: Job): WorkerHandle | undefined {
  if (session_key !== null) return handles[Number(Bun.hash(session_key) % BigInt(handles.length))];
  return handles.reduce((least, handle) => (handle.load() < least.load() ? handle : least));
}

interface PendingJob {
  readonly job: Job;
  readonly resolve: (outcome: Outcome) => void;
  /** The tick of the watchdog in which the job was handed over. */
  since: number;
}

const TICKS_PER_GRACE = 30;
/** Bounds of one batch, since each thread works on it without a pause: jobs, and `charactersOf` them (one may have 80,000). */
const JOBS_AT_ONCE = 256;
const CHARACTERS_AT_ONCE = 256 * 1024;

function createWorkerHandle(options: Required<WorkerPoolOptions>) {
  const { size: workers, settings, log, graceMs } = options;
  const waiting = new Map<string, PendingJob>();
  const running = new Map<string, PendingJob>();
  let news = noNews();
  let isFlushing = false;
  let isClosed = false;
  // The watchdog counts ticks, so that a pause of this thread or of the machine counts as one tick, whatever its length.
  let ticks = 0;
  const ticksMax = Math.ceil((settings.upstream_timeout_ms / graceMs) * TICKS_PER_GRACE) + TICKS_PER_GRACE;
  const watchdog = setInterval(watch, graceMs / TICKS_PER_GRACE);
  watchdog.unref();

  const supervisor = createSupervisor({ kind: "start", settings, workers }, options, {
    onReady: flushSoon,
    onResults(results) {
      for (const { id, outcome } of results) {
        running.get(id)?.resolve(outcome);
        running.delete(id);
      }
    },
    onDeath(failedStarts) {
      news = noNews();
      endAll(running, "the worker died");
      // Otherwise the waiting jobs would wait for ever.
      if (failedStarts >= 5) endAll(waiting, "no worker can be started");
    },
  });

  /** Every call ends by its deadline, so a worker whose oldest job goes on long after that is stuck. */
  function watch(): void {
    ticks++;
    const [oldest] = running.values();
    if (oldest === undefined || ticks - oldest.since <= ticksMax) return;
    log.error("worker_stuck", { running: running.size });
    supervisor.replace();
  }

  function flushSoon(): void {
    if (isFlushing) return;
    isFlushing = true;
    setImmediate(flush);
  }

  /** Sends what came up in this turn of the event loop, as one message. */
  function flush(): void {
    isFlushing = false;
    if (waiting.size + news.cancel.length + news.recorded.length === 0 || !supervisor.isReady()) return;
    const sent = nextBatch(waiting);
    for (const id of sent.keys()) waiting.delete(id);
    try {
      const { batch, transfer } = batchOfJobs(sent.values().map(({ job }) => job));
      supervisor.post({ kind: "work", jobs: batch, ...news }, transfer);
      news = noNews();
    } catch (error) {
      log.error("jobs_not_handed_over", { error });
      endAll(sent, "the job could not be handed over");
    }
    for (const [id, pending] of sent) {
      pending.since = ticks;
      running.set(id, pending);
    }
    if (waiting.size > 0) flushSoon();
  }

  return {
    start: supervisor.start,
    run(job: Job): Promise<Outcome> {
      if (isClosed) return Promise.resolve(lostCall("the worker pool is closed"));
      const { promise, resolve } = Promise.withResolvers<Outcome>();
      waiting.set(job.id, { job, resolve, since: ticks });
      flushSoon();
      return promise;
    },
    cancel(id: string) {
      const pending = waiting.get(id);
      if (pending !== undefined) {
        waiting.delete(id);
        pending.resolve(cancelledCall("cancelled"));
      } else if (running.has(id)) {
        news.cancel.push(id);
        flushSoon();
      }
    },
    /** See WorkerPool. A worker that has replaced the job's own ignores the ID. */
    recorded(id: string) {
      news.recorded.push(id);
      flushSoon();
    },
    load: () => waiting.size + running.size,
    async close() {
      isClosed = true;
      clearInterval(watchdog);
      endAll(waiting, "the worker pool is closed");
      endAll(running, "the worker pool is closed");
      await supervisor.close();
    },
  };
}

/** The first waiting jobs that fit into one batch, and at least one. */
function nextBatch(waiting: ReadonlyMap<string, PendingJob>): Map<string, PendingJob> {
  const first = new Map<string, PendingJob>();
  let characters = 0;
  for (const [id, pending] of waiting) {
    characters += charactersOf(pending.job);
    if (first.size > 0 && characters > CHARACTERS_AT_ONCE) break;
    first.set(id, pending);
    if (first.size === JOBS_AT_ONCE) break;
  }
  return first;
}

const noNews = (): { cancel: string[]; recorded: string[] } => ({ cancel: [], recorded: [] });

type WorkerHandle = ReturnType<typeof createWorkerHandle>;

function endAll(jobs: Map<string, PendingJob>, detail: string): void {
  for (const { resolve } of jobs.values()) resolve(lostCall(detail));
  jobs.clear();
}

interface SupervisorEvents {
  onReady(): void;
  onResults(results: readonly Result[]): void;
  /** @param failedStarts how many workers in a row have died without ever having been ready */
  onDeath(failedStarts: number): void;
}

/** Keeps one worker thread alive: starts it, and replaces it when it dies. */
export function createSupervisor(
  start: WorkerStart,
  { log, spawn }: Pick<Required<WorkerPoolOptions>, "log" | "spawn">,
  events: SupervisorEvents,
) {
  let worker: Worker | null = null;
  let isReady = false;
  let isClosed = false;
  let spawnedAt = 0;
  let deaths = 0;
  let failedStarts = 0;
  let respawn: ReturnType<typeof setTimeout> | undefined;
  /** Resolved when the worker has closed. Made by close(), so that no earlier death has settled it. */
  let closed: PromiseWithResolvers<void> | null = null;

  function launch(): void {
    spawnedAt = performance.now();
    try {
      const next = spawn();
      worker = next;
      next.onmessage = ({ data }: MessageEvent<FromWorker>) => {
        if (data.kind === "log") log[data.level](data.event, data.fields);
        else if (next === worker) receive(data);
      };
      // Outcomes are lost with a message that can't be read, so the worker is ended, as if it had died.
      next.onmessageerror = () => next.terminate();
      next.onerror = (event) => log.error("worker_failed", { message: event.message });
      // Also fired after `error`, and by process.exit and terminate() (measured, from source and compiled).
      next.addEventListener("close", () => {
        if (next === worker) onDeath();
      });
      next.postMessage(start);
    } catch (error) {
      log.error("worker_not_started", { error });
      onDeath();
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
      case "closed":
        closed?.resolve();
        break;
    }
  }

  function onDeath(): void {
    worker = null;
    failedStarts = isReady ? 0 : failedStarts + 1;
    isReady = false;
    closed?.resolve();
    events.onDeath(failedStarts);
    if (isClosed) return;
    // The death of a worker that lived longer than this is the first in a row.
    deaths = performance.now() - spawnedAt > 10_000 ? 1 : deaths + 1;
    const pause = deaths === 1 ? 0 : Math.min(50 * 2 ** (deaths - 2), 5000);
    log.error("worker_died", { deaths, respawn_in_ms: pause });
    respawn = setTimeout(launch, pause);
  }

  return {
    start: launch,
    isReady: () => isReady,
    /** Hands a message to the worker, which must be ready. */
    post(message: ToWorker, transfer: ArrayBuffer[]) {
      worker?.postMessage(message, transfer);
    },
    /** Ends a stuck worker as if it had died. */
    replace() {
      const stuck = worker;
      if (stuck === null) return;
      // Not left to its event `close`, which comes only when the thread has ended.
      onDeath();
      stuck.terminate();
    },
    /** Lets the worker close its MCP sessions, then ends it for good. */
    async close() {
      isClosed = true;
      clearTimeout(respawn);
      const last = worker;
      if (last === null) return;
      closed ??= Promise.withResolvers<void>();
      last.postMessage({ kind: "close" } satisfies ToWorker);
      await endsWithin(3_000, closed.promise);
      worker = null;
      last.terminate();
    },
  };
}
