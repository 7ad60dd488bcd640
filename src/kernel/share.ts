// Fair shares of what is scarce (slots, connections, bytes of memory), by tenant first, then by agent:
//
// - `createFairShare`: takes now or not at all; `createFairQueue` and `enter`: waits for it in turn
// - `createSlots`, `createLimiter`: run work in few slots; the limiter refuses after a while
// - `createReservedShare`: keeps a part free for holders of none
// - `ReclaimableShare`: memory that slow holders lose when others wait
//
// What one may hold falls with the square of what it leaves free. So a tenant alone gets seven eighths; tenants that
// together ask for more than there is get equal parts; and a newcomer finds something free, however many hold all they may.
import { Fault } from "../core/fault.ts";
import { MAX } from "./limits.ts";
import { inSlices } from "./loop.ts";
import { addTo, atOnceOrInTurn } from "./turns.ts";
import { countWait, type StopSignal, untilFirst } from "./wait.ts";

export interface FairShareOptions {
  /** All that there is: a count, or bytes. */
  readonly size: number;
  /** The most that one agent holds, however much is free; a function where that changes. */
  readonly agentMax?: number | (() => number);
  /** What somebody who holds nothing may take, however little is free: one slot, but no bytes. */
  readonly least?: 0 | 1;
}

/** Who must give something back first. `own`: the agent, which holds all that one may; `agent`: any of the tenant's; `tenant`: any. */
export type Shortage = "own" | "agent" | "tenant";

export type FairShare = ReturnType<typeof createFairShare>;

/** So steep that one alone keeps an eighth free: (8 - 1) * 8. */
const STEEPNESS = 56;

interface Holder {
  held: number;
  readonly agents: Map<string, number>;
}

const NOBODY: Holder = { held: 0, agents: new Map() };

/** The most that one may hold of `size` when others leave it `left`: STEEPNESS * kept² / size, where it keeps `kept` free. */
function mostHeld(size: number, left: number): number {
  if (left <= 0) return 0;
  const kept = (size * (Math.sqrt(1 + (4 * STEEPNESS * left) / size) - 1)) / (2 * STEEPNESS);
  return Math.floor(left - kept);
}

export function createFairShare({ size, agentMax = size, least = 1 }: FairShareOptions) {
  const holders = new Map<string, Holder>();
  const agentMaxNow = typeof agentMax === "number" ? () => agentMax : agentMax;
  let free = size;

  /** What it holds and what is free are together what the others leave it, so that sum does not change as it takes more. */
  const mostOf = (whole: number, left: number) => Math.max(Math.min(least, left), mostHeld(whole, left));

  const mostOfTenant = (left: number, part: number | null) =>
    part === null ? mostOf(size, left) : Math.min(part, left);

  function shortage({ held, agents }: Holder, agent: string | null, amount: number, part: number | null) {
    const own = agents.get(agent ?? "") ?? 0;
    // An amount above anybody's share can be had while nobody holds anything.
    const isAlone = free === size && amount <= size;
    if (isAlone || amount === 0) return null;
    const tenantMost = mostOfTenant(free + held, part);
    if (held + amount > tenantMost) return "tenant";
    // Likewise among agents: a single one may need all that its tenant may hold.
    const isOnly = agent === null || held === 0;
    const whole = part ?? tenantMost;
    return isOnly || own + amount <= mostOf(whole, whole - held + own) ? null : "agent";
  }

  return {
    get free() {
      return free;
    },
    get inUse() {
      return size - free;
    },
    /** Takes all or nothing, and says who is short. @param part what a tenant may hold, whatever it leaves free */
    take(tenant: string, agent: string | null = null, amount = 1, part: number | null = null): Shortage | null {
      const found = holders.get(tenant);
      const own = found?.agents.get(agent ?? "") ?? 0;
      if (own + amount > agentMaxNow()) return "own";
      const short = shortage(found ?? NOBODY, agent, amount, part);
      if (short !== null) return short;
      const holder = found ?? { held: 0, agents: new Map<string, number>() };
      if (found === undefined) holders.set(tenant, holder);
      holder.held += amount;
      if (agent !== null) addTo(holder.agents, agent, amount);
      free -= amount;
      return null;
    },
    giveBack(tenant: string, agent: string | null = null, amount = 1): void {
      const holder = holders.get(tenant);
      if (holder === undefined) return;
      if (agent !== null) addTo(holder.agents, agent, -amount);
      holder.held -= amount;
      if (holder.held <= 0) holders.delete(tenant);
      free += amount;
    },
    /** How much more the tenant may hold now, or once others have given back `comesBack`. */
    roomOf(tenant: string, part: number | null = null, comesBack = 0): number {
      const held = holders.get(tenant)?.held ?? 0;
      return Math.max(0, mostOfTenant(free + comesBack + held, part) - held);
    },
    tenants: (): Iterable<string> => holders.keys(),
    /** What the tenant holds now, or one of its agents. */
    heldBy(tenant: string, agent?: string): number {
      const holder = holders.get(tenant);
      return (agent === undefined ? holder?.held : holder?.agents.get(agent)) ?? 0;
    },
  };
}

/**
 * The order of service: least held first; of those that hold the same, in the order of `names`. Ten thousand that wait are
 * ordered at each end of a call, and most hold the same, so only the amounts are sorted: 0.6 ms instead of 2.1 (measured).
 */
export function leastFirst<N>(names: Iterable<N>, held: (name: N) => number): N[] {
  return [...Map.groupBy(names, held)].sort(([a], [b]) => a - b).flatMap(([, alike]) => alike);
}

// A queue for a share. What is given back goes to the waiting tenant that holds least, to the one of its agents that holds
// least, and there to the first in line. Those that hold the same take turns.

export interface ShareRequest {
  readonly tenant: string;
  /** Null where only tenants count. */
  readonly agent: string | null;
  readonly amount: number;
}

export interface Waiter extends ShareRequest {
  /** Called once the share has been taken. */
  enter(): void;
}

export type FairQueue = ReturnType<typeof createFairQueue>;

/** Since when each waits, in the order of arrival. */
type WaitingLine = Map<Waiter, number>;

/** @param partNow what each tenant may hold now and no more; null where the share itself knows */
export function createFairQueue(share: FairShare, partNow: () => number | null = () => null) {
  const waiting = new Map<string, Map<string | null, WaitingLine>>();
  const open = createOpenAgents((tenant, agent) => waiting.get(tenant)?.has(agent) === true);
  let size = 0;

  function enqueue(waiter: Waiter): void {
    const agents = waiting.getOrInsertComputed(waiter.tenant, () => new Map());
    agents.getOrInsertComputed(waiter.agent, () => new Map()).set(waiter, performance.now());
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
  function serveLine(line: WaitingLine | undefined): Shortage | null {
    const [next] = line?.keys() ?? [];
    if (next === undefined) return "own";
    const short = share.take(next.tenant, next.agent, next.amount, partNow());
    if (short !== null) return short;
    remove(next);
    next.enter();
    return null;
  }

  /** Gives one of the tenant's waiters its share, if one may have it now. */
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
    get size() {
      return size;
    },
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

/** The agents that are waited for and may have more, as far as is known: full ones are asked about when that may have changed. */
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

const waitersOf = (waiting: ReadonlyMap<string, ReadonlyMap<string | null, WaitingLine>>): Waiter[] =>
  [...waiting.values()].flatMap((agents) => [...agents.values()].flatMap((line) => [...line.keys()]));

function toTheEnd<K, V>(map: Map<K, V>, key: K): void {
  const value = map.get(key);
  if (value === undefined) return;
  map.delete(key);
  map.set(key, value);
}

/** Undefined if the share was taken at once. @param signal its reason ends the wait @param taken called at the end of a wait */
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
    // Thousands of waits may end in one moment, and what follows from each takes 20 µs and more.
    void atOnceOrInTurn(waiter.tenant, () => {
      // Those behind it may want less.
      queue.serveAgent(waiter.tenant, waiter.agent);
      reject(signal?.reason);
    });
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

interface LimiterOptions {
  readonly size: number;
  readonly waitingMax?: number;
  readonly tooMany: string;
}

/** Runs work in one of so many slots. @param wait ends when the tenant has its slot */
export function createSlots(size: number, wait: (queue: FairQueue, tenant: string) => Promise<void> = enterSlot) {
  const queue = createFairQueue(createFairShare({ size }));
  return async <T>(tenant: string, work: () => Promise<T>): Promise<T> => {
    if (!queue.takeNow(tenant, null, 1)) await wait(queue, tenant);
    try {
      return await work();
    } finally {
      queue.giveBack(tenant, null, 1);
    }
  };
}

async function enterSlot(queue: FairQueue, tenant: string, signal?: StopSignal): Promise<void> {
  await enter(queue, { tenant, agent: null, amount: 1 }, signal);
}

/** Slots that throw Fault `unavailable` when one does not come for long, or too many wait. */
export function createLimiter({ size, waitingMax = Number.MAX_SAFE_INTEGER, tooMany }: LimiterOptions) {
  const waiting = createFairShare({ size: waitingMax });
  const refused = (cause?: unknown) => new Fault("unavailable", tooMany, { retryAfterSeconds: 1, cause });

  return createSlots(size, async (queue, tenant) => {
    if (waiting.take(tenant) !== null) throw refused();
    try {
      await countWait(() => untilFirst([], (late) => enterSlot(queue, tenant, late), MAX.limiterWaitMs));
    } catch (cause) {
      throw refused(cause);
    } finally {
      waiting.giveBack(tenant);
    }
  });
}

// Slots shared out among holders (accounts), an eighth of them reserved for holders of none. So however much some hold,
// everybody else finds a first slot, and holders that want more than there is end up with equal shares of the rest. A fair
// share reserves nothing: of what it leaves free, sixteen who want much may leave the seventeenth nothing.

/** One slot of so many is reserved. */
const RESERVED = 8;

/** Whether one who holds `own` of `taken` slots may have another, when so many hold any, itself included. */
export function mayTake(own: number, taken: number, holders: number, total: number, round = Math.floor): boolean {
  const free = total - taken;
  const reserve = Math.max(1, Math.floor(total / RESERVED));
  const share = Math.max(1, round((total - reserve) / holders));
  return free > 0 && own < share && (free > reserve || own === 0);
}

/** @param round what becomes of a part of a slot when equal shares are made */
export function createReservedShare(total: number, round = Math.floor) {
  const held = new Map<string, number>();
  let taken = 0;
  return {
    /** @param isFirst whether it may have what is free, whatever its share */
    take(name: string, isFirst = false): boolean {
      const own = held.get(name) ?? 0;
      const holders = held.size + (own === 0 ? 1 : 0);
      if (isFirst ? taken === total : !mayTake(own, taken, holders, total, round)) return false;
      held.set(name, own + 1);
      taken++;
      return true;
    },
    giveBack(name: string): void {
      addTo(held, name, -1);
      taken--;
    },
  };
}

// Shares of a memory budget that has room for few holders at a time, some of which may never be done. So each holder says
// how it is evicted. When somebody has waited for a second, the tenant that holds most loses some, if it holds more than its
// equal part and more than the waiter's tenant would hold: its holder whose last progress is the longest ago is evicted, and
// the next one, until there is enough. Meanwhile nobody gets more than its equal part, or memory would go in circles.

export interface Holding {
  readonly amount: number;
  /** Ends the holder, which gives its share back at once or soon. Null while it can't be ended. */
  evict: (() => void) | null;
  /** Takes more at once, or nothing. */
  takeNow(amount: number): boolean;
  /** As `enter` does. */
  take(amount: number, signal: StopSignal): Promise<void> | undefined;
  progressed(): void;
  /** Gives this much back, or all that is left. */
  giveBack(amount?: number): void;
}

/** Thousands of small holders may be needed, and each one that ends makes work, so few are evicted at a time. */
const EVICTED_AT_ONCE = 64;

export class ReclaimableShare {
  readonly #size: number;
  readonly #share: FairShare;
  readonly #queue: FairQueue;
  /** By tenant, the one whose last progress is longest ago first; without those that are evicted. */
  readonly #holdings = new Map<string, Set<Holding>>();
  /** Those that were evicted and have not given all back yet. */
  readonly #evicted = new Set<Holding>();
  /** What they will give back, by tenant, and together. */
  readonly #coming = new Map<string, number>();
  #comingInAll = 0;
  /** How many more may be evicted in this look. */
  #evictionsLeft = 0;
  /** Somebody has waited long for no more than its equal part. */
  #isShort = false;
  #isLooking = false;

  constructor(size: number) {
    this.#size = size;
    this.#share = createFairShare({ size, least: 0 });
    this.#queue = createFairQueue(this.#share, () => (this.#isShort ? this.#partOf() : null));
  }

  get inUse(): number {
    return this.#share.inUse;
  }

  /** A holder that holds nothing yet. */
  hold(tenant: string, agent: string | null): Holding {
    const queue = this.#queue;
    let held = 0;
    const took = (amount: number) => {
      held += amount;
      if (this.#evicted.has(holding)) this.#comes(tenant, amount);
      else this.#add(tenant, holding);
    };
    const holding: Holding = {
      get amount() {
        return held;
      },
      evict: null,
      takeNow(amount) {
        const isTaken = queue.takeNow(tenant, agent, amount);
        if (isTaken) took(amount);
        return isTaken;
      },
      take: (amount, signal) => {
        if (holding.takeNow(amount)) return undefined;
        this.#lookLater(MAX.evictionWaitMs);
        return enter(queue, { tenant, agent, amount }, signal, () => took(amount));
      },
      progressed: () => {
        if (this.#holdings.get(tenant)?.delete(holding)) this.#add(tenant, holding);
      },
      giveBack: (amount = held) => {
        held -= amount;
        if (this.#evicted.has(holding)) this.#comes(tenant, -amount);
        if (held === 0) this.#remove(tenant, holding);
        queue.giveBack(tenant, agent, amount);
      },
    };
    return holding;
  }

  /** How much more the tenant may wait for; null when it holds itself what is missing, or nobody would be evicted. */
  worthWaiting(tenant: string, least: number, most: number): number | null {
    const [part, held] = [this.#partOf(tenant), this.#share.heldBy(tenant)];
    // The tenant is alone.
    if (part === this.#size) return null;
    if (held + least <= part) return Math.min(most, part - held);
    return this.#nextToEvict(tenant, Math.max(part, held + least)) === null ? null : least;
  }

  #add(tenant: string, holding: Holding): void {
    this.#holdings.getOrInsertComputed(tenant, () => new Set()).add(holding);
  }

  #remove(tenant: string, holding: Holding): void {
    const own = this.#holdings.get(tenant);
    own?.delete(holding);
    if (own?.size === 0) this.#holdings.delete(tenant);
    this.#evicted.delete(holding);
  }

  /** The equal part of each tenant that holds something or waits, and of this one. */
  #partOf(tenant?: string): number {
    const tenants = new Set([...this.#share.tenants(), ...this.#queue.tenants()]);
    if (tenant !== undefined) tenants.add(tenant);
    return Math.floor(this.#size / tenants.size);
  }

  #evict(owner: string, holding: Holding): void {
    this.#evictionsLeft--;
    this.#evicted.add(holding);
    this.#holdings.get(owner)?.delete(holding);
    this.#comes(owner, holding.amount);
    holding.evict?.();
  }

  /** This much more will be given back; less when negative. */
  #comes(tenant: string, amount: number): void {
    this.#comingInAll += amount;
    addTo(this.#coming, tenant, amount);
  }

  /** The other tenant that holds most, if that is above the limit, and its slowest holder. */
  #nextToEvict(tenant: string, limit: number): { owner: string; holding: Holding } | null {
    const keeps = (owner: string) => this.#share.heldBy(owner) - (this.#coming.get(owner) ?? 0);
    const above = [...this.#holdings.keys()].filter((owner) => owner !== tenant && keeps(owner) > limit);
    for (const owner of above.sort((a, b) => keeps(b) - keeps(a))) {
      for (const holding of this.#holdings.get(owner) ?? []) if (holding.evict !== null) return { owner, holding };
    }
    return null;
  }

  /** Those that have waited long, one of each tenant, in the order of their turn. */
  #overdue(): Waiter[] {
    const now = performance.now();
    const tenants = leastFirst(this.#queue.tenants(), (tenant) => this.#share.heldBy(tenant));
    return tenants.flatMap((tenant) => {
      const longest = this.#queue.longest(tenant);
      return longest === null || now - longest.since < MAX.evictionWaitMs ? [] : [longest.waiter];
    });
  }

  #afterwards({ tenant, amount }: Waiter): number {
    return this.#share.heldBy(tenant) + amount;
  }

  /** Evicts others until this waiter has enough. @param promised comes back for others @returns how much this one will have */
  #makeRoom(waiter: Waiter, promised: number): number {
    const { tenant, amount } = waiter;
    while (this.#queue.isWaiting(waiter)) {
      const [part, after] = [this.#partOf(), this.#afterwards(waiter)];
      const comesBack = this.#comingInAll - promised;
      if (this.#share.roomOf(tenant, after <= part ? part : null, comesBack) >= amount) return amount;
      const next = this.#nextToEvict(tenant, Math.max(part, after));
      if (next === null || this.#evictionsLeft === 0) return 0;
      this.#evict(next.owner, next.holding);
    }
    return 0;
  }

  #look(): void {
    this.#isLooking = false;
    const part = this.#partOf();
    this.#isShort = this.#overdue().some((waiter) => this.#afterwards(waiter) <= part);
    this.#queue.serve();
    this.#evictionsLeft = EVICTED_AT_ONCE;
    let promised = 0;
    for (const waiter of this.#overdue()) promised += this.#makeRoom(waiter, promised);
    if (this.#queue.size > 0) this.#lookLater(this.#evictionsLeft > 0 ? 100 : 10);
    else this.#isShort = false;
  }

  #lookLater(ms: number): void {
    if (this.#isLooking) return;
    this.#isLooking = true;
    setTimeout(() => this.#look(), ms);
  }
}
