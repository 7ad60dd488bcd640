// Memory that all exchanges share, so that it is bounded however many there are.
import { createFairShare } from "../../concurrency/fair-share.ts";

export interface TenantBudget {
  /** Takes as many of the bytes as the tenant may have now, and gives how many those are. */
  take(bytes: number): number;
  giveBack(bytes: number): void;
}

/** Gives the share of a tenant. */
export type Budget = (tenant: string) => TenantBudget;

export function createBudget(bytesMax: number): Budget {
  const memory = createFairShare({ size: bytesMax, least: 0 });
  return (tenant) => ({
    take(bytes) {
      const taken = Math.min(bytes, memory.roomOf(tenant));
      memory.take(tenant, null, taken);
      return taken;
    },
    giveBack: (bytes) => memory.giveBack(tenant, null, bytes),
  });
}
