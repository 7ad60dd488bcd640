// The threads of this process that judge what is long, for the main thread and for each worker that makes upstream calls.
import type { Log } from "../core/log.ts";
import { startCompute } from "../kernel/compute.ts";

/** See createWorkerPool: in the compiled binary a worker is found by its path below `src`. */
function spawnThread(): Worker {
  return Bun.isStandaloneExecutable
    ? new Worker("./compute/worker.ts")
    : new Worker(new URL("./worker.ts", import.meta.url).href);
}

/** So many threads for `compute` on this thread, until the returned function is called. */
export function startComputeThreads(log: Pick<Log, "debug" | "error">, threads?: number): () => void {
  return startCompute({ log, spawn: spawnThread, ...(threads !== undefined && { threads }) });
}
