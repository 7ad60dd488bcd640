// A cache with a bound, and a share for each tenant whose calls fill it. A tenant that fills it loses entries of its own, and
// displaces those of others only up to an even share. Of a tenant's entries the oldest goes first, unless it was used since
// the last time it was considered (the "clock" algorithm), so a hit costs one look-up.
import { MAX } from "./limits.ts";

interface TenantEntry<V> {
  readonly tenant: string;
  readonly value: V;
  readonly weight: number;
  isUsed: boolean;
}

interface CacheShare<K> {
  weight: number;
  /** The oldest first. */
  readonly keys: Set<K>;
  /** Stays where it is between two removals: a new one would pass all keys that were removed (measured: 10 µs of 11). */
  readonly fromOldest: Iterable<K>;
}

/** @param weightMax of all entries together @param evicted called with the key of each entry that was removed to make room */
export function tenantCache<K, V>(weightMax: number, evicted?: (key: K) => void) {
  const entries = new Map<K, TenantEntry<V>>();
  const shares = new Map<string, CacheShare<K>>();
  let weightOfAll = 0;

  function remove(key: K): void {
    const entry = entries.get(key);
    const share = entry === undefined ? undefined : shares.get(entry.tenant);
    if (entry === undefined || share === undefined) return;
    entries.delete(key);
    share.keys.delete(key);
    share.weight -= entry.weight;
    weightOfAll -= entry.weight;
    if (share.keys.size === 0) shares.delete(entry.tenant);
  }

  /** Removes the oldest entry that was not used; or, where all of the oldest were used, the next one. */
  function removeOneOf({ keys, fromOldest }: CacheShare<K>): void {
    let passed = 0;
    for (const key of fromOldest) {
      const entry = entries.get(key);
      if (entry?.isUsed !== true || ++passed > MAX.cachePassedOver) {
        remove(key);
        evicted?.(key);
        return;
      }
      entry.isUsed = false;
      keys.delete(key);
      keys.add(key);
    }
  }

  /** The share that makes room: the tenant's own, or that of the next tenant with more than an even share. */
  function evictFrom(own: CacheShare<K> | undefined, weight: number): CacheShare<K> | undefined {
    const even = weightMax / (shares.size + (own === undefined ? 1 : 0));
    if (own !== undefined && own.weight + weight > even) return own;
    for (let left = shares.size; left > 0; left--) {
      const [next] = shares;
      if (next === undefined) break;
      const [tenant, share] = next;
      if (share.weight > even) return share;
      // It is considered last from now on.
      shares.delete(tenant);
      shares.set(tenant, share);
    }
    return own ?? shares.values().next().value;
  }

  function makeRoom(tenant: string, weight: number): void {
    while (weightOfAll + weight > weightMax) {
      const share = evictFrom(shares.get(tenant), weight);
      if (share === undefined) return;
      removeOneOf(share);
    }
  }

  return {
    get(key: K): V | undefined {
      const entry = entries.get(key);
      if (entry === undefined) return undefined;
      entry.isUsed = true;
      return entry.value;
    },
    /** `weight` is the entry's part of the cache's bound. A key belongs to one tenant. */
    set(tenant: string, key: K, value: V, weight = 1): void {
      remove(key);
      if (weight > weightMax) return;
      makeRoom(tenant, weight);
      const share = shares.getOrInsertComputed(tenant, () => {
        const keys = new Set<K>();
        return { weight: 0, keys, fromOldest: keys.values() };
      });
      share.keys.add(key);
      share.weight += weight;
      weightOfAll += weight;
      entries.set(key, { tenant, value, weight, isUsed: false });
    },
    delete: remove,
  };
}

/** A cache of one share, for what the process itself asks for. */
export function boundedCache<K, V>(weightMax: number) {
  const { get, set } = tenantCache<K, V>(weightMax);
  return { get, set: (key: K, value: V, weight?: number) => set("", key, value, weight) };
}
