// A limit on work that takes memory, connections or rows while it runs: few pieces at once, shared out by tenant, so that
// a tenant that asks for much delays nobody else for long.

import { Fault } from "../core/fault.ts";
import { createFairQueue, enter } from "./fair-queue.ts";
import { createFairShare } from "./fair-share.ts";

const WAIT_MS_MAX = 5_000;

export interface LimiterOptions {
  /** How much at once. A tenant alone has seven eighths of it, and of those that wait. */
  readonly size: number;
  readonly waitingMax?: number;
  /** The message of the Fault when too much is asked for. */
  readonly tooMany: string;
}

export function createLimiter({ size, waitingMax = Number.MAX_SAFE_INTEGER, tooMany }: LimiterOptions) {
  const queue = createFairQueue(createFairShare({ size }));
  const waiting = createFairShare({ size: waitingMax });

  const refused = (cause?: unknown) => new Fault("unavailable", tooMany, { retryAfterSeconds: 1, cause });

  async function wait(tenant: string): Promise<void> {
    if (waiting.take(tenant) !== null) throw refused();
    try {
      await enter(queue, { tenant, agent: null, amount: 1 }, AbortSignal.timeout(WAIT_MS_MAX));
    } catch (cause) {
      throw refused(cause);
    } finally {
      waiting.giveBack(tenant);
    }
  }

  /** @returns what the work gives; throws Fault `unavailable` too when its turn does not come for long */
  return async <T>(tenant: string, work: () => Promise<T>): Promise<T> => {
    if (!queue.takeNow(tenant, null, 1)) await wait(tenant);
    try {
      return await work();
    } finally {
      queue.giveBack(tenant, null, 1);
    }
  };
}
