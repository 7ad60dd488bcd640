// What waits to be done, several pieces at a time. While all that waits is done together, it is in the order of arrival.
// Of more, one of each tenant in turn is taken, and what is one tenant's in its order: so whoever has little to do waits
// for one round, however much another one has.

interface OfTenant {
  readonly tenant: string;
}

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

  take(): T | undefined {
    if (this.#next.length === 0) [this.#next, this.#added] = [this.#added.reverse(), []];
    return this.#next.pop();
  }
}

export function createTurnQueue<T extends OfTenant>() {
  /** Behind all that stand in lines. */
  let arrived: T[] = [];
  /** Those for which there was no room at once, by tenant. The first tenant has the next turn. */
  let lines = new Map<string, Line<T>>();
  let inLines = 0;

  /** Each of them once, so that the rest of a long line costs nothing when some of it are taken. */
  function lineUp(): void {
    for (const item of arrived) {
      const line = lines.get(item.tenant) ?? new Line<T>();
      lines.set(item.tenant, line);
      line.add(item);
    }
    inLines += arrived.length;
    arrived = [];
  }

  return {
    get size(): number {
      return arrived.length + inLines;
    },
    add: (item: T): void => void arrived.push(item),
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
