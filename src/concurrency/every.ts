// Work that is done again and again while the process runs.

/**
 * Does the work `ms` after it has last ended, the first time after `ms`. It may give a number: another pause, for once. It
 * must not reject: what a failure means is for the work to say.
 *
 * @returns what stops it: what is under way goes on, and nothing follows
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
