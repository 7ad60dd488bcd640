// What a service does about signals, about errors that nobody else handles, and about a main loop that stands still. Such a
// process answers nothing, hears no signal and holds its leases, and no process manager restarts it by itself. So a thread
// watches the main loop and ends the process; this file is that thread's entry too.

import type { LogLevel } from "../core/log.ts";
import { systemClock } from "../core/time.ts";
import { type OpenLog, openLog } from "./log.ts";

const FAILED = 1;

/**
 * A promise that nobody waits for takes nothing down with it: what it was part of has failed, and only that. An
 * exception outside of any request leaves nobody knows what behind, so the process ends; what it had accepted is
 * durable.
 */
export function logStrayErrors(log: OpenLog): void {
  process.on("unhandledRejection", (error) => log.error("unhandled_rejection", { error }));
  process.on("uncaughtException", (error) => {
    log.error("uncaught_exception", { error });
    log.flush();
    process.exit(FAILED);
  });
}

/** Ends the process when it has stopped; at once at a second signal. */
export function drainOnSignal(stop: () => Promise<void>, log: OpenLog): void {
  let askedAt: number | null = null;
  const onSignal = async (signal: string) => {
    if (askedAt !== null) {
      // Ctrl-C reaches a program under npx twice, from the terminal and from npx; that is not a second request.
      if (performance.now() - askedAt > 1000) process.exit(FAILED);
      return;
    }
    askedAt = performance.now();
    log.info("draining", { signal });
    try {
      await stop();
      log.info("stopped");
      process.exit(0);
    } catch (error) {
      log.error("stop_failed", { error });
      process.exit(FAILED);
    }
  };
  process.on("SIGTERM", onSignal);
  process.on("SIGINT", onSignal);
}

/** How often the main loop counts a beat, and how often the watch looks. */
const TICKS_PER_LIMIT = 20;

interface WatchOrder {
  /** A number that the main loop raises at each tick. */
  readonly beats: Int32Array;
  readonly limitMs: number;
  readonly log: { readonly level: LogLevel; readonly format: "json" | "pretty" };
}

/** Begins the watch over the calling thread. It keeps no process alive. */
export function startWatchdog(log: WatchOrder["log"], limitMs: number = 10_000): void {
  const beats = new Int32Array(new SharedArrayBuffer(Int32Array.BYTES_PER_ELEMENT));
  setInterval(() => Atomics.add(beats, 0, 1), limitMs / TICKS_PER_LIMIT).unref();
  const thread = new Worker(Bun.isStandaloneExecutable ? "./cli/process.ts" : import.meta.url, { smol: true });
  thread.unref();
  thread.postMessage({ beats, limitMs, log } satisfies WatchOrder);
}

/** Only time in which this thread runs counts, so a process or machine that was stopped is not ended when it goes on. */
function watch({ beats, limitMs, log }: WatchOrder): void {
  const tickMs = limitMs / TICKS_PER_LIMIT;
  let seen = -1;
  let lookedAt = performance.now();
  let stuckMs = 0;
  setInterval(() => {
    const now = performance.now();
    const beat = Atomics.load(beats, 0);
    stuckMs = beat === seen ? stuckMs + Math.min(now - lookedAt, 2 * tickMs) : 0;
    [seen, lookedAt] = [beat, now];
    if (stuckMs < limitMs) return;
    openLog({ ...log, clock: systemClock }).error("main_loop_stuck", { stuck_ms: Math.round(stuckMs) });
    // The signal handlers of the process would wait for the main loop.
    process.kill(process.pid, "SIGKILL");
  }, tickMs);
}

declare const self: Worker;

if (!Bun.isMainThread) {
  self.onmessage = ({ data }: MessageEvent<WatchOrder>) => watch(data);
}
