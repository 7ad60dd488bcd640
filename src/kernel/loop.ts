// Work that is repeated while the process runs, and work on many items.

/**
 * Does the work, which must not reject, after `ms`, and again `ms` after its end, or after the number that it returns. The returned
 * function stops it: work under way goes on, and nothing follows.
 */
export function every(ms: number, work: () => Promise<unknown>): () => void {
  let isOver = false;
  let timer = schedule(ms);

  function schedule(pause: number): ReturnType<typeof setTimeout> {
    return setTimeout(async () => {
      const next = await work();
      if (!isOver) timer = schedule(typeof next === "number" ? next : ms);
    }, pause);
  }

  return () => {
    isOver = true;
    clearTimeout(timer);
  };
}

// Work that looks for something to do, often while there is something and seldom while there is nothing: an idle process
// asks its database little. What makes work in this process wakes it.

export type Poll = ReturnType<typeof poll>;

/**
 * Looks for the first time after `leastMs`; after a look that found nothing the pause doubles. Does not keep the process alive.
 * @param pauses `mostMs`: so late may work of another process be found
 * @param look must not reject. True: it found something; a number: there will be something in so many milliseconds
 */
export function poll(pauses: Record<"leastMs" | "mostMs", number>, look: () => Promise<boolean | number>) {
  const { leastMs, mostMs } = pauses;
  let pause = leastMs;
  let isOver = false;
  let isWanted = false;
  let [timer, dueAt] = schedule(leastMs);

  function schedule(ms: number): [ReturnType<typeof setTimeout>, number] {
    const next = setTimeout(lookOnce, ms);
    next.unref();
    return [next, performance.now() + ms];
  }

  async function lookOnce(): Promise<void> {
    isWanted = false;
    const found = await look();
    if (isOver) return;
    pause = found === true || isWanted ? leastMs : Math.min(pause * 2, mostMs);
    const known = typeof found === "number" ? Math.max(found, leastMs) : mostMs;
    [timer, dueAt] = schedule(Math.min(pause, known));
  }

  return {
    /** There is something to do, or will be in a moment: the next look comes in `leastMs` at most. */
    soon(): void {
      pause = leastMs;
      isWanted = true;
      // Nor while a look is under way, whose time has come already.
      if (isOver || dueAt - performance.now() <= leastMs) return;
      clearTimeout(timer);
      [timer, dueAt] = schedule(leastMs);
    },
    /** A look under way goes on, and nothing follows. */
    stop(): void {
      isOver = true;
      clearTimeout(timer);
    },
  };
}

/** Runs `work` on each item, in order, at most `limit` at a time. Resolves when all are done. */
export async function mapLimit<T>(items: Iterable<T>, limit: number, work: (item: T) => Promise<void>): Promise<void> {
  const queue = items[Symbol.iterator]();
  const worker = async () => {
    for (let next = queue.next(); !next.done; next = queue.next()) await work(next.value);
  };
  const results = await Promise.allSettled(Array.from({ length: limit }, worker));
  for (const result of results) if (result.status === "rejected") throw result.reason;
}

/** A streamed call takes 0.2 ms from its record to its dial, so that so many take less than 20 ms. */
const AT_ONCE = 64;

/**
 * Calls `each` for all who have waited for one thing, in their order, the first ones at once: few in each turn of the event
 * loop, since what each does next is work of its own.
 */
export async function inSlices<T>(items: readonly T[], each: (item: T) => void): Promise<void> {
  for (let at = 0; at < items.length; at += AT_ONCE) {
    if (at > 0) await new Promise(setImmediate);
    for (const item of items.slice(at, at + AT_ONCE)) each(item);
  }
}
