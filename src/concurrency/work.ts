// What the event loop is spending its time on. Larger pieces of work that can't be interrupted name themselves, so
// that whoever notices that the loop was held can say by what. Each thread has its own.

export interface Spent {
  readonly work: string;
  readonly ms: number;
}

let spent = new Map<string, number>();
/** Of the pieces inside the one that runs. */
let inner = 0;

/**
 * Does a piece of work under a name. Of an async function that is the part up to its first `await`.
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

/** Of work that can't be told as one piece. */
export function spend(work: string, ms: number): void {
  spent.set(work, (spent.get(work) ?? 0) + ms);
}

/** The work that took the most time since this was last asked, without what it did under other names. */
export function mostSpent(): Spent | null {
  if (spent.size === 0) return null;
  let most: Spent | null = null;
  for (const [work, ms] of spent) if (most === null || ms > most.ms) most = { work, ms };
  spent = new Map();
  return most;
}
