// Runs CPU-heavy tasks on threads of their own, so that they don't block an event loop: judging, hashing and joining what
// tenants send. Tenants take turns, one job each. A thread starts when a job finds none idle, and ends after it has been idle
// for a while. Without a pool, `compute` runs the task at once.
// One per thread, since every caller on a thread shares its pool.
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { MAX } from "./limits.ts";
import { createFairShare } from "./share.ts";
import { createRoundRobin } from "./turns.ts";
import type { StopSignal } from "./wait.ts";

/** Both threads know a task by its name. Its input and output must survive a structured clone. */
export interface ComputeTask<I, O> {
  readonly name: string;
  run(input: I): O;
  /** The views of the output whose buffers are transferred back, not copied. */
  moved?(output: O): readonly Uint8Array[];
}

interface JobOptions {
  readonly tenant: string;
  /** The length of the input, which counts against the pool's memory. */
  readonly bytes: number;
  /** The views of the input whose buffers are transferred to the thread. They are lost if the job fails. */
  readonly moved?: readonly Uint8Array[];
  readonly signal?: StopSignal;
}

export interface ToComputeThread {
  readonly task: string;
  readonly input: unknown;
}

export type FromComputeThread =
  | { readonly output: unknown }
  | { readonly error: unknown; readonly fault: Pick<Fault, "kind" | "message"> | null };

export interface ComputeOptions {
  readonly log: Pick<Log, "debug" | "error">;
  readonly spawn: () => Worker;
  readonly threads?: number;
  readonly jobsMax?: number;
  readonly bytesMax?: number;
  /** How long a thread may take for one job before it is terminated. */
  readonly stuckMs?: number;
  /** How long an idle thread is kept. A thread takes 8 MB, and 40 ms of another core to start. */
  readonly idleMs?: number;
}

/** Callers do work up to this length at once: it takes a millisecond or two, and the start of a thread takes 40. */
export const AT_ONCE_BYTES = 65_536;

/** Jobs from this length on may take seconds, so one thread is left to the shorter ones. */
const LONG_BYTES = 1024 * 1024;

interface ComputeJob extends ToComputeThread, Pick<JobOptions, "bytes"> {
  readonly moved: readonly Uint8Array[];
  /** Whether its caller's promise is settled, by the outcome or by the caller's signal. */
  isOver: boolean;
  end(outcome: FromComputeThread): void;
}

const isLong = ({ bytes }: Pick<ComputeJob, "bytes">) => bytes >= LONG_BYTES;

const failed = (error: unknown): FromComputeThread => ({ error, fault: null });

interface ComputeThread {
  /** The job that it runs now; null when it is idle. */
  readonly job: ComputeJob | null;
  start(job: ComputeJob): void;
  end(): void;
}

/** @param events `idle`: the thread has finished its job, or has died */
function startThread(
  { log, spawn, stuckMs = MAX.computeMs, idleMs = 30_000 }: ComputeOptions,
  events: { idle(): void; ended(thread: ComputeThread): void },
): ComputeThread {
  const worker = spawn();
  log.debug("compute_thread_started");
  let job: ComputeJob | null = null;
  let isOver = false;
  let timer: ReturnType<typeof setTimeout> | undefined;

  function watch(ms: number, onTimeout: () => void): void {
    clearTimeout(timer);
    timer = setTimeout(onTimeout, ms);
    timer.unref();
  }

  function died(reason: string): void {
    if (isOver) return;
    log.error("compute_thread_died", { reason });
    thread.end();
    events.idle();
  }

  worker.onmessage = ({ data }: MessageEvent<FromComputeThread>) => {
    if (isOver) return;
    const done = job;
    job = null;
    // An idle thread must not keep the process alive.
    worker.unref();
    watch(idleMs, thread.end);
    // Before the caller continues, so that the thread has its next job meanwhile.
    events.idle();
    done?.end(data);
  };
  worker.onmessageerror = () => died("its message could not be read");
  worker.onerror = (event) => died(event.message);
  worker.addEventListener("close", () => died("it ended"));

  const thread: ComputeThread = {
    get job() {
      return job;
    },
    start(next) {
      job = next;
      worker.ref();
      watch(stuckMs, () => died("it does not answer"));
      const { task, input, moved } = next;
      worker.postMessage({ task, input } satisfies ToComputeThread, buffersOf(moved));
    },
    end() {
      isOver = true;
      clearTimeout(timer);
      worker.terminate();
      events.ended(thread);
      job?.end(failed(workLost()));
    },
  };
  return thread;
}

export function computePool(options: ComputeOptions) {
  const { threads: size = MAX.computeThreads, jobsMax = MAX.computeJobs, bytesMax = MAX.computeBytes } = options;
  const [slots, memory] = [createFairShare({ size: jobsMax }), createFairShare({ size: bytesMax })];
  const [short, long] = [createRoundRobin<ComputeJob>(), createRoundRobin<ComputeJob>()];
  const threads = new Set<ComputeThread>();
  let isClosed = false;

  const busy = (): ComputeJob[] => [...threads].flatMap(({ job }) => job ?? []);

  function nextJob(): ComputeJob | undefined {
    const mayBeLong = busy().filter(isLong).length < Math.max(size - 1, 1);
    for (;;) {
      const job = ((mayBeLong ? long.next() : undefined) ?? short.next())?.item;
      if (job?.isOver !== true) return job;
    }
  }

  function idleThread(): ComputeThread {
    for (const thread of threads) if (thread.job === null) return thread;
    const thread = startThread(options, { idle: dispatch, ended: (over) => threads.delete(over) });
    threads.add(thread);
    return thread;
  }

  function dispatch(): void {
    while (busy().length < size) {
      const job = nextJob();
      if (job === undefined) return;
      try {
        idleThread().start(job);
      } catch (error) {
        options.log.error("compute_thread_died", { error });
        job.end(failed(workLost()));
      }
    }
  }

  /** Reserves a slot and memory. @throws Fault `unavailable` when too much waits, or the pool is closed */
  function reserve(tenant: string, bytes: number): void {
    if (isClosed) throw workLost();
    if (slots.take(tenant) !== null) throw overloaded();
    if (memory.take(tenant, null, bytes) === null) return;
    slots.giveBack(tenant);
    throw overloaded();
  }

  return {
    /** @throws what the task throws; the signal's reason; Fault `unavailable` when too much waits, or the thread died or hung */
    async run<I, O>({ name }: ComputeTask<I, O>, input: I, options: JobOptions): Promise<O> {
      const { tenant, bytes, moved = [], signal } = options;
      signal?.throwIfAborted();
      reserve(tenant, bytes);
      const { promise, resolve, reject } = Promise.withResolvers<O>();
      const abort = () => job.end(failed(signal?.reason));
      const job: ComputeJob = {
        ...{ task: name, input, bytes, moved, isOver: false },
        end(outcome) {
          if (job.isOver) return;
          job.isOver = true;
          signal?.removeEventListener("abort", abort);
          slots.giveBack(tenant);
          memory.giveBack(tenant, null, bytes);
          if ("output" in outcome) resolve(outcome.output as O);
          else reject(outcome.fault === null ? outcome.error : new Fault(outcome.fault.kind, outcome.fault.message));
        },
      };
      signal?.addEventListener("abort", abort, { once: true });
      (isLong(job) ? long : short).add(tenant, job);
      dispatch();
      return promise;
    },
    close(): void {
      isClosed = true;
      for (const thread of [...threads]) thread.end();
      for (const queue of [short, long]) {
        for (let next = queue.next(); next !== undefined; next = queue.next()) next.item.end(failed(workLost()));
      }
    },
  };
}

const workLost = () => new Fault("unavailable", "the work on this request was lost; retry", { retryAfterSeconds: 1 });

const overloaded = () =>
  new Fault("unavailable", "too many requests wait to be checked; retry", { retryAfterSeconds: 1 });

const buffersOf = (moved: readonly Uint8Array[]) => [...new Set(moved.map(({ buffer }) => buffer as ArrayBuffer))];

/** The thread's side of a pool: runs each task that arrives on `port`, and posts its outcome. */
export function serveTasks(
  port: Pick<Worker, "onmessage" | "postMessage">,
  tasks: readonly ComputeTask<never, unknown>[],
): void {
  const byName = new Map(tasks.map((task) => [task.name, task as ComputeTask<unknown, unknown>]));
  port.onmessage = ({ data: { task: name, input } }: MessageEvent<ToComputeThread>) => {
    try {
      const task = byName.get(name);
      if (task === undefined) throw new Error(`no task ${name}`);
      const output = task.run(input);
      port.postMessage({ output } satisfies FromComputeThread, buffersOf(task.moved?.(output) ?? []));
    } catch (error) {
      const fault = error instanceof Fault ? { kind: error.kind, message: error.message } : null;
      port.postMessage({ error: fault === null ? error : null, fault } satisfies FromComputeThread);
    }
  };
}

let pool: ReturnType<typeof computePool> | null = null;

/** Gives this thread a pool, which `compute` then uses. Returns a function that closes the pool. */
export function startCompute(options: ComputeOptions): () => void {
  const own = computePool(options);
  pool = own;
  return () => {
    own.close();
    if (pool === own) pool = null;
  };
}

/** Runs the task on this thread's pool. @throws as `run` of the pool does */
export const compute = async <I, O>(task: ComputeTask<I, O>, input: I, options: JobOptions): Promise<O> =>
  pool === null ? task.run(input) : pool.run(task, input, options);
