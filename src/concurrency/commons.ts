// Shares of a memory budget that has room for few holders at a time. A tenant alone may use nearly all of it, and others
// must not wait until it is done, which may be never. So each holder says how it gives way. When somebody has waited for
// a second, the tenant that holds most gives way, if it holds more than its equal part and more than the waiter's tenant
// would hold: it ends the holder whose last progress is the longest ago, and the next one, until there is enough.
// Meanwhile nobody gets more than its equal part, or what is given back would go round in circles.

import { createFairQueue, enter, type FairQueue, type Waiter } from "./fair-queue.ts";
import { createFairShare, type FairShare, leastFirst } from "./fair-share.ts";
import type { StopSignal } from "./stop.ts";

/** What one holder has. */
export interface Stake {
  readonly amount: number;
  /** Ends the holder, which gives its share back at once or soon. Null while it can't be ended. */
  giveWay: (() => void) | null;
  /** Takes more at once, or nothing. */
  takeNow(amount: number): boolean;
  /**
   * Undefined when it was taken at once; else it has been taken when the promise resolves.
   *
   * @param signal its reason ends the wait
   */
  take(amount: number, signal: StopSignal): Promise<void> | undefined;
  /** The holder makes progress. */
  heard(): void;
  /** Gives this much back, or all that is left. */
  giveBack(amount?: number): void;
}

export interface CommonsOptions {
  readonly size: number;
  /** For tests: how long somebody waits before others give way, and the timer for the next look. */
  readonly patienceMs?: number;
  readonly later?: (look: () => void, ms: number) => void;
}

const PATIENCE_MS = 1000;
const LOOK_MS = 100;
/** Thousands of small holders may be needed, and each one that ends makes work, so few are asked at a time. */
const ASKED_AT_ONCE = 64;
const GO_ON_MS = 10;

export class Commons {
  readonly #size: number;
  readonly #patienceMs: number;
  readonly #later: (look: () => void, ms: number) => void;
  readonly #share: FairShare;
  readonly #queue: FairQueue;
  /** By tenant, the one whose last progress is longest ago first; without those asked to give way. */
  readonly #stakes = new Map<string, Set<Stake>>();
  /** Those that were asked to give way and have not given all back yet. */
  readonly #asked = new Set<Stake>();
  /** What they will give back, by tenant, and together. */
  readonly #coming = new Map<string, number>();
  #comingInAll = 0;
  /** How many more may be asked in this look. */
  #asksLeft = 0;
  /** Somebody has waited long for no more than its equal part. */
  #isShort = false;
  #isLooking = false;

  constructor({ size, patienceMs = PATIENCE_MS, later = setTimeout }: CommonsOptions) {
    this.#size = size;
    this.#patienceMs = patienceMs;
    this.#later = later;
    this.#share = createFairShare({ size, least: 0 });
    this.#queue = createFairQueue(this.#share, () => (this.#isShort ? this.#partOf() : null));
  }

  /** A share that holds nothing yet. */
  stake(tenant: string, agent: string | null): Stake {
    const queue = this.#queue;
    let held = 0;
    const took = (amount: number) => {
      held += amount;
      if (this.#asked.has(stake)) this.#comes(tenant, amount);
      else this.#add(tenant, stake);
    };
    const stake: Stake = {
      get amount() {
        return held;
      },
      giveWay: null,
      takeNow(amount) {
        const isTaken = queue.takeNow(tenant, agent, amount);
        if (isTaken) took(amount);
        return isTaken;
      },
      take: (amount, signal) => {
        if (stake.takeNow(amount)) return undefined;
        this.#lookLater(this.#patienceMs);
        return enter(queue, { tenant, agent, amount }, signal, () => took(amount));
      },
      heard: () => {
        if (this.#stakes.get(tenant)?.delete(stake)) this.#add(tenant, stake);
      },
      giveBack: (amount = held) => {
        held -= amount;
        if (this.#asked.has(stake)) this.#comes(tenant, -amount);
        if (held === 0) this.#remove(tenant, stake);
        queue.giveBack(tenant, agent, amount);
      },
    };
    return stake;
  }

  /**
   * How much more the tenant may wait for, between `least` and `most`; null when the tenant itself holds what is missing,
   * or nobody would give way.
   */
  worthWaiting(tenant: string, least: number, most: number): number | null {
    const [part, held] = [this.#partOf(tenant), this.#share.heldBy(tenant)];
    const isAlone = part === this.#size;
    if (isAlone) return null;
    if (held + least <= part) return Math.min(most, part - held);
    return this.#nextToGiveWay(tenant, Math.max(part, held + least)) === null ? null : least;
  }

  #add(tenant: string, stake: Stake): void {
    const own = this.#stakes.get(tenant) ?? new Set<Stake>();
    this.#stakes.set(tenant, own.add(stake));
  }

  #remove(tenant: string, stake: Stake): void {
    const own = this.#stakes.get(tenant);
    own?.delete(stake);
    if (own?.size === 0) this.#stakes.delete(tenant);
    this.#asked.delete(stake);
  }

  /** The equal part of each tenant that holds something or waits, and of this one. */
  #partOf(tenant?: string): number {
    const tenants = new Set([...this.#share.tenants(), ...this.#queue.tenants()]);
    if (tenant !== undefined) tenants.add(tenant);
    return Math.floor(this.#size / tenants.size);
  }

  #ask(owner: string, stake: Stake): void {
    this.#asksLeft--;
    this.#asked.add(stake);
    this.#stakes.get(owner)?.delete(stake);
    this.#comes(owner, stake.amount);
    stake.giveWay?.();
  }

  /** This much more will be given back; less when negative. */
  #comes(tenant: string, amount: number): void {
    this.#comingInAll += amount;
    const coming = (this.#coming.get(tenant) ?? 0) + amount;
    if (coming === 0) this.#coming.delete(tenant);
    else this.#coming.set(tenant, coming);
  }

  /** The other tenant that holds most, if that is above the limit, and its slowest holder. */
  #nextToGiveWay(tenant: string, limit: number): { owner: string; stake: Stake } | null {
    const keeps = (owner: string) => this.#share.heldBy(owner) - (this.#coming.get(owner) ?? 0);
    const above = [...this.#stakes.keys()].filter((owner) => owner !== tenant && keeps(owner) > limit);
    for (const owner of above.sort((a, b) => keeps(b) - keeps(a))) {
      for (const stake of this.#stakes.get(owner) ?? []) if (stake.giveWay !== null) return { owner, stake };
    }
    return null;
  }

  /** Those that have waited long, one of each tenant, in the order of their turn. */
  #overdue(): Waiter[] {
    const now = performance.now();
    const tenants = leastFirst(this.#queue.tenants(), (tenant) => this.#share.heldBy(tenant));
    return tenants.flatMap((tenant) => {
      const longest = this.#queue.longest(tenant);
      return longest === null || now - longest.since < this.#patienceMs ? [] : [longest.waiter];
    });
  }

  /** What the waiter's tenant will hold with this share. */
  #afterwards({ tenant, amount }: Waiter): number {
    return this.#share.heldBy(tenant) + amount;
  }

  /**
   * Lets others give way until there is enough for this waiter.
   *
   * @param promised how much of what comes back is meant for other waiters
   * @returns how much this one will have
   */
  #makeRoom(waiter: Waiter, promised: number): number {
    const { tenant, amount } = waiter;
    while (this.#queue.isWaiting(waiter)) {
      const [part, after] = [this.#partOf(), this.#afterwards(waiter)];
      const comesBack = this.#comingInAll - promised;
      if (this.#share.roomOf(tenant, after <= part ? part : null, comesBack) >= amount) return amount;
      const next = this.#nextToGiveWay(tenant, Math.max(part, after));
      if (next === null || this.#asksLeft === 0) return 0;
      this.#ask(next.owner, next.stake);
    }
    return 0;
  }

  #look(): void {
    this.#isLooking = false;
    const part = this.#partOf();
    this.#isShort = this.#overdue().some((waiter) => this.#afterwards(waiter) <= part);
    this.#queue.serve();
    this.#asksLeft = ASKED_AT_ONCE;
    let promised = 0;
    for (const waiter of this.#overdue()) promised += this.#makeRoom(waiter, promised);
    if (this.#queue.size > 0) this.#lookLater(this.#asksLeft > 0 ? LOOK_MS : GO_ON_MS);
    else this.#isShort = false;
  }

  #lookLater(ms: number): void {
    if (this.#isLooking) return;
    this.#isLooking = true;
    this.#later(() => this.#look(), ms);
  }
}
