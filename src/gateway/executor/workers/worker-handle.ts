// One place of the pool: a worker and the jobs it has. A job is handed over only to a worker that has said it
// is ready, so a job that waits here has certainly not run.
import type { Log } from "../../../core/log.ts";
import type { DecoderShare } from "../../../http/client/decode.ts";
import type { Job, Outcome, WorkerSettings } from "../job.ts";
import { failed, lostCall, newTrace } from "../outcome.ts";
import { batchOfJobs, charactersOf, isCounted } from "./messages.ts";
import { createSupervisor } from "./supervisor.ts";

interface Pending {
  readonly job: Job;
  readonly resolve: (outcome: Outcome) => void;
  /** The tick in which it was handed over. */
  since: number;
}

export interface WorkerHandleOptions {
  readonly settings: WorkerSettings;
  /** In the whole pool. */
  readonly workers: number;
  readonly decoders: DecoderShare;
  readonly log: Log;
  readonly spawn: () => Worker;
  /** How long after its deadline a job's outcome may be late before the worker counts as stuck. */
  readonly graceMs: number;
}

/** After so many failed starts in a row, waiting jobs end instead of waiting for ever. */
const FAILED_STARTS_MAX = 5;

const TICKS_PER_GRACE = 30;
/**
 * Handed over in one turn of the event loop, for both threads work on it in one piece: jobs, and characters of what a
 * tenant chooses of them. One alone may have 80,000.
 */
const JOBS_AT_ONCE = 256;
const CHARACTERS_AT_ONCE = 256 * 1024;

export function createWorkerHandle(options: WorkerHandleOptions) {
  const { settings, workers, log, graceMs } = options;
  const waiting = new Map<string, Pending>();
  const running = new Map<string, Pending>();
  const news = createNews();
  let isFlushing = false;
  let isClosed = false;
  // Time is counted in ticks, so that a pause of this thread or of the machine counts as a single tick.
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
        if (isCounted(outcome)) news.counted(id);
      }
    },
    onDeath(failedStarts) {
      news.forget();
      endAll(running, "the worker died");
      if (failedStarts >= FAILED_STARTS_MAX) endAll(waiting, "no worker can be started");
    },
  });

  /** Every call ends by its deadline, so a worker that is silent long after that is stuck. */
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

  /** One message per turn, with what came up in it. */
  function flush(): void {
    isFlushing = false;
    if ((waiting.size === 0 && news.isEmpty()) || !supervisor.isReady()) return;
    const handed = firstOf(waiting);
    for (const id of handed.keys()) waiting.delete(id);
    try {
      const { batch, transfer } = batchOfJobs(handed.values().map(({ job }) => job));
      supervisor.post({ kind: "work", jobs: batch, ...news.take() }, transfer);
    } catch (error) {
      log.error("jobs_not_handed_over", { error });
      endAll(handed, "the job could not be handed over");
    }
    for (const [id, pending] of handed) {
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
        pending.resolve(failed(newTrace(), "cancelled", "cancelled", 0));
      } else if (running.has(id)) {
        news.cancelled(id);
        flushSoon();
      }
    },
    /** The response of a job is recorded, or never will be. */
    recorded(id: string) {
      if (news.recorded(id)) flushSoon();
    },
    /** Jobs whose outcome is not known yet. */
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

/** As many as go over at once, and at least one. */
function firstOf(waiting: ReadonlyMap<string, Pending>): Map<string, Pending> {
  const first = new Map<string, Pending>();
  let characters = 0;
  for (const [id, pending] of waiting) {
    characters += charactersOf(pending.job);
    if (first.size > 0 && characters > CHARACTERS_AT_ONCE) break;
    first.set(id, pending);
    if (first.size === JOBS_AT_ONCE) break;
  }
  return first;
}

export type WorkerHandle = ReturnType<typeof createWorkerHandle>;

/** Collects the news for the worker about its jobs. */
function createNews() {
  /** Jobs that are done, and whose responses count as memory of the worker. */
  const counted = new Set<string>();
  let cancel: string[] = [];
  let recorded: string[] = [];

  function take() {
    const taken = { cancel, recorded };
    cancel = [];
    recorded = [];
    return taken;
  }

  return {
    isEmpty: () => cancel.length + recorded.length === 0,
    cancelled: (id: string) => void cancel.push(id),
    counted: (id: string) => void counted.add(id),
    /** Returns whether the worker must be told. */
    recorded: (id: string) => counted.delete(id) && recorded.push(id) > 0,
    take,
    /** The worker is gone. */
    forget() {
      counted.clear();
      take();
    },
  };
}

function endAll(jobs: Map<string, Pending>, detail: string): void {
  for (const { resolve } of jobs.values()) resolve(lostCall(detail));
  jobs.clear();
}
