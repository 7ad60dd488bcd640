// Work that looks for something to do, often while there is something and seldom while there is nothing: an idle process
// asks its database little. Whoever makes work in this process wakes it; work of others is found by the next look.

interface PollOptions {
  /** The pause between two looks that find something. */
  readonly leastMs: number;
  /** The longest pause: so late may work of another process be found. */
  readonly mostMs: number;
}

export interface Poll {
  /** There is something to do, or will be in a moment: the next look comes in `leastMs` at most. */
  soon(): void;
  /** A look under way goes on, and nothing follows. */
  stop(): void;
}

/**
 * Looks for the first time after `leastMs`. After a look that found nothing the pause doubles. It does not keep the
 * process alive.
 *
 * @param look true: it found something; a number: there will be something in so many milliseconds. It must not reject.
 */
export function poll({ leastMs, mostMs }: PollOptions, look: () => Promise<boolean | number>): Poll {
  let pause = leastMs;
  let isOver = false;
  let isLooking = false;
  let isWanted = false;
  let [timer, dueAt] = schedule(leastMs);

  function schedule(ms: number): [ReturnType<typeof setTimeout>, number] {
    const next = setTimeout(lookOnce, ms);
    next.unref();
    return [next, performance.now() + ms];
  }

  async function lookOnce(): Promise<void> {
    isLooking = true;
    isWanted = false;
    const found = await look();
    isLooking = false;
    if (isOver) return;
    pause = found === true || isWanted ? leastMs : Math.min(pause * 2, mostMs);
    const known = typeof found === "number" ? Math.max(found, leastMs) : mostMs;
    [timer, dueAt] = schedule(Math.min(pause, known));
  }

  return {
    soon() {
      pause = leastMs;
      isWanted = true;
      if (isOver || isLooking || dueAt - performance.now() <= leastMs) return;
      clearTimeout(timer);
      [timer, dueAt] = schedule(leastMs);
    },
    stop() {
      isOver = true;
      clearTimeout(timer);
    },
  };
}
