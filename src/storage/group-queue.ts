// The works that wait to be written, and which of them are the next group: by turns of the tenants when there are more.
import { createTurnQueue } from "../concurrency/turn-queue.ts";
import type { WaitingWrite } from "./group-outcome.ts";

/** Bounds of one group, beside its time. */
const GROUP_WORKS_MAX = 512;
/** A commit writes what its works have changed: 5 ms for so much on an idle disk (measured), 114 ms for 32 MiB. */
export const GROUP_BYTES_MAX = 1024 * 1024;
/**
 * From here on a work is large: every second group begins with one, and no other work waits for more. While a tenant sent
 * 150 bodies of a mebibyte at a time, its neighbour's call took 1 s, and 3 s at most; with this, 17 ms and 310 (measured).
 */
const LARGE_BYTES = 16 * 1024;

const isLarge = ({ bytes }: WaitingWrite) => bytes >= LARGE_BYTES;

export function createGroupQueue() {
  const small = createTurnQueue<WaitingWrite>();
  const large = createTurnQueue<WaitingWrite>();
  let undone: readonly WaitingWrite[] = [];
  let isLargeDue = false;

  return {
    size: () => small.size + large.size + undone.length,
    add: (work: WaitingWrite) => (isLarge(work) ? large : small).add(work),
    /** They come next. Those that are to run apart do so all together, as the failed one is among them. */
    putBack(works: readonly WaitingWrite[], apart: boolean): void {
      if (apart) {
        undone = works;
        return;
      }
      small.putBack(works.filter((work) => !isLarge(work)));
      large.putBack(works.filter(isLarge));
    },
    next(): readonly WaitingWrite[] {
      if (undone.length > 0) {
        const again = undone;
        undone = [];
        return again;
      }
      if (large.size === 0) {
        isLargeDue = false;
        return small.take(GROUP_WORKS_MAX);
      }
      const group = [...(isLargeDue ? large.take(1) : []), ...small.take(GROUP_WORKS_MAX)];
      let bytes = group.reduce((sum, work) => sum + work.bytes, 0);
      for (let next = large.take(1); next[0] !== undefined; next = large.take(1)) {
        bytes += next[0].bytes;
        if (group.length > 0 && bytes > GROUP_BYTES_MAX) {
          large.putBack(next);
          break;
        }
        group.push(next[0]);
      }
      isLargeDue = !isLargeDue && large.size > 0;
      return group;
    },
    all(): readonly WaitingWrite[] {
      const works = [...undone, ...small.take(small.size), ...large.take(large.size)];
      undone = [];
      return works;
    },
  };
}
