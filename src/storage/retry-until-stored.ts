// Waiting for a store that is away: a step that must not be lost is repeated until it is stored.
import { Fault } from "../core/fault.ts";

const PAUSE_MS_FIRST = 100;
const PAUSE_MS_MOST = 5_000;

/**
 * Repeats a step for as long as the store is away. When it is time to stop, the last error is thrown.
 *
 * @param pauseMsMost the longest pause between two tries
 */
export async function untilStored<T>(
  step: () => Promise<T>,
  stop: () => boolean,
  pauseMsMost = PAUSE_MS_MOST,
): Promise<T> {
  for (let pause = PAUSE_MS_FIRST; ; pause = Math.min(pause * 2, pauseMsMost)) {
    try {
      return await step();
    } catch (error) {
      if (!(error instanceof Fault) || error.kind !== "unavailable" || stop()) throw error;
    }
    await Bun.sleep(pause);
  }
}
