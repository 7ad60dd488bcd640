// One run of a work at a time. Whoever asks during a run gets the outcome of the next one, together with all who do, so
// that nobody is told what was so before it asked.
export function oneAtATime<T>(work: () => Promise<T>): () => Promise<T> {
  let current: Promise<T> | null = null;
  let next: Promise<T> | null = null;

  function run(): Promise<T> {
    next = null;
    current = work().finally(() => {
      current = null;
    });
    return current;
  }

  return () => {
    if (next !== null) return next;
    if (current === null) return run();
    next = current.then(run, run);
    return next;
  };
}
