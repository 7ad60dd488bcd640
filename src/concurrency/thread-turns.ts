// Work that takes long in one piece is done in the runtime's pool of threads, a little of it at once: two pieces, of two
// tenants, and then one of each other tenant in turn. So nobody's work waits behind much of somebody else's, nor does
// what else the pool is for.
import { createRoundRobin } from "./round-robin.ts";

const AT_ONCE = 2;

/** Never rejects. */
type ThreadWork = () => Promise<void>;

const waiting = createRoundRobin<ThreadWork>();
const busy = new Set<string>();

/** Rejects with what the work rejects with. */
export function inThreadTurn<T>(tenant: string, work: () => Promise<T>): Promise<T> {
  const { promise, resolve, reject } = Promise.withResolvers<T>();
  waiting.add(tenant, () => work().then(resolve, reject));
  begin();
  return promise;
}

function begin(): void {
  while (busy.size < AT_ONCE) {
    const next = waiting.next(busy);
    if (next === undefined) return;
    void run(next.tenant, next.item);
  }
}

async function run(tenant: string, piece: ThreadWork): Promise<void> {
  busy.add(tenant);
  await piece();
  busy.delete(tenant);
  begin();
}
