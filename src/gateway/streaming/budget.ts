// Memory that all exchanges share, so that it is bounded however many there are. A tenant may hold of it as much as it
// leaves free: however many have taken all that they may, the next one finds some.

export interface Share {
  /** Takes as many of the bytes as the tenant may have now, and gives how many those are. */
  take(bytes: number): number;
  giveBack(bytes: number): void;
}

/** Gives the share of a tenant. */
export type Budget = (tenant: string) => Share;

export function createBudget(bytesMax: number): Budget {
  const heldBy = new Map<string, number>();
  let free = bytesMax;

  function hold(tenant: string, more: number): void {
    const own = (heldBy.get(tenant) ?? 0) + more;
    if (own === 0) heldBy.delete(tenant);
    else heldBy.set(tenant, own);
    free -= more;
  }

  return (tenant) => ({
    take(bytes) {
      const most = Math.floor((free - (heldBy.get(tenant) ?? 0)) / 2);
      const taken = Math.max(0, Math.min(bytes, most));
      hold(tenant, taken);
      return taken;
    },
    giveBack: (bytes) => hold(tenant, -bytes),
  });
}
