// A queue for shares of something scarce. What is given back goes to the waiting tenant that holds least, to the one of
// its agents that holds least, and there to the first in line. Those that hold the same take turns.

import { type FairShare, leastFirst, type Shortage } from "./fair-share.ts";
import { inSlices } from "./slices.ts";
import type { StopSignal } from "./stop.ts";

/** A share that may have to be waited for. */
export interface ShareRequest {
  readonly tenant: string;
  /** Null where only tenants count. */
  readonly agent: string | null;
  readonly amount: number;
}

/** Somebody who waits for a share, and what to do once it has been taken. */
export interface Waiter extends ShareRequest {
  enter(): void;
}

export type FairQueue = ReturnType<typeof createFairQueue>;

/** Since when each waits, in the order of arrival. */
type Line = Map<Waiter, number>;

/** @param partNow what each tenant may hold now and no more; null where the share itself knows */
export function createFairQueue(share: FairShare, partNow: () => number | null = () => null) {
  const waiting = new Map<string, Map<string | null, Line>>();
  const open = createOpenAgents((tenant, agent) => waiting.get(tenant)?.has(agent) === true);
  let size = 0;

  function enqueue(waiter: Waiter): void {
    const agents = waiting.get(waiter.tenant) ?? new Map<string | null, Line>();
    waiting.set(waiter.tenant, agents);
    const line: Line = agents.get(waiter.agent) ?? new Map<Waiter, number>();
    agents.set(waiter.agent, line.set(waiter, performance.now()));
    size++;
    open.look(waiter.tenant, waiter.agent);
  }

  /** Ends the wait of one that may not have its share yet. */
  function remove(waiter: Waiter): void {
    const agents = waiting.get(waiter.tenant);
    const line = agents?.get(waiter.agent);
    if (agents === undefined || line?.delete(waiter) !== true) return;
    size--;
    if (line.size === 0) agents.delete(waiter.agent);
    if (agents.size === 0) waiting.delete(waiter.tenant);
    open.look(waiter.tenant, waiter.agent);
  }

  /** Gives the first in line its share, or says what is short. */
  function serveLine(line: Line | undefined): Shortage | null {
    const [next] = line?.keys() ?? [];
    if (next === undefined) return "own";
    const short = share.take(next.tenant, next.agent, next.amount, partNow());
    if (short !== null) return short;
    remove(next);
    next.enter();
    return null;
  }

  /** Gives one of the tenant's waiters its share, if one can have it now. */
  function serveOne(tenant: string): boolean {
    if (share.roomOf(tenant, partNow()) <= 0) return false;
    for (const agent of leastFirst(open.of(tenant), (name) => share.heldBy(tenant, name ?? undefined))) {
      const short = serveLine(waiting.get(tenant)?.get(agent));
      if (short === "own") open.close(tenant, agent);
      if (short === null) open.toTheEnd(tenant, agent);
      if (short === null || short === "tenant") return short === null;
    }
    return false;
  }

  /** Hands out what is free. */
  function serve(): void {
    for (let served: string | undefined = ""; size > 0 && served !== undefined; ) {
      served = leastFirst(waiting.keys(), (tenant) => share.heldBy(tenant)).find(serveOne);
      if (served !== undefined) toTheEnd(waiting, served);
    }
  }

  /** Takes it at once or not at all, and never before one of the same agent that waits. */
  function takeNow(tenant: string, agent: string | null, amount: number): boolean {
    if (waiting.get(tenant)?.has(agent) === true) return false;
    return share.take(tenant, agent, amount, partNow()) === null;
  }

  /** Who of the tenant has waited longest, and since when, of performance.now(). */
  function longest(tenant: string) {
    const firsts = [...(waiting.get(tenant)?.values() ?? [])].flatMap((line) => [...line].slice(0, 1));
    const [first] = firsts.sort(([, a], [, b]) => a - b);
    return first === undefined ? null : { waiter: first[0], since: first[1] };
  }

  return {
    /** How many wait. */
    get size() {
      return size;
    },
    /** The tenants of which somebody waits. */
    tenants: (): Iterable<string> => waiting.keys(),
    longest,
    isWaiting: (waiter: Waiter): boolean => waiting.get(waiter.tenant)?.get(waiter.agent)?.has(waiter) === true,
    /** Takes the share at once, or calls `enter` when it has been taken. */
    add(waiter: Waiter): void {
      if (takeNow(waiter.tenant, waiter.agent, waiter.amount)) waiter.enter();
      else enqueue(waiter);
    },
    remove,
    takeNow,
    giveBack(tenant: string, agent: string | null, amount: number): void {
      share.giveBack(tenant, agent, amount);
      open.look(tenant, agent);
      serve();
    },
    /** For when waiters may have more without anything being given back: all of them, or those of one agent. */
    serve(): void {
      for (const [tenant, agents] of waiting) for (const agent of agents.keys()) open.look(tenant, agent);
      serve();
    },
    /** For when each agent may have more than before: a few of those who wait in each turn of the event loop. */
    serveEach: (): Promise<void> =>
      inSlices(waitersOf(waiting), ({ tenant, agent }) => {
        const short = serveLine(waiting.get(tenant)?.get(agent));
        if (short === "agent" || short === "tenant") open.look(tenant, agent);
      }),
    serveAgent(tenant: string, agent: string | null): void {
      open.look(tenant, agent);
      serve();
    },
  };
}

/**
 * The agents of whom somebody waits and who may have more, as far as is known: those that hold all they may are asked about
 * when that may have changed, and not whenever anything is given back.
 */
function createOpenAgents(isWaiting: (tenant: string, agent: string | null) => boolean) {
  const open = new Map<string, Set<string | null>>();

  function close(tenant: string, agent: string | null): boolean {
    const agents = open.get(tenant);
    const wasOpen = agents?.delete(agent) === true;
    if (agents?.size === 0) open.delete(tenant);
    return wasOpen;
  }

  /** Nobody of it may wait any more, or it may have more. */
  function look(tenant: string, agent: string | null): void {
    if (isWaiting(tenant, agent)) open.set(tenant, (open.get(tenant) ?? new Set<string | null>()).add(agent));
    else close(tenant, agent);
  }

  return {
    of: (tenant: string): Iterable<string | null> => open.get(tenant) ?? [],
    look,
    close,
    toTheEnd(tenant: string, agent: string | null): void {
      if (close(tenant, agent)) look(tenant, agent);
    },
  };
}

const waitersOf = (waiting: ReadonlyMap<string, ReadonlyMap<string | null, Line>>): Waiter[] =>
  [...waiting.values()].flatMap((agents) => [...agents.values()].flatMap((line) => [...line.keys()]));

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
 * @param taken called as soon as it has been taken after a wait
 */
export function enter(
  queue: FairQueue,
  wanted: ShareRequest,
  signal?: StopSignal,
  taken?: () => void,
): Promise<void> | undefined {
  if (queue.takeNow(wanted.tenant, wanted.agent, wanted.amount)) return undefined;
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const giveUp = () => {
    // Removed at once: a share taken for it now would belong to nobody.
    queue.remove(waiter);
    // Those behind it may want less.
    queue.serveAgent(waiter.tenant, waiter.agent);
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
