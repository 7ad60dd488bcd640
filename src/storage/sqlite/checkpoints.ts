// Moves SQLite's log into the database file each second, or when it is large, so that the log begins again. A thread of its own
// moves nearly all of it: with 24,000 accepts a second a second's worth held the event loop for 20 to 60 ms, three times as
// long as the longest group of writes. The log begins again only when all of it has been moved, and writers go on meanwhile,
// so when the thread is done with a large log, this thread moves what has come since, between two groups.
import type { Database } from "bun:sqlite";
import { statSync } from "node:fs";
import type { Log } from "../../core/log.ts";
import type { FromCheckpointThread, ToCheckpointThread } from "./checkpoint-thread.ts";

/**
 * How often the thread moves what has come meanwhile into a large log, before this one moves the rest. While a tenant sends
 * bodies of a mebibyte, that rest held the event loop for 50 to 150 ms, eight times in 17 s; with this once (measured).
 */
const AGAIN = 3;

interface CheckpointOptions {
  /** The connection of this process that writes. */
  readonly writer: Database;
  readonly path: string;
  readonly log: Log;
  /** From this size on the log is to begin again. */
  readonly walBytes: number;
  /** For tests: makes the thread. */
  readonly spawn?: () => Worker;
}

export interface Checkpoints {
  /** Ends the thread. The log stays as it is. */
  stop(): Promise<void>;
}

/** As with the workers for upstream calls: in the compiled binary, by the path below `src`. */
function spawnThread(): Worker {
  return Bun.isStandaloneExecutable
    ? new Worker("./storage/sqlite/checkpoint-thread.ts")
    : new Worker(new URL("./checkpoint-thread.ts", import.meta.url).href);
}

export function startCheckpoints({ writer, path, log, walBytes, spawn }: CheckpointOptions): Checkpoints {
  const checkpoint = writer.prepare("pragma wal_checkpoint(passive)");
  const changes = writer.prepare<{ n: number }, []>("select total_changes() as n");
  const isLarge = () => statSync(`${path}-wal`).size > walBytes;
  const thread = createThread(path, log, spawn ?? spawnThread);
  let seen = -1;
  let lookedAt = Number.NEGATIVE_INFINITY;
  let isMoving = false;
  let isStopped = false;

  /** What came while the thread was at it, or all of it when there is no thread. */
  function moveHere(): void {
    if (!writer.inTransaction) checkpoint.run();
  }

  async function look(): Promise<void> {
    const isDue = performance.now() - lookedAt >= 1_000;
    if (writer.inTransaction || (!isDue && !isLarge())) return;
    lookedAt = performance.now();
    const now = changes.get()?.n ?? 0;
    if (now === seen) return;
    let isMoved = await thread.move();
    // Each time less has come meanwhile.
    for (let again = 0; again < AGAIN && isMoved && !isStopped && isLarge(); again++) isMoved = await thread.move();
    if (isStopped) return;
    if (!isMoved || isLarge()) moveHere();
    seen = now;
  }

  const timer = setInterval(() => {
    if (isMoving) return;
    isMoving = true;
    look()
      .catch((error) => log.warn("checkpoint_failed", { error }))
      .finally(() => {
        isMoving = false;
      });
  }, 50);
  timer.unref();
  return {
    stop() {
      isStopped = true;
      clearInterval(timer);
      return thread.close();
    },
  };
}

/** Started when there is something to move, since many processes only read, or write little and end. */
function createThread(path: string, log: Log, spawn: () => Worker) {
  let worker: Worker | null = null;
  let answered: ((message: FromCheckpointThread | null) => void) | null = null;

  function launch(): Worker {
    const next = spawn();
    const gone = () => {
      if (next !== worker) return;
      worker = null;
      answered?.(null);
    };
    next.onmessage = ({ data }: MessageEvent<FromCheckpointThread>) => answered?.(data);
    next.onerror = (event) => log.warn("checkpoint_failed", { message: event.message });
    next.addEventListener("close", gone);
    // A command that has done its work ends, whatever this thread does.
    next.unref();
    next.postMessage({ kind: "open", path } satisfies ToCheckpointThread);
    return next;
  }

  /** Null when the thread died, or is silent for so long. */
  async function ask(
    kind: "move" | "close",
    wanted: FromCheckpointThread["kind"],
    ms: number,
  ): Promise<FromCheckpointThread | null> {
    const { promise, resolve } = Promise.withResolvers<FromCheckpointThread | null>();
    const timer = setTimeout(resolve, ms, null);
    const mine = (message: FromCheckpointThread | null) => {
      if (message === null || message.kind === wanted) resolve(message);
    };
    answered = mine;
    worker?.postMessage({ kind } satisfies ToCheckpointThread);
    const answer = await promise;
    clearTimeout(timer);
    // Another question may have taken its place, as that of the end does.
    if (answered === mine) answered = null;
    return answer;
  }

  return {
    /** Whether it could be done. */
    async move(): Promise<boolean> {
      worker ??= launch();
      // A thread that has not answered for a minute is given up.
      const answer = await ask("move", "moved", 60_000);
      if (answer?.kind !== "moved") return false;
      if (answer.error !== null) log.warn("checkpoint_failed", { message: answer.error });
      return answer.error === null;
    },
    async close(): Promise<void> {
      if (worker === null) return;
      answered?.(null);
      const last = worker;
      await ask("close", "closed", 3_000);
      worker = null;
      last.terminate();
    },
  };
}
