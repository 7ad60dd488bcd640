// Notices when the event loop was blocked, by a timer that fires late. All pauses of a second make one line of the log, with
// the longest of them, so that the log is not flooded when everything is slow.
import type { Log } from "../core/log.ts";

/** A timer of 5 ms costs 1 % of a core, this one half of that. A pause is reported up to this much too short. */
const TICK_MS = 10;

/**
 * Logs pauses of at least `leastMs`.
 *
 * @param thread whose event loop it is
 * @param late told of every tick, by how many milliseconds it came too late
 * @returns a function that stops it, and logs what is left
 */
export function watchLoop(
  thread: string,
  leastMs: number,
  warn: Log["warn"],
  late: (ms: number) => void = () => {},
): () => void {
  let tickedAt = performance.now();
  let cpu = process.threadCpuUsage();
  let toldAt = Number.NEGATIVE_INFINITY;
  /** `cpu_ms` is what this thread computed meanwhile. */
  let longest: { readonly ms: number; readonly cpu_ms: number } | null = null;
  let times = 0;

  function tell(): void {
    if (longest === null) return;
    warn("event_loop_blocked", { thread, ...longest, times });
    toldAt = tickedAt;
    [longest, times] = [null, 0];
  }

  function tick(): void {
    const ms = performance.now() - tickedAt - TICK_MS;
    tickedAt = performance.now();
    const used = process.threadCpuUsage();
    late(ms);
    if (ms >= leastMs) {
      times++;
      const cpu_ms = rounded((used.user + used.system - cpu.user - cpu.system) / 1000);
      if (ms > (longest?.ms ?? 0)) longest = { ms: rounded(ms), cpu_ms };
    }
    cpu = used;
    if (tickedAt - toldAt >= 1_000) tell();
  }

  const timer = setInterval(tick, TICK_MS);
  timer.unref();
  return () => {
    clearInterval(timer);
    tell();
  };
}

function rounded(ms: number): number {
  return Math.round(ms * 10) / 10;
}
