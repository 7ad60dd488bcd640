// Counts what is under way, for those who wait until nothing is.

export type UnderWay = ReturnType<typeof createUnderWay>;

export function createUnderWay() {
  let count = 0;
  let idle = Promise.withResolvers<void>();
  return {
    /** Something is under way until the returned function is called. Calling that again does nothing. */
    enter(): () => void {
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
    /** Resolves when nothing is under way. */
    async idle(): Promise<void> {
      while (count > 0) await idle.promise;
    },
  };
}
