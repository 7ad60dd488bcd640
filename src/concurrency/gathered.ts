// Many who want the same asked at about the same time, each for itself: one question for all of them. The first one is
// asked at the end of its turn of the event loop; those that come while a question is under way are asked for together
// when it has been answered. So however many come, there is one question at a time, and it says how many they are.
import { inSlices } from "./slices.ts";

interface Waiter<A> {
  resolve(answer: A): void;
  reject(error: unknown): void;
}

interface Round<S, A> {
  readonly subject: S;
  readonly waiters: Waiter<A>[];
}

/**
 * @param ask asks for so many, and gives what answers each of them, by its place from 0 in the order of arrival
 */
export function createGathering<S, A>(ask: (subject: S, count: number) => Promise<(place: number) => A>) {
  /** By key, those who are asked for next. */
  const gathering = new Map<string, Round<S, A>>();
  const asking = new Set<string>();

  async function askNext(key: string): Promise<void> {
    const round = gathering.get(key);
    if (round === undefined) return;
    gathering.delete(key);
    asking.add(key);
    try {
      const answerOf = await ask(round.subject, round.waiters.length);
      void inSlices([...round.waiters.entries()], ([place, { resolve }]) => resolve(answerOf(place)));
    } catch (error) {
      // Those who came meanwhile have waited as well, and to ask again could take them as long once more.
      const behind = gathering.get(key)?.waiters ?? [];
      gathering.delete(key);
      void inSlices([...round.waiters, ...behind], ({ reject }) => reject(error));
    }
    asking.delete(key);
    if (gathering.has(key)) void askNext(key);
  }

  return {
    /**
     * What is answered to one more.
     *
     * @param key what is asked about; the subject is the same whenever the key is
     */
    join(key: string, subject: S): Promise<A> {
      const { promise, resolve, reject } = Promise.withResolvers<A>();
      const round = gathering.get(key);
      if (round !== undefined) {
        round.waiters.push({ resolve, reject });
        return promise;
      }
      gathering.set(key, { subject, waiters: [{ resolve, reject }] });
      if (!asking.has(key)) setImmediate(() => void askNext(key));
      return promise;
    },
  };
}
