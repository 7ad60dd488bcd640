// Decides which accepted call starts next. The database is the queue: memory holds what runs, and for each agent whether some
// of its calls wait in the database. A call that finds a free slot starts at once, unless others of its agent wait. When slots
// come free, that many of the agent's oldest calls are taken from the database together.
//
// A call that runs takes a slot, and memory for its body. Both are shared out by tenant, and an agent has a limit of slots of
// its own. When something is given back, the agents that wait for what others hold are served: those of the tenant that holds
// the least first, which take turns among themselves.
import { MAX } from "../../kernel/limits.ts";
import { createFairShare, leastFirst, type Shortage } from "../../kernel/share.ts";

export interface QueueEntry {
  readonly tenant: string;
  readonly id: string;
  readonly body_bytes: number;
}

export interface CallQueuesOptions<W extends QueueEntry> extends RunSlotsOptions {
  /** The longest body of a call that is taken in a block. A call with a longer body first needs memory of its own. */
  readonly blockBodyBytes: number;
  /** Takes up to `slots` of the agent's oldest pending calls with IDs above `after`, none of which is being taken already. */
  takeBlock(tenant: string, agentId: string, slots: number, after: string): Promise<CallBlock<W>>;
  /**
   * Runs a call, and resolves when its end is recorded. Never rejects.
   * @param freeSlot called when the upstream has answered, so that the next call is claimed in the write that ends this one
   *   (8 % less work of the main thread per call, and a seventh less written)
   */
  run(agentId: string, item: W, freeSlot: () => void): Promise<void>;
}

export interface CallBlock<W> {
  /** The oldest first. */
  readonly taken: readonly W[];
  /** The call after them, if it was not taken because its body is large. */
  readonly large: W | null;
}

/** An agent that may have calls waiting in the database. */
interface Backlog<W> {
  readonly tenant: string;
  readonly agentId: string;
  /** Whether calls may wait that are not being taken now. */
  hasMore: boolean;
  /** No call with an ID up to this one waits. */
  after: string;
  isTaking: boolean;
  /** The oldest call that was offered while a block was being taken: the block may have missed it. */
  offered: string;
  /** The next call, if it needs memory of its own. */
  large: W | null;
}

/** Sorts after every ID. */
const ABOVE_ALL_IDS = "~";

export class CallQueues<W extends QueueEntry> {
  readonly #options: CallQueuesOptions<W>;
  /** By agent ID. */
  readonly #backlogs = new Map<string, Backlog<W>>();
  readonly #slots: RunSlots;
  readonly inUse: RunSlots["inUse"];
  /** Agents whose next call waits for slots that other agents hold. */
  readonly #starved: ReturnType<typeof createStarvedQueues<Backlog<W>>>;
  #blockSlots = 0;
  #running = 0;
  /** Calls that have given back their slot and wait for the write of their end. */
  #recording = 0;
  #paused = false;
  readonly #idle = Promise.withResolvers<void>();

  constructor(options: CallQueuesOptions<W>) {
    this.#options = options;
    this.#slots = createRunSlots(options);
    this.inUse = this.#slots.inUse;
    this.#starved = createStarvedQueues(this.#slots, (backlog) => {
      const before = this.#running;
      this.#serve(backlog);
      return this.#running > before;
    });
  }

  get running(): number {
    return this.#running;
  }

  /**
   * Takes a slot for a call that is about to be stored. Null when the call can't start at once; it is to be offered then.
   * @returns two functions, of which exactly one is to be called
   */
  reserve(agentId: string, item: W) {
    if (this.#paused || this.#backlogs.has(agentId) || this.#slots.take(agentId, item) !== null) return null;
    this.#running++;
    return {
      /** Runs the call, and gives back the slot at its end. */
      run: (stored: W) => this.#run(agentId, stored),
      giveBack: () => this.#giveBackUnused(agentId, item),
    };
  }

  /** Says that calls of this agent wait in the database. @param oldest lowest ID never offered before; empty if unknown */
  offer(tenant: string, agentId: string, oldest = ""): void {
    const known = this.#backlogs.get(agentId);
    const backlog = known ?? newBacklog<W>(tenant, agentId);
    if (known === undefined) this.#backlogs.set(agentId, backlog);
    // A waiting agent is served when a slot comes free. Trying again for each of its calls added 1 µs to an accept (measured).
    const isWaiting = known?.hasMore && !known.isTaking && oldest !== "";
    backlog.hasMore = true;
    if (oldest < backlog.after) backlog.after = "";
    if (oldest < backlog.offered) backlog.offered = oldest;
    if (!isWaiting) this.#serve(backlog);
  }

  /** Starts no more calls; resolves when the running ones have ended. */
  pause(): Promise<void> {
    this.#paused = true;
    this.#starved.stop();
    this.#tellIdle();
    return this.#idle.promise;
  }

  /** @param held the entry for which the slot was taken, if that was not the call itself */
  #run(agentId: string, item: W, held: QueueEntry = item): void {
    let hasSlot = true;
    const giveBack = () => {
      hasSlot = false;
      this.#giveBack(agentId, held);
    };
    const freeSlot = () => {
      if (!hasSlot || this.#recording === MAX.callsRecording) return;
      this.#recording++;
      giveBack();
    };
    void this.#options.run(agentId, item, freeSlot).then(() => {
      this.#running--;
      if (hasSlot) giveBack();
      else this.#recording--;
      this.#tellIdle();
    });
  }

  /** Gives back a slot that no call uses. */
  #giveBackUnused(agentId: string, held: QueueEntry): void {
    this.#running--;
    this.#giveBack(agentId, held);
    this.#tellIdle();
  }

  /** Gives back a slot, in which the next call may start. */
  #giveBack(agentId: string, held: QueueEntry): void {
    this.#slots.giveBack(agentId, held);
    this.#starved.serve();
    const backlog = this.#backlogs.get(agentId);
    if (backlog !== undefined) this.#serve(backlog);
  }

  #tellIdle(): void {
    if (this.#paused && this.#running === 0) this.#idle.resolve();
  }

  #serve(backlog: Backlog<W>): void {
    const { agentId, large } = backlog;
    if (this.#paused || backlog.isTaking) return;
    if (large !== null) {
      const short = this.#slots.take(agentId, large);
      if (short !== null) {
        this.#waitFor(backlog, short);
        return;
      }
      backlog.large = null;
      this.#running++;
      this.#run(agentId, large);
    }
    if (backlog.hasMore) this.#takeMore(backlog);
    else if (this.#backlogs.get(agentId) === backlog) this.#backlogs.delete(agentId);
  }

  /** An agent at its limit is not starved: it is served when one of its calls ends, and by each sweep, as its limit may rise. */
  #waitFor(backlog: Backlog<W>, short: Shortage): void {
    if (short !== "own") this.#starved.add(backlog);
  }

  /** As many slots, with memory for a small body each, as the agent may have now; none when they are short. */
  #slotsFor(backlog: Backlog<W>): QueueEntry[] {
    const held: QueueEntry[] = [];
    // At most so many calls are taken from the database together.
    while (held.length < 64) {
      const id = `block ${this.#blockSlots++}`;
      const slot = { tenant: backlog.tenant, id, body_bytes: this.#options.blockBodyBytes };
      const short = this.#slots.take(backlog.agentId, slot);
      if (short !== null) {
        if (held.length === 0) this.#waitFor(backlog, short);
        break;
      }
      this.#running++;
      held.push(slot);
    }
    return held;
  }

  #takeMore(backlog: Backlog<W>): void {
    const { tenant, agentId, after } = backlog;
    const held = this.#slotsFor(backlog);
    if (held.length === 0) return;
    // These fields are set before the query, so that calls offered meanwhile change them again.
    [backlog.isTaking, backlog.hasMore, backlog.offered] = [true, false, ABOVE_ALL_IDS];
    this.#options.takeBlock(tenant, agentId, held.length, after).then(
      ({ taken, large }) => {
        const last = taken.at(-1)?.id ?? after;
        backlog.after = backlog.offered < last ? "" : last;
        backlog.large = large;
        backlog.hasMore ||= large !== null || taken.length === held.length;
        backlog.isTaking = false;
        for (const [at, item] of taken.entries()) this.#run(agentId, item, held[at]);
        for (const slot of held.slice(taken.length)) this.#giveBackUnused(agentId, slot);
        this.#serve(backlog);
      },
      () => {
        for (const slot of held) this.#giveBackUnused(agentId, slot);
        // The database is away. Try again after a second.
        setTimeout(() => {
          backlog.isTaking = false;
          this.offer(tenant, agentId);
        }, 1000);
      },
    );
  }
}

function newBacklog<W>(tenant: string, agentId: string): Backlog<W> {
  return { tenant, agentId, hasMore: true, after: "", isTaking: false, offered: ABOVE_ALL_IDS, large: null };
}

/** After so many tries in vain the next tenant is served: a tenant may have thousands of queues. */
const TRIES_MAX = 16;
/** After so many tries in vain for all tenants, the rest wait for the next turn of the event loop: tenants may be thousands. */
const TRIES_TOGETHER = 64;

export interface RunSlotsOptions {
  /** How many calls may run at once. */
  readonly slots: number;
  /** How many calls of one agent may run at once; a function where that changes. */
  readonly agentSlots: number | (() => number);
  /** Bytes of request bodies that running calls hold in memory. */
  readonly bodyBytes: number;
}

export type RunSlots = ReturnType<typeof createRunSlots>;

export function createRunSlots(options: RunSlotsOptions) {
  const slots = createFairShare({ size: options.slots, agentMax: options.agentSlots });
  const bodies = createFairShare({ size: options.bodyBytes, least: 0 });
  const extra = createFairShare({ size: MAX.extraBodies });
  /** IDs of the calls whose bodies count outside the shared limit, so that each tenant can run one while others fill it. */
  const inExtra = new Set<string>();

  function takeBody({ tenant, id, body_bytes }: QueueEntry): Shortage | null {
    const heavy = bodies.take(tenant, null, body_bytes);
    if (heavy === null) return null;
    if (bodies.heldBy(tenant) > 0 || extra.heldBy(tenant) > 0) return heavy;
    const short = extra.take(tenant);
    if (short === null) inExtra.add(id);
    return short;
  }

  return {
    /** Takes a slot and memory for the body. Otherwise says who must give something back first. */
    take(agentId: string, call: QueueEntry): Shortage | null {
      const short = slots.take(call.tenant, agentId);
      if (short !== null) return short;
      const heavy = takeBody(call);
      if (heavy !== null) slots.giveBack(call.tenant, agentId);
      return heavy;
    },
    giveBack(agentId: string, { tenant, id, body_bytes }: QueueEntry): void {
      slots.giveBack(tenant, agentId);
      if (inExtra.delete(id)) extra.giveBack(tenant);
      else bodies.giveBack(tenant, null, body_bytes);
    },
    heldBy: slots.heldBy,
    roomOf: (tenant: string) => slots.roomOf(tenant),
    /** By the names of their rows in kernel/limits.ts. */
    inUse: () => ({ runningCalls: slots.inUse, runningBodyBytes: bodies.inUse }),
  };
}

/**
 * The queues whose next call waits for slots or memory that others hold.
 * @param serve starts the queue's waiting calls and says whether it could start any; it re-adds a queue that is still short
 */
export function createStarvedQueues<Q extends { readonly tenant: string }>(
  slots: Pick<RunSlots, "heldBy" | "roomOf">,
  serve: (queue: Q) => boolean,
) {
  /** By tenant, in the order in which they are tried. */
  const starved = new Map<string, Set<Q>>();
  let tryAgain: ReturnType<typeof setTimeout> | undefined;
  /** The tenants that are tried in the next turn of the event loop, the one that held the least first. */
  let untried: readonly string[] = [];
  /** Whether something was given back in the middle of a round: tenants tried before may take it. */
  let isMissed = false;

  const queuesOf = (tenant: string): Set<Q> => starved.getOrInsertComputed(tenant, () => new Set());

  /** Queues that are tried in vain move to the end. Returns how many those were. */
  function serveTenant(tenant: string): number {
    const queues = queuesOf(tenant);
    let [vain, tries] = [0, TRIES_MAX];
    // Each queue is tried once: those that are still short go to the end.
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

  /** Serves the first of these tenants now, and the rest in the next turn of the event loop. */
  function serveSome(tenants: readonly string[]): void {
    let tries = TRIES_TOGETHER;
    for (const [at, tenant] of tenants.entries()) {
      if (tries <= 0) {
        untried = tenants.slice(at);
        setImmediate(() => serveSome(untried));
        return;
      }
      tries -= serveTenant(tenant);
      if (queuesOf(tenant).size === 0) starved.delete(tenant);
    }
    untried = [];
    if (isMissed) setImmediate(serveAll);
    isMissed = false;
    if (starved.size === 0) return;
    tryAgain ??= setTimeout(() => {
      tryAgain = undefined;
      serveAll();
    }, 250);
  }

  function serveAll(): void {
    if (untried.length > 0) isMissed = true;
    else serveSome(leastFirst(starved.keys(), (name) => slots.heldBy(name)));
  }

  return {
    add: (queue: Q): void => void queuesOf(queue.tenant).add(queue),
    /** Called when a slot or memory was given back. */
    serve: serveAll,
    /** Ends the tries that a timer starts. */
    stop: (): void => clearTimeout(tryAgain),
  };
}
