// Waiting for a share of what there is too little of: whatever is given back goes to the waiting tenant that holds the
// least, to that of its agents that holds the least, and there to who came first. Who holds the same takes turns.
import { type FairShare, leastFirst, type Shortage } from "./fair-share.ts";

/** A share that may have to be waited for. */
export interface ShareRequest {
  readonly tenant: string;
  /** Null where only tenants count. */
  readonly agent: string | null;
  readonly amount: number;
}

/** Who waits for a share, and what to do once that has been taken. */
export interface Waiter extends ShareRequest {
  enter(): void;
}

export interface FairQueue {
  /** How many wait. */
  readonly size: number;
  /** Those of which somebody waits. */
  tenants(): Iterable<string>;
  /** Who of the tenant has waited longest, and since when, of performance.now(). */
  longest(tenant: string): { readonly waiter: Waiter; readonly since: number } | null;
  isWaiting(waiter: Waiter): boolean;
  /** Takes the share at once, or calls `enter` when it has been taken. */
  add(waiter: Waiter): void;
  /** Ends the wait of one that may not have its share yet. */
  remove(waiter: Waiter): void;
  /** Takes it at once or not at all, and never before one of the same agent that waits. */
  takeNow(tenant: string, agent: string | null, amount: number): boolean;
  giveBack(tenant: string, agent: string | null, amount: number): void;
  /** Gives what is free to who may have it: for when that depends on more than on what is given back. */
  serve(): void;
}

/** Since when each waits, the first first. */
type Line = Map<Waiter, number>;

/** @param partNow what each tenant may hold now and no more; null where the share itself knows */
export function createFairQueue(share: FairShare, partNow: () => number | null = () => null): FairQueue {
  const waiting = new Map<string, Map<string | null, Line>>();
  let size = 0;

  function enqueue(waiter: Waiter): void {
    const agents = waiting.get(waiter.tenant) ?? new Map<string | null, Line>();
    waiting.set(waiter.tenant, agents);
    const line: Line = agents.get(waiter.agent) ?? new Map<Waiter, number>();
    agents.set(waiter.agent, line);
    line.set(waiter, performance.now());
    size++;
  }

  function remove(waiter: Waiter): void {
    const agents = waiting.get(waiter.tenant);
    const line = agents?.get(waiter.agent);
    if (agents === undefined || line?.delete(waiter) !== true) return;
    size--;
    if (line.size === 0) agents.delete(waiter.agent);
    if (agents.size === 0) waiting.delete(waiter.tenant);
  }

  /** Gives its share to who came first, or says who is short. */
  function serveLine(line: Line | undefined): Shortage | null {
    const [next] = line?.keys() ?? [];
    if (next === undefined) return "own";
    const short = share.take(next.tenant, next.agent, next.amount, partNow());
    if (short !== null) return short;
    remove(next);
    next.enter();
    return null;
  }

  /** Gives its share to one of the tenant's, if one can have it now. */
  function serveOne(tenant: string): boolean {
    const lines = waiting.get(tenant);
    if (lines === undefined || share.roomOf(tenant, partNow()) <= 0) return false;
    for (const agent of leastFirst(lines.keys(), (name) => share.heldBy(tenant, name ?? undefined))) {
      const short = serveLine(lines.get(agent));
      if (short === null) toTheEnd(lines, agent);
      if (short === null || short === "tenant") return short === null;
    }
    return false;
  }

  function serve(): void {
    for (let served: string | undefined = ""; size > 0 && served !== undefined; ) {
      served = leastFirst(waiting.keys(), (tenant) => share.heldBy(tenant)).find(serveOne);
      if (served !== undefined) toTheEnd(waiting, served);
    }
  }

  function takeNow(tenant: string, agent: string | null, amount: number): boolean {
    if (waiting.get(tenant)?.has(agent) === true) return false;
    return share.take(tenant, agent, amount, partNow()) === null;
  }

  function longest(tenant: string) {
    const firsts = [...(waiting.get(tenant)?.values() ?? [])].flatMap((line) => [...line].slice(0, 1));
    const [first] = firsts.sort(([, a], [, b]) => a - b);
    return first === undefined ? null : { waiter: first[0], since: first[1] };
  }

  return {
    get size() {
      return size;
    },
    tenants: () => waiting.keys(),
    longest,
    isWaiting: (waiter) => waiting.get(waiter.tenant)?.get(waiter.agent)?.has(waiter) === true,
    add(waiter) {
      if (takeNow(waiter.tenant, waiter.agent, waiter.amount)) waiter.enter();
      else enqueue(waiter);
    },
    remove,
    takeNow,
    giveBack(tenant, agent, amount) {
      share.giveBack(tenant, agent, amount);
      serve();
    },
    serve,
  };
}

function toTheEnd<K, V>(map: Map<K, V>, key: K): void {
  const value = map.get(key);
  if (value === undefined) return;
  map.delete(key);
  map.set(key, value);
}

/**
 * Undefined when it was taken at once; else it has been taken when the promise resolves.
 *
 * @param signal its reason ends the wait
 * @param taken told at once when it has been taken after a wait
 */
export function enter(
  queue: FairQueue,
  wanted: ShareRequest,
  signal?: AbortSignal,
  taken?: () => void,
): Promise<void> | undefined {
  if (queue.takeNow(wanted.tenant, wanted.agent, wanted.amount)) return undefined;
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const giveUp = () => {
    // At once: a share that was taken for it now would be nobody's.
    queue.remove(waiter);
    reject(signal?.reason);
  };
  const waiter: Waiter = {
    ...wanted,
    enter() {
      signal?.removeEventListener("abort", giveUp);
      taken?.();
      resolve();
    },
  };
  queue.add(waiter);
  signal?.addEventListener("abort", giveUp, { once: true });
  if (signal?.aborted) giveUp();
  return promise;
}
