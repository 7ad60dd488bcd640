// What calls that run take up: a slot each, and memory for their bodies. Both are shared out by tenant, and of slots an
// agent has a limit of its own. When something is given back, the queues that wait for what others hold are served: those
// of the tenant that holds the least first, which take turns among themselves.
import { createFairShare, leastFirst, type Shortage } from "../../concurrency/fair-share.ts";
import type { QueueEntry } from "./agent-queue.ts";

/** Bodies that may run outside the shared limit, one per tenant: otherwise small bodies could keep a large one out. */
const BESIDE_MAX = 8;
/** After so many vain tries it is another tenant's turn: a tenant may have thousands of queues. */
const TRIES_MAX = 16;
/** After so many of all tenants the others are tried in the next turn of the event loop: there may be thousands of tenants. */
const TRIES_TOGETHER = 64;
/** When the remaining queues are tried, if no call ends before. */
const TRY_AGAIN_MS = 250;

export interface RunSlotsOptions {
  /** Calls that run at once. */
  readonly slots: number;
  /** Of one agent; a function where that changes. */
  readonly agentSlots: number | (() => number);
  /** Bytes of request bodies that running calls hold in memory. */
  readonly bodyBytes: number;
}

export type RunSlots = ReturnType<typeof createRunSlots>;

export function createRunSlots(options: RunSlotsOptions) {
  const slots = createFairShare({ size: options.slots, agentMax: options.agentSlots });
  const bodies = createFairShare({ size: options.bodyBytes, least: 0 });
  const beside = createFairShare({ size: BESIDE_MAX });
  /** The calls whose bodies run outside the shared limit. */
  const besides = new Set<string>();

  function takeBody({ tenant, id, body_bytes }: QueueEntry): Shortage | null {
    const heavy = bodies.take(tenant, null, body_bytes);
    if (heavy === null) return null;
    if (bodies.heldBy(tenant) > 0 || beside.heldBy(tenant) > 0) return heavy;
    const short = beside.take(tenant);
    if (short === null) besides.add(id);
    return short;
  }

  return {
    /** Takes a slot and memory for the body, or says which of them is short. */
    take(agentId: string, call: QueueEntry): Shortage | null {
      const short = slots.take(call.tenant, agentId);
      if (short !== null) return short;
      const heavy = takeBody(call);
      if (heavy !== null) slots.giveBack(call.tenant, agentId);
      return heavy;
    },
    giveBack(agentId: string, { tenant, id, body_bytes }: QueueEntry): void {
      slots.giveBack(tenant, agentId);
      if (besides.delete(id)) beside.giveBack(tenant);
      else bodies.giveBack(tenant, null, body_bytes);
    },
    /** The slots that the tenant has now, or one of its agents. */
    heldBy: slots.heldBy,
    /** How many more the tenant may have now. */
    roomOf: (tenant: string) => slots.roomOf(tenant),
  };
}

/**
 * The queues whose next call waits for slots or memory that others hold.
 *
 * @param slots what is short
 * @param serve starts what the queue may start, and says whether that was anything; a queue that is short again is added again
 */
export function createStarvedQueues<Q extends { readonly tenant: string }>(
  slots: Pick<RunSlots, "heldBy" | "roomOf">,
  serve: (queue: Q) => boolean,
) {
  /** By tenant, in turn. */
  const starved = new Map<string, Set<Q>>();
  let tryAgain: ReturnType<typeof setTimeout> | undefined;
  /** The tenants that are tried in the next turn of the event loop, the one that held the least first. */
  let others: readonly string[] = [];
  /** Something was given back meanwhile: those who were tried before may have it. */
  let isMissed = false;

  function queuesOf(tenant: string): Set<Q> {
    const queues = starved.get(tenant) ?? new Set<Q>();
    starved.set(tenant, queues);
    return queues;
  }

  /** Queues that are tried in vain move to the end. Gives how many those were. */
  function serveTenant(tenant: string): number {
    const queues = queuesOf(tenant);
    let [vain, tries] = [0, TRIES_MAX];
    // Each once: those that are short again stand behind these.
    let left = queues.size;
    for (const queue of queues) {
      if (left-- === 0 || tries === 0 || slots.roomOf(tenant) <= 0) break;
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
      if (queuesOf(tenant).size === 0) starved.delete(tenant);
    }
    others = [];
    if (isMissed) setImmediate(serveAll);
    isMissed = false;
    if (starved.size === 0) return;
    tryAgain ??= setTimeout(() => {
      tryAgain = undefined;
      serveAll();
    }, TRY_AGAIN_MS);
  }

  function serveAll(): void {
    if (others.length > 0) isMissed = true;
    else serveSome(leastFirst(starved.keys(), (name) => slots.heldBy(name)));
  }

  return {
    add: (queue: Q): void => void queuesOf(queue.tenant).add(queue),
    /** Something was given back. */
    serve: serveAll,
    /** No more tries by time. */
    stop: (): void => clearTimeout(tryAgain),
  };
}
