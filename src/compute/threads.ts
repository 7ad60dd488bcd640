// Starts the compute pools of this process: one for the main thread, and one for each worker that makes upstream calls.
import type { Log } from "../core/log.ts";
import { startCompute } from "../kernel/compute.ts";

/** In the compiled binary a worker is found by its path below `src`. */
function spawnThread(): Worker {
  return Bun.isStandaloneExecutable
    ? new Worker("./compute/worker.ts")
    : new Worker(new URL("./worker.ts", import.meta.url).href);
}

/** Gives the calling thread a pool of at most `threads` threads. Returns a function that closes the pool. */
export const startComputeThreads = (log: Pick<Log, "debug" | "error">, threads?: number): (() => void) =>
  startCompute({ log, spawn: spawnThread, ...(threads !== undefined && { threads }) });
