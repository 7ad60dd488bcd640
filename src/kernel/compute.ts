// Work that takes long in one piece, on threads of its own: judging, hashing and joining what tenants send. One job of each
// tenant in turn. A thread starts with the first job that has none, and ends when it has long had nothing to do.
// One per thread, since a thread hands such work to one pool; where there is none, the work is done at once.

import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { MAX } from "./limits.ts";
import { createFairShare, createRoundRobin } from "./share.ts";
import type { StopSignal } from "./wait.ts";

/** Known by its name to both threads. What goes in and comes out survives a structured clone. */
export interface ComputeTask<I, O> {
  readonly name: string;
  run(input: I): O;
  /** The memory that moves back with the output. */
  moved?(output: O): readonly Uint8Array[];
}

interface JobOptions {
  readonly tenant: string;
  /** How long the job is. */
  readonly bytes: number;
  /** Memory that moves to the thread with the input. It is lost if the job fails. */
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
  /** How long a thread may take for one job. */
  readonly stuckMs?: number;
  /** How long a thread stays with nothing to do. It takes 8 MB, and 40 ms of another core to start. */
  readonly idleMs?: number;
}

/** What is no longer than this is done at once by its caller: it takes a millisecond or two, and a new thread takes 40. */
export const AT_ONCE_BYTES = 65_536;

/** Jobs from this length on leave a thread to the shorter ones: they may take seconds. */
const LONG_BYTES = 1024 * 1024;

interface ComputeJob extends ToComputeThread, Pick<JobOptions, "bytes"> {
  readonly moved: readonly Uint8Array[];
  /** Its caller has what it waits for, or has left. */
  isOver: boolean;
  end(outcome: FromComputeThread): void;
}

const isLong = ({ bytes }: Pick<ComputeJob, "bytes">) => bytes >= LONG_BYTES;

const failed = (error: unknown): FromComputeThread => ({ error, fault: null });

interface ComputeThread {
  /** What it does now. */
  readonly job: ComputeJob | null;
  give(job: ComputeJob): void;
  /** It ends with its job. */
  end(): void;
}

interface ComputeThreadEvents {
  /** It has no job any more. */
  free(): void;
  /** It is gone. */
  ended(thread: ComputeThread): void;
}

function startThread(
  { log, spawn, stuckMs = MAX.computeMs, idleMs = 30_000 }: ComputeOptions,
  events: ComputeThreadEvents,
): ComputeThread {
  const worker = spawn();
  log.debug("compute_thread_started");
  let job: ComputeJob | null = null;
  let isOver = false;
  let timer: ReturnType<typeof setTimeout> | undefined;

  function watch(ms: number, late: () => void): void {
    clearTimeout(timer);
    timer = setTimeout(late, ms);
    timer.unref();
  }

  function bury(reason: string): void {
    if (isOver) return;
    log.error("compute_thread_died", { reason });
    thread.end();
    events.free();
  }

  worker.onmessage = ({ data }: MessageEvent<FromComputeThread>) => {
    if (isOver) return;
    const done = job;
    job = null;
    // With nothing to do it keeps no process alive.
    worker.unref();
    watch(idleMs, thread.end);
    // First, so that the thread has its next job while the caller goes on here.
    events.free();
    done?.end(data);
  };
  worker.onmessageerror = () => bury("its message could not be read");
  worker.onerror = (event) => bury(event.message);
  worker.addEventListener("close", () => bury("it ended"));

  const thread: ComputeThread = {
    get job() {
      return job;
    },
    give(next) {
      job = next;
      worker.ref();
      watch(stuckMs, () => bury("it does not answer"));
      const { task, input, moved } = next;
      worker.postMessage({ task, input } satisfies ToComputeThread, buffersOf(moved));
    },
    end() {
      isOver = true;
      clearTimeout(timer);
      worker.terminate();
      events.ended(thread);
      job?.end(failed(lost()));
    },
  };
  return thread;
}

export function computePool(options: ComputeOptions) {
  const { threads: size = MAX.computeThreads, jobsMax = MAX.computeJobs, bytesMax = MAX.computeBytes } = options;
  const [places, memory] = [createFairShare({ size: jobsMax }), createFairShare({ size: bytesMax })];
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

  function freeThread(): ComputeThread {
    for (const thread of threads) if (thread.job === null) return thread;
    const thread = startThread(options, { free: serve, ended: (over) => threads.delete(over) });
    threads.add(thread);
    return thread;
  }

  function serve(): void {
    while (busy().length < size) {
      const job = nextJob();
      if (job === undefined) return;
      try {
        freeThread().give(job);
      } catch (error) {
        options.log.error("compute_thread_died", { error });
        job.end(failed(lost()));
      }
    }
  }

  /** @throws Fault `unavailable` when too much waits */
  function take(tenant: string, bytes: number): void {
    if (isClosed) throw lost();
    if (places.take(tenant) !== null) throw tooMuch();
    if (memory.take(tenant, null, bytes) === null) return;
    places.giveBack(tenant);
    throw tooMuch();
  }

  return {
    /**
     * @throws what the task throws; the signal's reason; Fault `unavailable` when too much waits, or the thread of the job
     *   died or hung
     */
    async run<I, O>(
      { name }: ComputeTask<I, O>,
      input: I,
      { tenant, bytes, moved = [], signal }: JobOptions,
    ): Promise<O> {
      signal?.throwIfAborted();
      take(tenant, bytes);
      const { promise, resolve, reject } = Promise.withResolvers<O>();
      const leave = () => job.end(failed(signal?.reason));
      const job: ComputeJob = {
        ...{ task: name, input, bytes, moved, isOver: false },
        end(outcome) {
          if (job.isOver) return;
          job.isOver = true;
          signal?.removeEventListener("abort", leave);
          places.giveBack(tenant);
          memory.giveBack(tenant, null, bytes);
          if ("output" in outcome) resolve(outcome.output as O);
          else reject(outcome.fault === null ? outcome.error : new Fault(outcome.fault.kind, outcome.fault.message));
        },
      };
      signal?.addEventListener("abort", leave, { once: true });
      (isLong(job) ? long : short).add(tenant, job);
      serve();
      return promise;
    },
    /** Ends the threads, and fails what waits. */
    close(): void {
      isClosed = true;
      for (const thread of [...threads]) thread.end();
      for (const queue of [short, long]) {
        for (let next = queue.next(); next !== undefined; next = queue.next()) next.item.end(failed(lost()));
      }
    },
  };
}

const lost = () => new Fault("unavailable", "the work on this request was lost", { retryAfterSeconds: 1 });

const tooMuch = () => new Fault("unavailable", "too much waits to be judged", { retryAfterSeconds: 1 });

const buffersOf = (moved: readonly Uint8Array[]) => [...new Set(moved.map(({ buffer }) => buffer as ArrayBuffer))];

/** The other side: does on this thread what comes for it. */
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

/** From now on work of this thread is done by such threads, until the returned function is called. */
export function startCompute(options: ComputeOptions): () => void {
  const own = computePool(options);
  pool = own;
  return () => {
    own.close();
    if (pool === own) pool = null;
  };
}

/** Does the task on a thread. @throws as `run` of the pool does */
export async function compute<I, O>(task: ComputeTask<I, O>, input: I, options: JobOptions): Promise<O> {
  return pool === null ? task.run(input) : pool.run(task, input, options);
}
