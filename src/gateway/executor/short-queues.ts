// The queues whose next call waits for places or memory that others hold, and who is next when something is given back:
// the queues of the tenant that holds the least, which take turns among themselves.
import { leastFirst } from "../../concurrency/fair-share.ts";
import type { CallPlaces } from "./call-places.ts";

/** After so many vain tries it is another tenant's turn: a tenant may have thousands of queues. */
const TRIES_MAX = 16;
/** When the remaining queues are tried, if no call ends before. */
const TRY_AGAIN_MS = 250;

/**
 * @param places what is short
 * @param serve starts what the queue may start, and says whether that was anything; a queue that is short again is added again
 */
export function createShortQueues<Q extends { readonly tenant: string }>(
  places: Pick<CallPlaces, "heldBy" | "roomOf">,
  serve: (queue: Q) => boolean,
) {
  /** By tenant, in turn. */
  const short = new Map<string, Set<Q>>();
  let tryAgain: ReturnType<typeof setTimeout> | undefined;

  function queuesOf(tenant: string): Set<Q> {
    const queues = short.get(tenant) ?? new Set<Q>();
    short.set(tenant, queues);
    return queues;
  }

  /** Queues that are tried in vain move to the end. */
  function serveTenant(tenant: string): void {
    const queues = queuesOf(tenant);
    let tries = TRIES_MAX;
    for (const queue of queues) {
      if (places.roomOf(tenant) <= 0 || tries === 0) return;
      queues.delete(queue);
      tries = serve(queue) ? TRIES_MAX : tries - 1;
    }
  }

  function serveAll(): void {
    for (const tenant of leastFirst(short.keys(), (name) => places.heldBy(name))) {
      serveTenant(tenant);
      if (queuesOf(tenant).size === 0) short.delete(tenant);
    }
    if (short.size === 0) return;
    tryAgain ??= setTimeout(() => {
      tryAgain = undefined;
      serveAll();
    }, TRY_AGAIN_MS);
  }

  return {
    add: (queue: Q): void => void queuesOf(queue.tenant).add(queue),
    /** Something was given back. */
    serve: serveAll,
    /** No more tries by time. */
    stop: (): void => clearTimeout(tryAgain),
  };
}
