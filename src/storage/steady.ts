// Rows removed for their age are gone for good, so the clock that tells the age must have run evenly for a while: a
// machine that boots a month ahead is corrected within minutes, and must not have removed a month of rows by then.
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";

/** By how much the clock may drift from the monotonic one between two runs. */
const DRIFT_MS_MAX = 60_000;

interface SteadyOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly everyMs: number;
  /** Milliseconds of a clock that never goes back. */
  readonly monotonic?: () => number;
}

/**
 * Runs `work` at intervals, the first time after `everyMs`, and only when the clock has run evenly since the time before.
 * Returns a function that stops it.
 */
export function whileSteady(options: SteadyOptions, work: () => Promise<unknown>): () => void {
  const { clock, log, everyMs, monotonic = () => performance.now() } = options;
  let offset = clock.now() - monotonic();
  const timer = setInterval(() => {
    const before = offset;
    offset = clock.now() - monotonic();
    if (Math.abs(offset - before) > DRIFT_MS_MAX) {
      log.warn("cleanup_deferred", { by_ms: Math.round(offset - before) });
      return;
    }
    work().catch((error) => log.warn("cleanup_failed", { error }));
  }, everyMs);
  return () => clearInterval(timer);
}
