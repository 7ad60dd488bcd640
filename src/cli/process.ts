// How a service handles signals, uncaught errors, and a main loop that is stuck. A process with a stuck main loop answers
// nothing, ignores signals and keeps its leases, and no process manager notices. So a watchdog thread kills the process then;
// this file is the entry point of that thread too.
import type { LogLevel } from "../core/log.ts";
import { systemClock } from "../core/time.ts";
import { type OpenLog, openLog } from "./log.ts";

const FAILED = 1;

/**
 * A rejected promise that nobody awaits is only logged, since it concerns one piece of work. An uncaught exception may leave any
 * state behind, so the process ends; the calls that it has accepted are durable.
 */
export function logStrayErrors(log: OpenLog): void {
  process.on("unhandledRejection", (error) => log.error("unhandled_rejection", { error }));
  process.on("uncaughtException", (error) => {
    log.error("uncaught_exception", { error });
    log.flush();
    process.exit(FAILED);
  });
}

/** At the first signal stops the service, then exits; exits at once at a second signal. */
export function drainOnSignal(stop: () => Promise<void>, log: OpenLog): void {
  let askedAt: number | null = null;
  const onSignal = async (signal: string) => {
    // Ctrl-C reaches a program under npx twice, from the terminal and from npx; that is not a second request.
    if (askedAt !== null && performance.now() - askedAt > 1000) process.exit(FAILED);
    if (askedAt !== null) return;
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

/** How many beats the main loop counts within the limit, and how often the watchdog checks them. */
const TICKS_PER_LIMIT = 20;

interface WatchdogOptions {
  /** A counter that the main loop increments at each tick. */
  readonly beats: Int32Array;
  readonly limitMs: number;
  readonly log: { readonly level: LogLevel; readonly format: "json" | "pretty" };
}

/** Starts a watchdog over the calling thread. It does not keep the process alive. */
export function startWatchdog(log: WatchdogOptions["log"], limitMs: number = 10_000): void {
  const beats = new Int32Array(new SharedArrayBuffer(Int32Array.BYTES_PER_ELEMENT));
  setInterval(() => Atomics.add(beats, 0, 1), limitMs / TICKS_PER_LIMIT).unref();
  const thread = new Worker(Bun.isStandaloneExecutable ? "./cli/process.ts" : import.meta.url, { smol: true });
  thread.unref();
  thread.postMessage({ beats, limitMs, log } satisfies WatchdogOptions);
}

/** Counts only time in which this thread runs, so that a process or machine that was paused is not killed when it goes on. */
function watch({ beats, limitMs, log }: WatchdogOptions): void {
  const tickMs = limitMs / TICKS_PER_LIMIT;
  let seen = -1;
  let checkedAt = performance.now();
  let stuckMs = 0;
  setInterval(() => {
    const now = performance.now();
    const beat = Atomics.load(beats, 0);
    stuckMs = beat === seen ? stuckMs + Math.min(now - checkedAt, 2 * tickMs) : 0;
    [seen, checkedAt] = [beat, now];
    if (stuckMs < limitMs) return;
    openLog({ ...log, clock: systemClock }).error("main_loop_stuck", { stuck_ms: Math.round(stuckMs) });
    // SIGKILL, since the handlers of other signals would wait for the main loop.
    process.kill(process.pid, "SIGKILL");
  }, tickMs);
}

declare const self: Worker;

if (!Bun.isMainThread) self.onmessage = ({ data }: MessageEvent<WatchdogOptions>) => watch(data);
