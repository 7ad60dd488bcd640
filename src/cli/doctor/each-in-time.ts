// Work on as many items as there may be, a few at a time, and no longer than there is time.
import { mapLimit } from "../../concurrency/map-limit.ts";

const PARALLEL = 8;

/**
 * Resolves with how many were not begun before the end.
 *
 * @param until by performance.now()
 */
export async function eachInTime<T>(
  items: readonly T[],
  until: number,
  work: (item: T) => Promise<void>,
): Promise<number> {
  let left = 0;
  await mapLimit(items, PARALLEL, async (item) => {
    if (performance.now() < until) await work(item);
    else left++;
  });
  return left;
}
