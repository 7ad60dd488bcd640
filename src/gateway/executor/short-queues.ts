// The queues whose next call waits for places or memory that others hold, and who is next when something is given back:
// the queues of the tenant that holds the least, which take turns among themselves.
import { leastFirst } from "../../concurrency/fair-share.ts";
import type { CallPlaces } from "./call-places.ts";

/** After so many vain tries it is another tenant's turn: a tenant may have thousands of queues. */
const TRIES_MAX = 16;
/** After so many of all tenants the others are tried in the next turn of the event loop: there may be thousands of tenants. */
const TRIES_TOGETHER = 64;
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
  /** The tenants that are tried in the next turn of the event loop, the one that held the least first. */
  let others: readonly string[] = [];
  /** Something was given back meanwhile: those who were tried before may have it. */
  let isMissed = false;

  function queuesOf(tenant: string): Set<Q> {
    const queues = short.get(tenant) ?? new Set<Q>();
    short.set(tenant, queues);
    return queues;
  }

  /** Queues that are tried in vain move to the end. Gives how many those were. */
  function serveTenant(tenant: string): number {
    const queues = queuesOf(tenant);
    let [vain, tries] = [0, TRIES_MAX];
    // Each once: those that are short again stand behind these.
    let left = queues.size;
    for (const queue of queues) {
      if (left-- === 0 || tries === 0 || places.roomOf(tenant) <= 0) break;
      queues.delete(queue);
      const isServed = serve(queue);
      tries = isServed ? TRIES_MAX : tries - 1;
      if (!isServed) vain++;
    }
    return vain;
  }

  /** Those that are not tried now are in the next turn of the event loop. */
  function serveSome(tenants: readonly string[]): void {
    let tries = TRIES_TOGETHER;
    for (const [at, tenant] of tenants.entries()) {
      if (tries <= 0) {
        others = tenants.slice(at);
        setImmediate(() => serveSome(others));
        return;
      }
      tries -= serveTenant(tenant);
      if (queuesOf(tenant).size === 0) short.delete(tenant);
    }
    others = [];
    if (isMissed) setImmediate(serveAll);
    isMissed = false;
    if (short.size === 0) return;
    tryAgain ??= setTimeout(() => {
      tryAgain = undefined;
      serveAll();
    }, TRY_AGAIN_MS);
  }

  function serveAll(): void {
    if (others.length > 0) isMissed = true;
    else serveSome(leastFirst(short.keys(), (name) => places.heldBy(name)));
  }

  return {
    add: (queue: Q): void => void queuesOf(queue.tenant).add(queue),
    /** Something was given back. */
    serve: serveAll,
    /** No more tries by time. */
    stop: (): void => clearTimeout(tryAgain),
  };
}
