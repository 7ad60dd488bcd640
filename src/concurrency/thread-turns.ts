// Work that takes long in one piece runs in the runtime's pool of threads, two pieces of two tenants at a time, and then
// one of each other tenant in turn. So nobody waits behind much work of somebody else, and the pool stays free for what
// else it is for. One per thread, since all work that a thread sends to the pool has to be counted together.
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
