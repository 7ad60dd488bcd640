// How many calls of an agent this replica may run, so that all replicas together run no more than the limit. Few calls
// cost nothing; whoever needs more asks for places (places.ts) and keeps them while they are used. Nothing is begun on
// the strength of a lease that may have run out: others may have taken this replica for gone.

import type { AgentLimit } from "../../concurrency/fair-share.ts";
import { createRoundRobin } from "../../concurrency/round-robin.ts";
import { inSlices } from "../../concurrency/slices.ts";
import { isOlder, type Moment, thisMoment } from "../../core/age.ts";
import type { Log } from "../../core/log.ts";
import type { Mode } from "../../core/states.ts";
import type { Store } from "../../storage/store.ts";
import { baseOf, exchange, type PlacesAsk, type PlacesGrant } from "./places.ts";
import { LEASE_MS } from "./store.ts";

/** Who needs more asks for so many times what it has. */
const MORE = 4;
/** What is not used any more is given back at the next look. */
const LOOK_MS = 1_000;
/** The same where there is no base, or somebody else waits; and who did not get more asks again. */
const SOON_MS = 100;
const AFTER_OTHERS_MS = 3 * SOON_MS;
/** Agents in one exchange: 500 of them held the event loop for 20 to 27 ms, this many for 4 to 8 (measured). */
const ASKS_AT_ONCE = 200;

/** What runs the calls of one path. */
export interface PathOfCalls {
  /** How many of the agent run now. */
  running(tenant: string, agentId: string): number;
  /** The agent may have more than before. */
  more(tenant: string, agentId: string): void;
}

/** The limit of each agent, for one path. */
export type AgentLimitOf = (path: PathOfCalls) => AgentLimit;

interface AgentPlacesOptions {
  readonly store: Store;
  readonly log: Log;
  readonly replica: string;
  /** Calls of one agent on one path, of all replicas together. */
  readonly limit: number;
}

/** An agent that needs more than the base, or has it. */
interface Needy {
  readonly tenant: string;
  readonly agentId: string;
  readonly mode: Mode;
  /** It runs no more than the base and these. */
  granted: number;
  /** As the others see it: more than that while it is still to be given back. */
  told: number;
  /** Another one needs some of it. */
  owes: boolean;
  /** The most that has run since the last look. */
  peak: number;
  /** It could have run more. */
  isShort: boolean;
  /** When it may ask for more again, and when it is looked at anyway; of performance.now(). */
  askAt: number;
  lookAt: number;
}

/** A class, since all of it works on one account of what this replica has and needs. */
export class AgentPlaces {
  readonly #options: AgentPlacesOptions;
  readonly #paths = new Map<Mode, PathOfCalls>();
  readonly #needy = new Map<string, Needy>();
  #base = 0;
  #believedAt: Moment | null = null;
  /** Whether the last exchange was answered: else the database may have taken what is counted on here. */
  #isKnown = false;
  #asking: Promise<void> | null = null;
  #timer: ReturnType<typeof setTimeout> | undefined;
  /** When it asks next, if nothing comes before; of performance.now(). */
  #wakesAt = Number.POSITIVE_INFINITY;
  #isStopped = false;

  constructor(options: AgentPlacesOptions) {
    this.#options = options;
  }

  limitOf(mode: Mode): AgentLimitOf {
    return (path) => {
      this.#paths.set(mode, path);
      return { mayHold: (tenant, agentId, amount) => this.#mayHold(mode, tenant, agentId, amount) };
    };
  }

  /** Before any call is made. */
  start(): Promise<void> {
    return this.#ask();
  }

  /**
   * The lease was renewed.
   *
   * @param askedAt before that was asked for
   * @param isMember whether this replica still has its share
   */
  renewed(askedAt: Moment, isMember: boolean): void {
    if (isMember && this.#isKnown) this.#believedAt = askedAt;
    if (!isMember || !this.#isKnown || this.#base < baseOf(this.#options.limit)) this.#wakeAt(0);
  }

  /** Nothing more is asked for. What it has ends with its lease. */
  async stop(): Promise<void> {
    this.#isStopped = true;
    clearTimeout(this.#timer);
    await this.#asking;
  }

  #mayHold(mode: Mode, tenant: string, agentId: string, amount: number): boolean {
    if (amount > this.#options.limit) return false;
    const isOurs = this.#believedAt !== null && !isOlder(this.#believedAt, LEASE_MS);
    if (isOurs && amount <= this.#base) return true;
    const key = keyOf(mode, agentId);
    const known = this.#needy.get(key);
    if (isOurs && known !== undefined && amount <= this.#base + known.granted) {
      known.peak = Math.max(known.peak, amount);
      return true;
    }
    const one: Needy = known ?? { tenant, agentId, mode, ...NEW_NEED };
    this.#needy.set(key, one);
    one.isShort = true;
    // When the last call has ended that ran on what another one needs, that one does not wait longer.
    if (one.owes && amount - 1 <= this.#base + one.granted) one.askAt = 0;
    this.#wakeAt(one.askAt);
    return false;
  }

  #wakeAt(at: number): void {
    if (this.#asking !== null || this.#isStopped || at >= this.#wakesAt) return;
    this.#wakesAt = at;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), Math.max(0, at - performance.now()));
    this.#timer.unref();
  }

  /** Never rejects. */
  #ask(): Promise<void> {
    this.#asking ??= this.#askOnce()
      .catch((error) => {
        this.#options.log.warn("agent_places_not_asked", { error });
        for (const one of this.#needy.values()) one.askAt = one.lookAt = performance.now() + SOON_MS;
      })
      .finally(() => {
        this.#asking = null;
        this.#wakesAt = Number.POSITIVE_INFINITY;
        const next = this.#needy.values().reduce((first, one) => Math.min(first, dueAt(one)), this.#wakesAt);
        this.#wakeAt(next);
      });
    return this.#asking;
  }

  async #askOnce(): Promise<void> {
    const { store, replica, limit } = this.#options;
    const asked = this.#due(ASKS_AT_ONCE);
    for (const one of asked) this.#giveBack(one);
    const askedAt = thisMoment();
    const asksOf = (isNew: boolean) => asked.map((one) => this.#askOf(one, isNew));
    this.#isKnown = false;
    const { isNew, base, grants } = await store.write((tx) => exchange(tx, { replica, limit, asksOf }));
    this.#isKnown = true;
    if (isNew) for (const one of this.#needy.values()) one.granted = one.told = 0;
    this.#base = base;
    this.#believedAt = askedAt;
    const short = asked.filter(({ isShort }) => isShort);
    for (const [at, one] of asked.entries()) this.#take(one, grants[at] ?? NOTHING);
    // Each of them begins calls.
    await inSlices(short, ({ mode, tenant, agentId }) => this.#paths.get(mode)?.more(tenant, agentId));
  }

  /** Some of each tenant by turns, so that nobody waits for all that another one has. */
  #due(most: number): Needy[] {
    const now = performance.now();
    const waiting = createRoundRobin<Needy>();
    for (const one of this.#needy.values()) if (dueAt(one) <= now) waiting.add(one.tenant, one);
    return Array.from({ length: Math.min(most, waiting.size) }, () => waiting.next()?.item).filter(
      (one) => one !== undefined,
    );
  }

  #running({ tenant, agentId, mode }: Needy): number {
    return this.#paths.get(mode)?.running(tenant, agentId) ?? 0;
  }

  /** Before it is told, so that none of it is used meanwhile. */
  #giveBack(one: Needy): void {
    const running = this.#running(one);
    const used = Math.max(2 * one.peak, running) - this.#base;
    if (!one.isShort) one.granted = Math.min(one.granted, Math.max(used, 0));
    one.peak = running;
  }

  #askOf(one: Needy, isNew: boolean): PlacesAsk {
    const { tenant, agentId: agent_id, mode, granted, isShort } = one;
    const base = isNew ? 0 : this.#base;
    const kept = Math.max(isNew ? 0 : granted, this.#running(one) - base, 0);
    const most = Math.min(this.#options.limit, MORE * Math.max(1, base + kept)) - base;
    return { tenant, agent_id, mode, kept, wanted: isShort ? Math.max(kept, most) : kept };
  }

  #take(one: Needy, { granted, part }: PlacesGrant): void {
    const now = performance.now();
    const { agentId, mode, isShort, granted: before, told, owes } = one;
    const key = keyOf(mode, agentId);
    one.granted = Math.min(granted, part);
    one.told = granted;
    one.owes = part < granted;
    // To the end, so that all have their turn.
    this.#needy.delete(key);
    if (!isShort && granted === 0) return;
    this.#needy.set(key, one);
    one.isShort = false;
    one.askAt = now + pauseOf(one.granted > before, owes && told > granted);
    one.lookAt = now + (this.#base === 0 || one.owes ? SOON_MS : LOOK_MS);
  }
}

const NEW_NEED = { granted: 0, told: 0, owes: false, peak: 0, isShort: false, askAt: 0, lookAt: 0 };

/** Whoever has given back what another one needs lets that one ask first. */
function pauseOf(hasMore: boolean, hasGivenBack: boolean): number {
  if (hasGivenBack) return AFTER_OTHERS_MS;
  return hasMore ? 0 : SOON_MS;
}

const NOTHING: PlacesGrant = { granted: 0, part: 0 };

function keyOf(mode: Mode, agentId: string): string {
  return `${agentId} ${mode}`;
}

function dueAt({ isShort, askAt, lookAt }: Needy): number {
  return isShort ? askAt : lookAt;
}
