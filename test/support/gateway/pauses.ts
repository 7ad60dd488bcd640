// What a gateway's own watch told of its event loops, of the main thread and of the workers.

/** As the log has it. */
export interface Pause {
  readonly thread: string;
  readonly ms: number;
  readonly cpu_ms: number;
}

/** What of it the thread computed: a busy machine makes the rest. */
const computedMs = ({ ms, cpu_ms }: Pause): number => Math.min(ms, cpu_ms);

/** The pauses of which the thread computed more than this, the worst first. */
export function computedPauses(log: string, computedMsMax: number): Pause[] {
  return log
    .split("\n")
    .filter((line) => line.includes('"event_loop_blocked"'))
    .map((line): Pause => JSON.parse(line))
    .filter((pause) => computedMs(pause) > computedMsMax)
    .sort((a, b) => computedMs(b) - computedMs(a));
}
