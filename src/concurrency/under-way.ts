// What is under way, for whoever has to wait until nothing is.

export interface UnderWay {
  /** Something is under way until what this gives is called; a second time is nothing. */
  enter(): () => void;
  /** Resolves when nothing is under way. */
  idle(): Promise<void>;
}

export function createUnderWay(): UnderWay {
  let count = 0;
  let idle = Promise.withResolvers<void>();
  return {
    enter() {
      count++;
      let isIn = true;
      return () => {
        if (!isIn) return;
        isIn = false;
        count--;
        if (count > 0) return;
        idle.resolve();
        idle = Promise.withResolvers<void>();
      };
    },
    async idle() {
      while (count > 0) await idle.promise;
    },
  };
}
