// Whose turn it is among all that wait: one of each tenant in turn, and within a tenant one after the other.

export interface RoundRobin<T> {
  readonly size: number;
  /** What waits already keeps its place. */
  add(tenant: string, item: T): void;
  /** Takes out the next one; `passedOver` says of which tenants it may not be. */
  next(passedOver?: ReadonlySet<string>): { readonly tenant: string; readonly item: T } | undefined;
}

export function createRoundRobin<T>(): RoundRobin<T> {
  const waiting = new Map<string, Set<T>>();
  let size = 0;
  return {
    get size() {
      return size;
    },
    add(tenant, item) {
      const items = waiting.get(tenant) ?? new Set<T>();
      if (items.has(item)) return;
      waiting.set(tenant, items.add(item));
      size++;
    },
    next(passedOver) {
      for (const [tenant, items] of waiting) {
        if (passedOver?.has(tenant)) continue;
        // It stands last from now on.
        waiting.delete(tenant);
        for (const item of items) {
          items.delete(item);
          if (items.size > 0) waiting.set(tenant, items);
          size--;
          return { tenant, item };
        }
      }
      return undefined;
    },
  };
}
