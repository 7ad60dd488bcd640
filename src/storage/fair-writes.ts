// Writes that wait for others of their tenant, on the row of a total: few at a time, shared out by tenant, so that one
// who makes many at once takes neither all connections of Postgres nor all of a group of SQLite.
import { createFairQueue, enter, type FairQueue } from "../core/fair-queue.ts";
import { createFairShare } from "../core/fair-share.ts";
import { Fault } from "../core/fault.ts";
import type { Store, Tx } from "./store.ts";

/** A tenant alone has seven eighths of these. On SQLite the writes of a moment share one commit, so there are more. */
const AT_ONCE = { sqlite: 16, postgres: 4 };
const WAIT_MS_MAX = 5_000;

export type FairWrite = <T>(tenant: string, work: (tx: Tx) => Promise<T>) => Promise<T>;

/** @returns `store.write`, in turn; throws Fault `unavailable` too when its turn does not come for long */
export function fairWrites({ write, dialect }: Pick<Store, "write" | "dialect">): FairWrite {
  const queue = createFairQueue(createFairShare({ size: AT_ONCE[dialect] }));
  return async (tenant, work) => {
    if (!queue.takeNow(tenant, null, 1)) await waitFor(queue, tenant);
    try {
      return await write(work);
    } finally {
      queue.giveBack(tenant, null, 1);
    }
  };
}

async function waitFor(queue: FairQueue, tenant: string): Promise<void> {
  try {
    await enter(queue, { tenant, agent: null, amount: 1 }, AbortSignal.timeout(WAIT_MS_MAX));
  } catch (cause) {
    throw new Fault("unavailable", "too many changes at once", { retryAfterSeconds: 1, cause });
  }
}
