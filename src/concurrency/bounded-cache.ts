// A map that forgets what was not used lately. It keeps two generations: what is used moves to the young one,
// and when that is full the old one is dropped. So a hit costs one look-up and memory stays bounded, without
// the list that an exact least-recently-used order needs.

export interface BoundedCache<K, V> {
  get(key: K): V | undefined;
  /** `weight` is the entry's share of the cache's bound. */
  set(key: K, value: V, weight?: number): void;
}

interface CacheEntry<V> {
  readonly value: V;
  readonly weight: number;
}

/** @param weightMax the weight of all entries together; half of it is kept for certain */
export function boundedCache<K, V>(weightMax: number): BoundedCache<K, V> {
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
    get(key) {
      const fresh = young.get(key);
      if (fresh !== undefined) return fresh.value;
      const aged = old.get(key);
      if (aged === undefined) return undefined;
      old.delete(key);
      put(key, aged);
      return aged.value;
    },
    set(key, value, weight = 1) {
      remove(key);
      if (weight <= weightMax / 2) put(key, { value, weight });
    },
  };
}
