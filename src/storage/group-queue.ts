// The works that wait to be written, and which of them are the next group: by turns of the tenants when there are more.
import { createTurnQueue } from "../concurrency/turn-queue.ts";
import { FOR_ALL } from "./commands.ts";
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

/** Works that are done for all: beside them a thousand tenants may have turns. */
const isForAll = ({ tenant }: WaitingWrite) => tenant === FOR_ALL;

const isLarge = ({ bytes }: WaitingWrite) => bytes >= LARGE_BYTES;

/** One of each, for as long as there are any. */
function alternating(some: readonly WaitingWrite[], others: readonly WaitingWrite[]): readonly WaitingWrite[] {
  if (some.length === 0) return others;
  if (others.length === 0) return some;
  const all = Array.from({ length: Math.max(some.length, others.length) }, (_, at) => [some[at], others[at]]);
  return all.flat().filter((work) => work !== undefined);
}

export function createGroupQueue() {
  const small = createTurnQueue<WaitingWrite>();
  const forAll = createTurnQueue<WaitingWrite>();
  const large = createTurnQueue<WaitingWrite>();
  let undone: readonly WaitingWrite[] = [];
  let isLargeDue = false;
  let isForAllFirst = true;

  const queues = [small, forAll, large];
  const queueOf = (work: WaitingWrite) => {
    if (isLarge(work)) return large;
    return isForAll(work) ? forAll : small;
  };

  /**
   * Those for all have every second place, so that neither they nor the tenants wait for all of the others. The first place
   * goes by turns too, since it may be the only one that the group has time for.
   */
  function nextSmall(): readonly WaitingWrite[] {
    const some = forAll.take(Math.max(GROUP_WORKS_MAX / 2, GROUP_WORKS_MAX - small.size));
    const others = small.take(GROUP_WORKS_MAX - some.length);
    if (!isLargeDue) isForAllFirst = !isForAllFirst;
    return isForAllFirst ? alternating(some, others) : alternating(others, some);
  }

  return {
    size: () => small.size + forAll.size + large.size + undone.length,
    add: (work: WaitingWrite) => queueOf(work).add(work),
    /** They come next. Those that are to run apart do so all together, as the failed one is among them. */
    putBack(works: readonly WaitingWrite[], apart: boolean): void {
      if (apart) {
        undone = works;
        return;
      }
      for (const queue of queues) queue.putBack(works.filter((work) => queueOf(work) === queue));
    },
    next(): readonly WaitingWrite[] {
      if (undone.length > 0) {
        const again = undone;
        undone = [];
        return again;
      }
      if (large.size === 0) {
        isLargeDue = false;
        return nextSmall();
      }
      const group = [...(isLargeDue ? large.take(1) : []), ...nextSmall()];
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
      const works = [...undone, ...queues.flatMap((queue) => queue.take(queue.size))];
      undone = [];
      return works;
    },
  };
}
