// Places of one kind (settlements at work, connections) shared out among those who take them. Whoever is alone may
// have nearly all. The more there are, the less each may take, and a part stays free for those who come: it is for first
// places only. So all that some hold, for however long, keeps no other from its first place, and those who want more
// than there is end up with equal shares of the rest.

export interface Permits {
  /** False when this one has its share, or nothing is free. */
  take(name: string): boolean;
  release(name: string): void;
}

/** One of so many is for first places. */
const RESERVED = 8;

/**
 * Whether one who holds `own` of `taken` places may have another, when so many hold any, itself included. Pure.
 */
export function mayTake(own: number, taken: number, holders: number, total: number): boolean {
  const free = total - taken;
  const reserve = Math.max(1, Math.floor(total / RESERVED));
  const share = Math.max(1, Math.floor((total - reserve) / holders));
  return free > 0 && own < share && (free > reserve || own === 0);
}

export function createPermits(total: number): Permits {
  const held = new Map<string, number>();
  let taken = 0;
  return {
    take(name) {
      const own = held.get(name) ?? 0;
      const holders = held.size + (own === 0 ? 1 : 0);
      if (!mayTake(own, taken, holders, total)) return false;
      held.set(name, own + 1);
      taken++;
      return true;
    },
    release(name) {
      const left = (held.get(name) ?? 0) - 1;
      if (left > 0) held.set(name, left);
      else held.delete(name);
      taken--;
    },
  };
}
