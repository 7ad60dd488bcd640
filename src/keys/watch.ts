// A look at the database about every second, for what other processes change. What was seen is fresh for two seconds; who
// needs it when it is older, as after a pause of the process, has the next look awaited first. What is older than ten seconds
// is no longer gone by: a token may have been revoked since.
import { endsWithin } from "../concurrency/deadline.ts";
import { type Poll, poll } from "../concurrency/poll.ts";

const LOOK_MS = 1_000;
const FRESH_MS = 2_000;
/** A database that is away for less than this has nobody refused. It is as long as its absence may stay unanswered. */
const USABLE_MS = 10_000;
/**
 * Nobody waits longer for a look: without the database there is nothing to be had anyway, and its absence is answered within
 * ten seconds, nine of which a write may take.
 */
const WAIT_MS_MAX = 500;
/** Least time between the beginnings of two looks, whoever wants them. */
const PAUSE_MS = 100;

/**
 * @param look is not called again before it has ended
 * @param failed told of the first of several failures in a row
 * @param now milliseconds of a clock that never goes back
 */
export function createWatch(
  look: () => Promise<void>,
  failed: (error: unknown) => void,
  now: () => number = () => performance.now(),
) {
  let watching: Poll | null = null;
  let startedAt = Number.NEGATIVE_INFINITY;
  let seenAt = now();
  let isFailing = false;
  let underWay: Promise<void> | null = null;
  let next: Promise<void> | null = null;

  async function lookOnce(): Promise<void> {
    startedAt = now();
    try {
      await look();
      seenAt = startedAt;
      isFailing = false;
    } catch (error) {
      if (!isFailing) failed(error);
      isFailing = true;
    } finally {
      underWay = null;
    }
  }

  function lookNow(): Promise<void> {
    underWay ??= lookOnce();
    return underWay;
  }

  /** A look that begins after this call, shared by all who want one. */
  function lookAfresh(): Promise<void> {
    next ??= (async () => {
      await underWay;
      const pause = startedAt + PAUSE_MS - now();
      if (pause > 0) await Bun.sleep(pause);
      next = null;
      await lookNow();
    })();
    return next;
  }

  const isSeenWithin = (ms: number) => watching === null || now() - seenAt < ms;

  return {
    /** Always, in a process that does not watch. */
    isFresh: () => isSeenWithin(FRESH_MS),
    /** Whether it may still be gone by. */
    isUsable: () => isSeenWithin(USABLE_MS),
    /** Waits until what was seen is fresh, if that can be had. */
    async refreshed(): Promise<void> {
      if (isSeenWithin(FRESH_MS)) return;
      const look = lookNow();
      const left = isSeenWithin(USABLE_MS) ? startedAt + WAIT_MS_MAX - now() : WAIT_MS_MAX;
      if (left > 0) await endsWithin(left, look);
    },
    /** Looks for what may have changed a moment ago. */
    async renewed(): Promise<void> {
      await endsWithin(WAIT_MS_MAX, lookAfresh());
    },
    start() {
      seenAt = now();
      watching = poll({ leastMs: LOOK_MS, mostMs: LOOK_MS }, async () => {
        await lookNow();
        return false;
      });
    },
    async stop(): Promise<void> {
      watching?.stop();
      await underWay;
    },
  };
}
