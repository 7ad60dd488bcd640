// What is under way, for whoever has to wait until nothing is.

export interface UnderWay {
  /** The work itself, counted until it has ended. */
  during<T>(work: Promise<T>): Promise<T>;
  /** Resolves when nothing is under way. */
  idle(): Promise<void>;
}

export function createUnderWay(): UnderWay {
  const all = new Set<Promise<unknown>>();
  return {
    during(work) {
      const ended: Promise<unknown> = work.then(
        () => all.delete(ended),
        () => all.delete(ended),
      );
      all.add(ended);
      return work;
    },
    async idle() {
      while (all.size > 0) await Promise.all(all);
    },
  };
}
