// A value that is dear to find out and that many ask for. It is kept for some seconds. Whoever asks gets no older one, and
// waits no longer than a moment for a newer one: then it is not known.
import { withDeadline } from "../concurrency/deadline.ts";

const KEPT_MS = 3_000;
const WAIT_MS_MAX = 1_000;
/** Finding it out takes one part in so many of the time, at most. */
const PART_OF_TIME = 20;

/** Null when the value is not known now. */
export function knownLately<T>(find: () => Promise<T>): () => Promise<T | null> {
  let known: { readonly value: T; readonly until: number } | null = null;
  let finding: Promise<T> | null = null;

  async function findAnew(): Promise<T> {
    const startedAt = performance.now();
    const value = await find();
    const now = performance.now();
    known = { value, until: now + Math.max(KEPT_MS, (now - startedAt) * PART_OF_TIME) };
    return value;
  }

  return async () => {
    if (known !== null && performance.now() < known.until) return known.value;
    finding ??= findAnew().finally(() => {
      finding = null;
    });
    return await withDeadline(WAIT_MS_MAX, finding, () => new Error("not known in time")).catch(() => null);
  };
}
