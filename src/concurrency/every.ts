// Work that is repeated while the process runs.

/**
 * Does the work `ms` after it last ended, the first time after `ms`. The work may return a number: the pause before the
 * next time only. It must not reject: it has to handle its own failures.
 *
 * @returns a function that stops it: work under way goes on, and nothing follows
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
