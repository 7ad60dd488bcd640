// Memory that all exchanges share, so that it is bounded however many there are.
import { createFairShare } from "../../concurrency/fair-share.ts";

/** @returns the share of a tenant */
export function createBudget(bytesMax: number) {
  const memory = createFairShare({ size: bytesMax, least: 0 });
  return (tenant: string) => ({
    /** Takes as many of the bytes as the tenant may have now, and gives how many those are. */
    take(bytes: number) {
      const taken = Math.min(bytes, memory.roomOf(tenant));
      memory.take(tenant, null, taken);
      return taken;
    },
    giveBack: (bytes: number) => memory.giveBack(tenant, null, bytes),
  });
}

export type Budget = ReturnType<typeof createBudget>;
export type TenantBudget = ReturnType<Budget>;
