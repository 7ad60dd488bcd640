// A value that is dear to find out and that many ask for. It is kept for some seconds. Whoever asks later waits for a new
// one, but no longer than a moment: then it is not known, unless it was slow to find out before as well.
import { endsWithin } from "../concurrency/deadline.ts";

const KEPT_MS = 3_000;
const WAIT_MS_MAX = 1_000;
/** Finding it out takes one part in so many of the time, at most. */
const PART_OF_TIME = 20;
/** It may take so many times as long as the last time, before the last value is given up. */
const SLOWER_MAX = 3;

interface Known<T> {
  readonly value: T;
  readonly until: number;
  /** For whoever can't wait for the new one. */
  readonly usableUntil: number;
}

/** Null when the value is not known now. */
export function knownLately<T>(find: () => Promise<T>): () => Promise<T | null> {
  let known: Known<T> | null = null;
  let finding: Promise<void> | null = null;

  /** Never rejects. */
  async function findAnew(): Promise<void> {
    const startedAt = performance.now();
    try {
      const value = await find();
      const now = performance.now();
      const took = now - startedAt;
      const until = now + Math.max(KEPT_MS, took * PART_OF_TIME);
      known = { value, until, usableUntil: until + took * SLOWER_MAX };
    } catch {
      known = null;
    } finally {
      finding = null;
    }
  }

  return async () => {
    if (known === null || performance.now() >= known.until) {
      finding ??= findAnew();
      await endsWithin(WAIT_MS_MAX, finding);
    }
    return known !== null && performance.now() < known.usableUntil ? known.value : null;
  };
}
