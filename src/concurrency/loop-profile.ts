// What the event loop spends its time on. Larger pieces of work that can't be interrupted name themselves, so that
// whoever notices that the loop was blocked can say by what.
// One per thread, since each thread has an event loop of its own to account for.

export interface Spent {
  readonly work: string;
  readonly ms: number;
}

let spent = new Map<string, number>();
/** Milliseconds of the pieces inside the one that runs. */
let inner = 0;

/**
 * Does a piece of work under a name. Of an async function only the part up to its first `await` counts.
 *
 * @param work a short fixed name, which is logged
 */
export function during<T>(work: string, piece: () => T): T {
  const startedAt = performance.now();
  const beside = inner;
  inner = 0;
  try {
    return piece();
  } finally {
    const ms = performance.now() - startedAt;
    spend(work, ms - inner);
    inner = beside + ms;
  }
}

/** Counts time for work that is not one piece. */
export function spend(work: string, ms: number): void {
  spent.set(work, (spent.get(work) ?? 0) + ms);
}

/** The work that took the most time since the last call of this, without its pieces under other names. */
export function mostSpent(): Spent | null {
  if (spent.size === 0) return null;
  let most: Spent | null = null;
  for (const [work, ms] of spent) if (most === null || ms > most.ms) most = { work, ms };
  spent = new Map();
  return most;
}
