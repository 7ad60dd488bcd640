// One place of the pool: a worker and the jobs it has. A job is handed over only to a worker that has said it
// is ready, so a job that waits here has certainly not run.
import type { Log } from "../../../core/log.ts";
import type { DecoderShare } from "../../../http/decoder-share.ts";
import type { Job, Outcome, WorkerSettings } from "../job.ts";
import { failed, lostCall, newTrace } from "../outcome.ts";
import { detached, transferable } from "./messages.ts";
import { createSupervisor } from "./supervisor.ts";

export interface WorkerHandle {
  run(job: Job): Promise<Outcome>;
  cancel(id: string): void;
  /** The response of a job is recorded, or never will be. */
  recorded(id: string): void;
  /** Jobs whose outcome is not known yet. */
  load(): number;
  close(): Promise<void>;
}

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

/** After so many starts in a row that came to nothing, waiting jobs end instead of waiting for ever. */
const FAILED_STARTS_MAX = 5;

const TICKS_PER_GRACE = 30;

export function createWorkerHandle(options: WorkerHandleOptions): WorkerHandle {
  const { settings, workers, log, graceMs } = options;
  let waiting = new Map<string, Pending>();
  const running = new Map<string, Pending>();
  let news = nothingNew();
  let isFlushing = false;
  let isClosed = false;
  // Time is counted in ticks, since a pause of this thread, or of the whole machine, is one tick and no more.
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
      news = nothingNew();
      endAll(running, "the worker died");
      if (failedStarts >= FAILED_STARTS_MAX) endAll(waiting, "no worker can be started");
    },
  });

  /** Every call ends by its deadline, so a worker that answers nothing long after that can't run any more. */
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

  /** One message per turn, with all that came up in it. */
  function flush(): void {
    isFlushing = false;
    if (waiting.size + news.cancel.length + news.recorded.length === 0) return;
    const jobs = [...waiting.values()].map(({ job }) => ({ ...job, body: detached(job.body) }));
    try {
      const isTaken = supervisor.post(
        { kind: "work", jobs, ...news },
        transferable(jobs.map(({ body }) => body)),
      );
      if (!isTaken) return;
    } catch (error) {
      log.error("jobs_not_handed_over", { error });
      endAll(waiting, "the job could not be handed over");
    }
    for (const [id, pending] of waiting) {
      pending.since = ticks;
      running.set(id, pending);
    }
    waiting = new Map();
    news = nothingNew();
  }

  return {
    run(job) {
      if (isClosed) return Promise.resolve(lostCall("the worker pool is closed"));
      const { promise, resolve } = Promise.withResolvers<Outcome>();
      waiting.set(job.id, { job, resolve, since: ticks });
      flushSoon();
      return promise;
    },
    cancel(id) {
      const pending = waiting.get(id);
      if (pending !== undefined) {
        waiting.delete(id);
        pending.resolve(failed(newTrace(), "cancelled", "cancelled", 0));
      } else if (running.has(id)) {
        news.cancel.push(id);
        flushSoon();
      }
    },
    recorded(id) {
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

function nothingNew() {
  return { cancel: [] as string[], recorded: [] as string[] };
}

function endAll(jobs: Map<string, Pending>, detail: string): void {
  for (const { resolve } of jobs.values()) resolve(lostCall(detail));
  jobs.clear();
}
