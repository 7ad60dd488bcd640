// The works that wait to be written, and which of them are the next group.
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
  let small: WaitingWrite[] = [];
  let large: WaitingWrite[] = [];
  let undone: readonly WaitingWrite[] = [];
  let isLargeDue = false;

  return {
    size: () => small.length + large.length + undone.length,
    add: (work: WaitingWrite) => (isLarge(work) ? large : small).push(work),
    /** They come next. Those that are to run apart do so all together, as the failed one is among them. */
    putBack(works: readonly WaitingWrite[], apart: boolean): void {
      if (apart) {
        undone = works;
        return;
      }
      small = [...works.filter((work) => !isLarge(work)), ...small];
      large = [...works.filter(isLarge), ...large];
    },
    next(): readonly WaitingWrite[] {
      if (undone.length > 0) {
        const again = undone;
        undone = [];
        return again;
      }
      if (large.length === 0 && small.length <= GROUP_WORKS_MAX) {
        const all = small;
        [small, isLargeDue] = [[], false];
        return all;
      }
      const group = [...(isLargeDue ? large.splice(0, 1) : []), ...small.splice(0, GROUP_WORKS_MAX)];
      let bytes = group.reduce((sum, work) => sum + work.bytes, 0);
      for (let next = large[0]; next !== undefined; next = large[0]) {
        bytes += next.bytes;
        if (group.length > 0 && bytes > GROUP_BYTES_MAX) break;
        group.push(next);
        large.shift();
      }
      isLargeDue = !isLargeDue && large.length > 0;
      return group;
    },
    all(): readonly WaitingWrite[] {
      const works = [...undone, ...small, ...large];
      [undone, small, large] = [[], [], []];
      return works;
    },
  };
}
