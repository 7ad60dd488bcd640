// Ends a process whose main loop no longer turns. Such a process answers nothing, hears no signal and holds its leases, and
// no process manager starts it again by itself. The watch is on a thread of its own: this file is that thread's entry too.

import { systemClock } from "../core/clock.ts";
import type { LogLevel } from "../core/log.ts";
import { openLog } from "./log.ts";

const LIMIT_MS = 10_000;
/** How often the main loop shows that it turns, and how often the watch looks. */
const TICKS_PER_LIMIT = 20;

interface Watched {
  /** A number that the main loop changes at each tick. */
  readonly turns: Int32Array;
  readonly limitMs: number;
  readonly log: { readonly level: LogLevel; readonly format: "json" | "pretty" };
}

function spawnThread(): Worker {
  const path = Bun.isStandaloneExecutable ? "./cli/watchdog.ts" : import.meta.url;
  return new Worker(path, { smol: true });
}

/** Begins the watch over the calling thread. It keeps no process alive. */
export function startWatchdog(log: Watched["log"], limitMs: number = LIMIT_MS): void {
  const turns = new Int32Array(new SharedArrayBuffer(Int32Array.BYTES_PER_ELEMENT));
  setInterval(() => Atomics.add(turns, 0, 1), limitMs / TICKS_PER_LIMIT).unref();
  const thread = spawnThread();
  thread.unref();
  thread.postMessage({ turns, limitMs, log } satisfies Watched);
}

/** Only time in which this thread runs counts, so a process or machine that was stopped is not ended when it goes on. */
function watch({ turns, limitMs, log }: Watched): void {
  const tickMs = limitMs / TICKS_PER_LIMIT;
  let seen = -1;
  let lookedAt = performance.now();
  let stuckMs = 0;
  setInterval(() => {
    const now = performance.now();
    const turn = Atomics.load(turns, 0);
    stuckMs = turn === seen ? stuckMs + Math.min(now - lookedAt, 2 * tickMs) : 0;
    [seen, lookedAt] = [turn, now];
    if (stuckMs < limitMs) return;
    openLog({ ...log, clock: systemClock }).error("main_loop_stuck", { stuck_ms: Math.round(stuckMs) });
    // The signal handlers of the process would wait for the main loop.
    process.kill(process.pid, "SIGKILL");
  }, tickMs);
}

declare const self: Worker;

if (!Bun.isMainThread) {
  self.onmessage = ({ data }: MessageEvent<Watched>) => watch(data);
}
