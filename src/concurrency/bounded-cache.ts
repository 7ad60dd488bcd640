// A map that forgets entries that were not used lately. It keeps two generations: a used entry moves to the young one,
// and when that is full the old one is dropped. So a hit costs one look-up and memory stays bounded, without the list
// that an exact least-recently-used order needs.

interface CacheEntry<V> {
  readonly value: V;
  readonly weight: number;
}

/** @param weightMax the weight of all entries together; half of it is kept for certain */
export function boundedCache<K, V>(weightMax: number) {
  let young = new Map<K, CacheEntry<V>>();
  let old = new Map<K, CacheEntry<V>>();
  let youngWeight = 0;

  function remove(key: K): void {
    old.delete(key);
    const held = young.get(key);
    if (held === undefined) return;
    youngWeight -= held.weight;
    young.delete(key);
  }

  function put(key: K, entry: CacheEntry<V>): void {
    if (youngWeight + entry.weight > weightMax / 2) [old, young, youngWeight] = [young, new Map(), 0];
    young.set(key, entry);
    youngWeight += entry.weight;
  }

  return {
    get(key: K): V | undefined {
      const fresh = young.get(key);
      if (fresh !== undefined) return fresh.value;
      const aged = old.get(key);
      if (aged === undefined) return undefined;
      old.delete(key);
      put(key, aged);
      return aged.value;
    },
    /** `weight` is the entry's share of the cache's bound. */
    set(key: K, value: V, weight = 1): void {
      remove(key);
      if (weight <= weightMax / 2) put(key, { value, weight });
    },
  };
}
