// Checkpoints SQLite each second, or when its write-ahead log is large: moves the log into the database file, so that the log can
// restart. A thread of its own moves nearly all of it: at 24,000 accepts a second, moving a second's worth held the event loop for
// 20 to 60 ms, three times as long as the longest group of writes. The log restarts only when all of it has been moved, and
// writers go on meanwhile, so after the thread is done with a large log, this thread moves the rest between two groups.
import type { Database } from "bun:sqlite";
import { statSync } from "node:fs";
import type { Log } from "../../core/log.ts";
import { poll } from "../../kernel/loop.ts";
import type { FromCheckpointThread, ToCheckpointThread } from "./checkpoint-thread.ts";

/**
 * How often the thread moves what was added to a large log meanwhile, before this thread moves the rest. While a tenant sent
 * bodies of 1 MiB, the rest held the event loop for 50 to 150 ms eight times in 17 s; with these repeats once (measured).
 */
const REPEATS = 3;

interface CheckpointOptions {
  /** The process's writing connection. */
  readonly writer: Database;
  readonly path: string;
  readonly log: Log;
  /** The size of the write-ahead log above which it must restart. */
  readonly walBytes: number;
  /** Makes the thread; replaced by tests. */
  readonly spawn?: () => Worker;
}

/** In the compiled binary a worker is named by its path below `src`. */
function spawnThread(): Worker {
  return Bun.isStandaloneExecutable
    ? new Worker("./storage/sqlite/checkpoint-thread.ts")
    : new Worker(new URL("./checkpoint-thread.ts", import.meta.url).href);
}

export function startCheckpoints({ writer, path, log, walBytes, spawn }: CheckpointOptions) {
  const checkpoint = writer.prepare("pragma wal_checkpoint(passive)");
  const changes = writer.prepare<{ n: number }, []>("select total_changes() as n");
  const isLarge = () => statSync(`${path}-wal`).size > walBytes;
  const thread = createThread(path, log, spawn ?? spawnThread);
  let [seenChanges, movedChanges] = [-1, -1];
  let checkedAt = Number.NEGATIVE_INFINITY;
  let isStopped = false;

  /** Moves what was added while the thread was moving, or everything when the thread has failed. */
  function moveHere(): void {
    if (!writer.inTransaction) checkpoint.run();
  }

  /** @returns whether anything was written since the last look */
  async function moveIfDue(): Promise<boolean> {
    if (writer.inTransaction) return true;
    const currentChanges = changes.get()?.n ?? 0;
    const isBusy = currentChanges !== seenChanges;
    seenChanges = currentChanges;
    const isDue = performance.now() - checkedAt >= 1_000;
    if (currentChanges === movedChanges || (!isDue && !isLarge())) return isBusy;
    checkedAt = performance.now();
    let isMoved = await thread.move();
    // Each repeat leaves less to move.
    for (let again = 0; again < REPEATS && isMoved && !isStopped && isLarge(); again++) isMoved = await thread.move();
    if (isStopped) return false;
    if (!isMoved || isLarge()) moveHere();
    movedChanges = currentChanges;
    return isBusy;
  }

  const looking = poll({ leastMs: 50, mostMs: 200 }, () =>
    moveIfDue().catch((error) => {
      log.warn("checkpoint_failed", { error });
      return false;
    }),
  );
  return {
    /** Ends the thread. The write-ahead log stays as it is. */
    stop(): Promise<void> {
      isStopped = true;
      looking.stop();
      return thread.close();
    },
  };
}

/** The thread, started when there is something to move, since many processes only read, or write little and end. */
function createThread(path: string, log: Log, spawn: () => Worker) {
  let worker: Worker | null = null;
  let answered: ((message: FromCheckpointThread | null) => void) | null = null;

  function launch(): Worker {
    const next = spawn();
    next.onmessage = ({ data }: MessageEvent<FromCheckpointThread>) => answered?.(data);
    next.onerror = (event) => log.warn("checkpoint_failed", { message: event.message });
    next.addEventListener("close", () => {
      if (next !== worker) return;
      worker = null;
      answered?.(null);
    });
    // A command that is done ends, whatever this thread does.
    next.unref();
    next.postMessage({ kind: "open", path } satisfies ToCheckpointThread);
    return next;
  }

  /** Sends a message and waits for its response; null when the thread has died, or does not respond within `ms`. */
  async function ask(kind: FromCheckpointThread["kind"], ms: number): Promise<FromCheckpointThread | null> {
    const { promise, resolve } = Promise.withResolvers<FromCheckpointThread | null>();
    const timer = setTimeout(resolve, ms, null);
    const mine = (message: FromCheckpointThread | null) => {
      if (message === null || message.kind === kind) resolve(message);
    };
    answered = mine;
    worker?.postMessage({ kind } satisfies ToCheckpointThread);
    const answer = await promise;
    clearTimeout(timer);
    // Another message, such as `close`, may have replaced the handler meanwhile.
    if (answered === mine) answered = null;
    return answer;
  }

  return {
    /** Moves the log. @returns whether that succeeded */
    async move(): Promise<boolean> {
      worker ??= launch();
      // A thread that does not respond for a minute counts as failed.
      const answer = await ask("move", 60_000);
      if (typeof answer?.error === "string") log.warn("checkpoint_failed", { message: answer.error });
      return answer?.error === null;
    },
    async close(): Promise<void> {
      if (worker === null) return;
      answered?.(null);
      const last = worker;
      await ask("close", 3_000);
      worker = null;
      last.terminate();
    },
  };
}
