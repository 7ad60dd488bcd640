// Notices when the event loop was blocked, by a timer that fires late. Pauses that the thread computed are a warning, the others
// the machine's (a slow disk, no processor) and none of the process's own doing. Many pauses make one line of the log, with the
// longest of them, so that the log is not flooded when everything is slow.
import type { Log } from "../core/log.ts";

/** A timer of 10 ms costs an idle thread 0.4 % of a core, this one half of that. A pause is reported up to this much too short. */
const TICK_MS = 20;

interface Pause {
  readonly ms: number;
  /** What this thread computed meanwhile. */
  readonly cpu_ms: number;
}

/** Pauses that the thread computed, or those that it did not, told at once and then at most every `everyMs`. */
function createTally(thread: string, log: Pick<Log, "info" | "warn">, isComputed: boolean) {
  const everyMs = isComputed ? 1_000 : 60_000;
  let toldAt = Number.NEGATIVE_INFINITY;
  let longest: Pause | null = null;
  let times = 0;
  return {
    add(pause: Pause): void {
      times++;
      if (longest === null || pause.ms > longest.ms) longest = pause;
    },
    tell(now = Number.POSITIVE_INFINITY): void {
      if (longest === null || now - toldAt < everyMs) return;
      log[isComputed ? "warn" : "info"]("event_loop_blocked", { thread, ...longest, times });
      [toldAt, longest, times] = [now, null, 0];
    },
  };
}

/**
 * Logs pauses of at least `leastMs`: as a warning where the thread computed for half of the pause, or for `leastMs`; else as
 * information. `late` is told of every tick by how many milliseconds it came too late. Returns a function that stops it.
 */
export function watchLoop(
  thread: string,
  leastMs: number,
  log: Pick<Log, "info" | "warn">,
  late: (ms: number) => void = () => {},
): () => void {
  let tickedAt = performance.now();
  let cpu = process.threadCpuUsage();
  const computed = createTally(thread, log, true);
  const waited = createTally(thread, log, false);

  function tick(): void {
    const ms = performance.now() - tickedAt - TICK_MS;
    tickedAt = performance.now();
    const used = process.threadCpuUsage();
    late(ms);
    if (ms >= leastMs) {
      const cpu_ms = (used.user + used.system - cpu.user - cpu.system) / 1000;
      // On a busy machine a thread that computes for long waits for even longer.
      const tally = cpu_ms >= Math.min(ms / 2, leastMs) ? computed : waited;
      tally.add({ ms: rounded(ms), cpu_ms: rounded(cpu_ms) });
    }
    cpu = used;
    computed.tell(tickedAt);
    waited.tell(tickedAt);
  }

  const timer = setInterval(tick, TICK_MS);
  timer.unref();
  return () => {
    clearInterval(timer);
    computed.tell();
    waited.tell();
  };
}

const rounded = (ms: number): number => Math.round(ms * 10) / 10;
