// Many who wait until something ends, such as a call or a payment. An end that is decided in this process is announced and
// wakes them at once. One that another process decides is found by looking: one question now and then for all who wait.

/** In one question. */
const LOOKED_FOR_MAX = 500;

interface EndWaitersOptions<K> {
  nameOf(key: K): string;
  /** The pause between two questions. */
  readonly lookAgainMs: number;
  /** The names of those that have ended, or are gone. */
  endedAmong(keys: readonly K[]): Promise<readonly string[]>;
  /** Lets one who waits go on; at once where it is left out. */
  wake?(key: K, goOn: () => void): void;
}

interface Wait<K, T> {
  readonly key: K;
  readonly ms: number;
  /** Ends the wait. */
  readonly signal?: AbortSignal;
  /**
   * What it is now; undefined when nobody can say, and another look is to be taken.
   *
   * @param isLast whether what is found is taken, ended or not
   */
  look(isLast: () => boolean): Promise<T | undefined>;
  isEnded(found: T): boolean;
}

interface Listeners<K> {
  readonly key: K;
  readonly wakes: Set<() => void>;
}

export function createEndWaiters<K>(options: EndWaitersOptions<K>) {
  const { nameOf, lookAgainMs, endedAmong, wake = (_, goOn) => goOn() } = options;
  const waiting = new Map<string, Listeners<K>>();
  let isReleased = false;
  let isLooking = false;

  function announce(name: string): void {
    for (const goOn of waiting.get(name)?.wakes ?? []) goOn();
  }

  async function lookForAll(): Promise<void> {
    const keys = [...waiting.values()].map(({ key }) => key);
    for (let at = 0; at < keys.length; at += LOOKED_FOR_MAX) {
      for (const name of await endedAmong(keys.slice(at, at + LOOKED_FOR_MAX))) announce(name);
    }
  }

  function scheduleLook(): void {
    if (isLooking || waiting.size === 0) return;
    isLooking = true;
    setTimeout(async () => {
      // If the store is away, the next question is the same.
      await lookForAll().catch(() => {});
      isLooking = false;
      scheduleLook();
    }, lookAgainMs).unref();
  }

  /** Resolves at the next announcement, after `ms`, or when the signal aborts. */
  function nextChance(key: K, ms: number, signal?: AbortSignal): { passed: Promise<void>; forget(): void } {
    const name = nameOf(key);
    const { promise, resolve } = Promise.withResolvers<void>();
    const goOn = () => wake(key, resolve);
    const listeners = waiting.get(name) ?? { key, wakes: new Set() };
    waiting.set(name, listeners);
    listeners.wakes.add(goOn);
    const timer = setTimeout(goOn, ms);
    signal?.addEventListener("abort", goOn);
    function forget() {
      clearTimeout(timer);
      signal?.removeEventListener("abort", goOn);
      listeners.wakes.delete(goOn);
      if (listeners.wakes.size === 0) waiting.delete(name);
    }
    return { passed: promise, forget };
  }

  return {
    /** After the write that ended it is durable. */
    announce,
    /** Ends all waits, now and from now on, since the process is about to end: each gets what is known. */
    release(): void {
      isReleased = true;
      for (const { wakes } of waiting.values()) for (const goOn of wakes) goOn();
    },
    /** What `look` finds once it has ended; or as it is after `ms`, when the signal aborts, or at the release. */
    async wait<T>({ key, ms, signal, look, isEnded }: Wait<K, T>): Promise<T> {
      const until = performance.now() + ms;
      for (;;) {
        const left = until - performance.now();
        const isLast = () => left <= 0 || isReleased || signal?.aborted === true;
        // Listening starts before looking, so that an end in between is not missed.
        const chance = nextChance(key, Math.max(0, left), signal);
        scheduleLook();
        try {
          const found = await look(isLast);
          if (found !== undefined && (isEnded(found) || isLast())) return found;
          await chance.passed;
        } finally {
          chance.forget();
        }
      }
    },
  };
}
