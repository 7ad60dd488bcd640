// Many pieces taken together: a queue by turns of tenants, and one question for all who ask the same.
//
// While all that waits is taken at once, it comes in the order of arrival.
// When there is more, one piece of each tenant in turn is taken, and the pieces of one tenant in their order: a tenant that
// has little to do waits for one round, however much another one has.
import { inSlices } from "./loop.ts";
import { outlastRequest } from "./wait.ts";

/** First in, first out; what was taken can be put back. */
class Line<T> {
  /** The next one stands last. */
  #next: T[] = [];
  #added: T[] = [];

  get isEmpty(): boolean {
    return this.#next.length === 0 && this.#added.length === 0;
  }

  add(item: T): void {
    this.#added.push(item);
  }

  putBack(item: T): void {
    this.#next.push(item);
  }

  forEach(visit: (item: T) => void): void {
    for (const item of this.#next) visit(item);
    for (const item of this.#added) visit(item);
  }

  take(): T | undefined {
    if (this.#next.length === 0) [this.#next, this.#added] = [this.#added.reverse(), []];
    return this.#next.pop();
  }
}

export function createTurnQueue<T extends { readonly tenant: string }>() {
  /** Behind all that stand in lines. */
  let arrived: T[] = [];
  /** Those for which there was no room at once, by tenant. The first tenant has the next turn. */
  let lines = new Map<string, Line<T>>();
  let inLines = 0;

  /** Each of them once, so that the rest of a long line costs nothing when some of it are taken. */
  function lineUp(): void {
    for (const item of arrived) lines.getOrInsertComputed(item.tenant, () => new Line<T>()).add(item);
    inLines += arrived.length;
    arrived = [];
  }

  return {
    get size(): number {
      return arrived.length + inLines;
    },
    add: (item: T): void => void arrived.push(item),
    /** Visits all that wait, in any order. */
    forEach(visit: (item: T) => void): void {
      for (const item of arrived) visit(item);
      for (const line of lines.values()) line.forEach(visit);
    },
    /** Takes out the next ones, at most so many. */
    take(most: number): readonly T[] {
      if (inLines === 0 && arrived.length <= most) {
        const all = arrived;
        arrived = [];
        return all;
      }
      lineUp();
      const taken: T[] = [];
      // A tenant that is not through stands last again, and the loop comes to it there.
      for (const [tenant, line] of lines) {
        if (taken.length === most) break;
        const item = line.take();
        if (item !== undefined) taken.push(item);
        lines.delete(tenant);
        if (!line.isEmpty) lines.set(tenant, line);
      }
      inLines -= taken.length;
      return taken;
    },
    /** What was taken last and could not be done yet: it comes next, in this order. */
    putBack(items: readonly T[]): void {
      if (items.length === 0) return;
      const others = lines;
      lines = new Map(items.map(({ tenant }) => [tenant, others.get(tenant) ?? new Line<T>()]));
      for (const item of items.toReversed()) lines.get(item.tenant)?.putBack(item);
      for (const [tenant, line] of others) if (!lines.has(tenant)) lines.set(tenant, line);
      inLines += items.length;
    },
  };
}

// One question for all who want the same asked at about the same time. The first one is asked at the end of its turn of the
// event loop; those that come while a question is under way are asked for together when it has been answered.

/** @param ask asks for so many, and gives what answers each of them, by its place from 0 in the order of arrival */
export function createBatcher<S, A>(ask: (subject: S, count: number) => Promise<(place: number) => A>) {
  /** By key, those who are asked for next. */
  const rounds = new Map<string, { readonly subject: S; readonly waiters: PromiseWithResolvers<A>[] }>();
  const asking = new Set<string>();

  async function askNext(key: string): Promise<void> {
    const round = rounds.get(key);
    if (round === undefined) return;
    rounds.delete(key);
    asking.add(key);
    try {
      // None of those who wait decides how long the others may.
      const answerOf = await outlastRequest(() => ask(round.subject, round.waiters.length));
      void inSlices([...round.waiters.entries()], ([place, { resolve }]) => resolve(answerOf(place)));
    } catch (error) {
      // Those who came meanwhile have waited as well, and to ask again could take them as long once more.
      const behind = rounds.get(key)?.waiters ?? [];
      rounds.delete(key);
      void inSlices([...round.waiters, ...behind], ({ reject }) => reject(error));
    }
    asking.delete(key);
    if (rounds.has(key)) void askNext(key);
  }

  return {
    /** What is answered to one more. @param key what is asked about; the subject is the same whenever the key is */
    join(key: string, subject: S): Promise<A> {
      const waiter = Promise.withResolvers<A>();
      const round = rounds.get(key);
      if (round !== undefined) round.waiters.push(waiter);
      else {
        rounds.set(key, { subject, waiters: [waiter] });
        if (!asking.has(key)) setImmediate(() => void askNext(key));
      }
      return waiter.promise;
    },
  };
}
