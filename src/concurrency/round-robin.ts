// Turns among all that wait: one of each tenant in turn, and within a tenant in the order of arrival.

export function createRoundRobin<T>() {
  const waiting = new Map<string, Set<T>>();
  let size = 0;
  return {
    get size() {
      return size;
    },
    /** An item that waits already keeps its place. */
    add(tenant: string, item: T): void {
      const items = waiting.get(tenant) ?? new Set<T>();
      if (items.has(item)) return;
      waiting.set(tenant, items.add(item));
      size++;
    },
    /** Takes out the next one that is of none of the tenants `passedOver`. */
    next(passedOver?: ReadonlySet<string>): { readonly tenant: string; readonly item: T } | undefined {
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
