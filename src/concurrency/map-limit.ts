// Work on many items, with a bound on how many at a time.

/** Runs `work` on each item, in order, at most `limit` at a time. Resolves when all are done. */
export async function mapLimit<T>(items: Iterable<T>, limit: number, work: (item: T) => Promise<void>): Promise<void> {
  const queue = items[Symbol.iterator]();
  const worker = async () => {
    for (let next = queue.next(); !next.done; next = queue.next()) await work(next.value);
  };
  const results = await Promise.allSettled(Array.from({ length: limit }, worker));
  for (const result of results) if (result.status === "rejected") throw result.reason;
}
