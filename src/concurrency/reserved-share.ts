// Places shared out among holders (accounts), an eighth of them reserved for holders of none. A holder alone may have
// nearly all. The more holders there are, the less each may have. So however much some hold, and however long, everybody
// else finds a first place, and holders that want more than there is end up with equal shares of the rest. A fair share
// (fair-share.ts) reserves nothing: of what it leaves free, sixteen who want much may leave the seventeenth nothing.

/** One place of so many is reserved. */
const RESERVED = 8;

/**
 * Whether one who holds `own` of `taken` places may have another, when so many hold any, itself included. Pure.
 */
export function mayTake(own: number, taken: number, holders: number, total: number, round = Math.floor): boolean {
  const free = total - taken;
  const reserve = Math.max(1, Math.floor(total / RESERVED));
  const share = Math.max(1, round((total - reserve) / holders));
  return free > 0 && own < share && (free > reserve || own === 0);
}

/** @param round what becomes of a part of a place when equal shares are made */
export function createReservedShare(total: number, round = Math.floor) {
  const held = new Map<string, number>();
  let taken = 0;
  return {
    /**
     * False when this one has its share, or nothing is free.
     *
     * @param isFirst whether it may have what is free, whatever its share
     */
    take(name: string, isFirst = false): boolean {
      const own = held.get(name) ?? 0;
      const holders = held.size + (own === 0 ? 1 : 0);
      if (isFirst ? taken === total : !mayTake(own, taken, holders, total, round)) return false;
      held.set(name, own + 1);
      taken++;
      return true;
    },
    giveBack(name: string): void {
      const left = (held.get(name) ?? 0) - 1;
      if (left > 0) held.set(name, left);
      else held.delete(name);
      taken--;
    },
  };
}
