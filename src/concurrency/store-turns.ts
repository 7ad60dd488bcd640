// Turns of the event loop for work on stored rows that is done in steps: SQLite answers on the event loop, and one long
// piece would hold up every tenant. Few steps are taken in one turn, and they are shared out by tenant.
// One per thread, since a thread has one event loop, and SQLite works on it.
import { createFairQueue, enter } from "./fair-queue.ts";
import { createFairShare } from "./fair-share.ts";

/** Steps of all such work together; a tenant alone may take two. */
const STEPS_AT_ONCE = 3;

const steps = createFairQueue(createFairShare({ size: STEPS_AT_ONCE }));

/** Takes a step when it is the tenant's turn, in a turn of the event loop with few other such steps. */
export async function inStoreTurns<T>(tenant: string, step: () => Promise<T>): Promise<T> {
  await enter(steps, { tenant, agent: null, amount: 1 });
  try {
    await new Promise((resolve) => setImmediate(resolve));
    return await step();
  } finally {
    steps.giveBack(tenant, null, 1);
  }
}

/**
 * The first row that is wanted, or null. Rows are read in the order of their IDs, a page in each step.
 *
 * @param pageAfter at most `limit` rows with IDs above this one
 */
export async function findInTurns<R extends { readonly id: string }>(
  tenant: string,
  limit: number,
  pageAfter: (id: string, limit: number) => Promise<readonly R[]>,
  isWanted: (row: R) => boolean,
): Promise<R | null> {
  for (let after = ""; ; ) {
    const page = await inStoreTurns(tenant, () => pageAfter(after, limit));
    const found = page.find(isWanted);
    if (found !== undefined) return found;
    const last = page.at(-1);
    if (last === undefined || page.length < limit) return null;
    after = last.id;
  }
}
