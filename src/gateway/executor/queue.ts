// Decides which accepted call starts next. Each agent with pending calls has a queue, first come first served. The database
// is the real queue: memory holds few IDs of it, and when those are used up, as many calls as there are free slots are taken
// from the database at once.
//
// A call that runs takes a slot, and memory for its body. Both are shared out by tenant, and an agent has a limit of slots of
// its own. When something is given back, the queues that wait for what others hold are served: those of the tenant that holds
// the least first, which take turns among themselves.

import { MAX } from "../../kernel/limits.ts";
import { createFairShare, leastFirst, type Shortage } from "../../kernel/share.ts";

export interface CallQueuesOptions<W extends QueueEntry> extends RunSlotsOptions {
  /** The longest body of a call that is taken in a block. A call with a longer one first needs memory of its own. */
  readonly blockBodyBytes: number;
  /**
   * Takes up to so many of the agent's oldest pending calls behind that of ID `after`, none of which is waiting here or
   * being taken already.
   */
  takeBlock(tenant: string, agentId: string, slots: number, after: string): Promise<CallBlock<W>>;
  /** The agent's next pending calls behind that of ID `after`, as far as only this process may take them. */
  readOwn(tenant: string, agentId: string, after: string, limit: number): Promise<OwnBlock<W>>;
  /**
   * Runs a call, and resolves when it has ended. Never rejects.
   *
   * @param made called when the upstream has answered: the slot is free then, so that the next call is claimed in the same
   *   write as the end of this one (8 % less of the main thread for a whole call, and a seventh less written)
   */
  run(agentId: string, item: W, made: () => void): Promise<void>;
}

export interface OwnBlock<W> {
  /** The oldest first. */
  readonly own: readonly W[];
  /** Whether these are all that are pending. */
  readonly isAll: boolean;
}

/** Calls that have been taken together. */
export interface CallBlock<W> {
  /** The oldest first. */
  readonly taken: readonly W[];
  /** The one that is next and was not taken, since its body is large. */
  readonly large: W | null;
}

/** A slot that a call holds from before it is stored. Exactly one of these is called. */
export interface HeldSlot<W> {
  /** Runs the call, and frees the slot at its end. */
  run(inHand: W): void;
  giveBack(): void;
}

export class CallQueues<W extends QueueEntry> {
  readonly #options: CallQueuesOptions<W>;
  readonly #queues = new Map<string, AgentQueue<W>>();
  readonly #slots: RunSlots;
  readonly inUse: RunSlots["inUse"];
  /** Queues whose next call waits for slots that other agents hold. */
  readonly #starved: ReturnType<typeof createStarvedQueues<AgentQueue<W>>>;
  /** Calls that all queues keep in memory. */
  #waiting = 0;
  /** By tenant, the calls that its queues keep in memory. */
  readonly #waitingOf = new Map<string, number>();
  #blockSlots = 0;
  #running = 0;
  /** Running calls without a slot. */
  #recording = 0;
  #paused = false;
  readonly #idle = Promise.withResolvers<void>();

  constructor(options: CallQueuesOptions<W>) {
    this.#options = options;
    this.#slots = createRunSlots(options);
    this.inUse = this.#slots.inUse;
    this.#starved = createStarvedQueues(this.#slots, (queue) => {
      const before = this.#running;
      this.#serve(queue);
      return this.#running > before;
    });
  }

  get running(): number {
    return this.#running;
  }

  /** Takes a slot for a call that is about to be stored. Null when it could not start at once: then it is offered. */
  reserve(agentId: string, item: W): HeldSlot<W> | null {
    const queue = this.#queueOf(item.tenant, agentId);
    const isNext = queue.isDry && !this.#paused;
    if (!isNext || this.#slots.take(agentId, item) !== null) return null;
    queue.start(item);
    this.#running++;
    return {
      run: (inHand) => this.#run(queue, inHand),
      giveBack: () => {
        queue.end(item);
        this.#end(queue, item);
      },
    };
  }

  /** Adds a call that has just become pending in the database. If it can start at once, `inHand` is run. */
  offer(agentId: string, item: W, inHand: W): void {
    const slot = this.reserve(agentId, item);
    if (slot !== null) {
      slot.run(inHand);
      return;
    }
    const queue = this.#queueOf(item.tenant, agentId);
    if (queue.keep(item, this.#waiting < MAX.queuedCalls)) this.#keep(item.tenant, 1);
    this.#serve(queue);
  }

  /** Asks the database for the agent's pending calls, since some may never have been offered. */
  checkPending(tenant: string, agentId: string): void {
    const queue = this.#queueOf(tenant, agentId);
    queue.checkAgain();
    this.#serve(queue);
  }

  /** Starts nothing more; resolves when what runs has ended. */
  pause(): Promise<void> {
    this.#paused = true;
    this.#starved.stop();
    if (this.#running === 0) this.#idle.resolve();
    return this.#idle.promise;
  }

  #queueOf(tenant: string, agentId: string): AgentQueue<W> {
    const queue = this.#queues.get(agentId) ?? new AgentQueue<W>(tenant, agentId);
    this.#queues.set(agentId, queue);
    return queue;
  }

  /** So many more calls are kept in memory, or are just being read for that. */
  #keep(tenant: string, more: number): void {
    this.#waiting += more;
    const own = (this.#waitingOf.get(tenant) ?? 0) + more;
    if (own > 0) this.#waitingOf.set(tenant, own);
    else this.#waitingOf.delete(tenant);
  }

  /** @param held what its slot was taken for, if that was not the call itself */
  #run(queue: AgentQueue<W>, item: W, held: QueueEntry = item): void {
    let hasSlot = true;
    const giveBack = () => {
      hasSlot = false;
      queue.end(item);
      this.#giveBack(queue, held);
    };
    const made = () => {
      if (!hasSlot || this.#recording === MAX.callsRecording) return;
      this.#recording++;
      giveBack();
    };
    void this.#options.run(queue.agentId, item, made).then(() => {
      this.#running--;
      if (hasSlot) giveBack();
      else this.#recording--;
      this.#tellIdle();
    });
  }

  /** Gives back a slot that no call has. */
  #end(queue: AgentQueue<W>, held: QueueEntry): void {
    this.#running--;
    this.#giveBack(queue, held);
    this.#tellIdle();
  }

  /** Gives back the slot that a call held; the next call may start in it. */
  #giveBack(queue: AgentQueue<W>, held: QueueEntry): void {
    this.#slots.giveBack(queue.agentId, held);
    this.#starved.serve();
    this.#serve(queue);
  }

  #tellIdle(): void {
    if (this.#paused && this.#running === 0) this.#idle.resolve();
  }

  /** Starts what the queue may start, and takes more when that is all it has. */
  #serve(queue: AgentQueue<W>): void {
    if (this.#paused) return;
    for (let next = queue.next; next !== undefined; next = queue.next) {
      const short = this.#slots.take(queue.agentId, next);
      if (short !== null) {
        this.#waitFor(queue, short);
        return;
      }
      queue.startNext();
      this.#keep(queue.tenant, -1);
      this.#running++;
      this.#run(queue, next);
    }
    if (queue.wantsMore) this.#takeMore(queue);
    else if (queue.empty) this.#queues.delete(queue.agentId);
  }

  /**
   * A queue that waits for its own agent's calls is served when one of them ends, and at each check for pending calls, since
   * the agent may have more by then.
   */
  #waitFor(queue: AgentQueue<W>, short: Shortage): void {
    if (short !== "own") this.#starved.add(queue);
  }

  /** Slots, with memory for what is taken for them; none when that is short. */
  #slotsFor(queue: AgentQueue<W>): QueueEntry[] {
    const held: QueueEntry[] = [];
    // So many are taken from the database together.
    while (held.length < 64) {
      const id = `block ${this.#blockSlots++}`;
      const slot = { tenant: queue.tenant, id, body_bytes: this.#options.blockBodyBytes };
      const short = this.#slots.take(queue.agentId, slot);
      if (short !== null) {
        if (held.length === 0) this.#waitFor(queue, short);
        break;
      }
      this.#running++;
      held.push(slot);
    }
    return held;
  }

  #takeMore(queue: AgentQueue<W>): void {
    const held = this.#slotsFor(queue);
    if (held.length === 0) return;
    const after = queue.beginTaking();
    this.#options.takeBlock(queue.tenant, queue.agentId, held.length, after).then(
      ({ taken, large }) => {
        const isAll = large === null && taken.length < held.length;
        queue.took(taken);
        for (const [at, item] of taken.entries()) {
          queue.start(item);
          this.#run(queue, item, held[at]);
        }
        for (const slot of held.slice(taken.length)) this.#end(queue, slot);
        if (isAll) this.#goOn(queue, []);
        else if (large !== null) this.#goOn(queue, [large], true);
        else this.#readAhead(queue);
      },
      () => {
        for (const slot of held) this.#end(queue, slot);
        this.#goOnLater(queue);
      },
    );
  }

  /**
   * What only this process may take is taken one by one from here on, each as soon as a slot is free: blocks of one agent
   * follow one another, and with short calls its slots would be free for a third of the time (measured).
   */
  #readAhead(queue: AgentQueue<W>): void {
    const { tenant } = queue;
    const room = Math.min(MAX.agentQueuedCalls, MAX.queuedCalls - (this.#waitingOf.get(tenant) ?? 0));
    if (queue.isShared || room <= 0) {
      this.#goOn(queue, [], true);
      return;
    }
    this.#keep(tenant, room);
    const reading = this.#options.readOwn(tenant, queue.agentId, queue.last, room);
    reading
      .finally(() => this.#keep(tenant, -room))
      .then(
        ({ own, isAll }) => {
          queue.isShared = own.length === 0 && !isAll;
          this.#goOn(queue, own, !isAll);
        },
        () => this.#goOnLater(queue),
      );
  }

  /** The store is away. Its calls are taken when it is back. */
  #goOnLater(queue: AgentQueue<W>): void {
    setTimeout(() => {
      queue.fromTheStart();
      this.#goOn(queue, [], true);
    }, 1000);
  }

  #goOn(queue: AgentQueue<W>, next: readonly W[], hasMore = false): void {
    const before = queue.length;
    queue.endTaking(next, hasMore);
    this.#keep(queue.tenant, queue.length - before);
    this.#serve(queue);
  }
}

/** After so many vain tries it is another tenant's turn: a tenant may have thousands of queues. */
const TRIES_MAX = 16;
/** After so many of all tenants the others are tried in the next turn of the event loop: there may be thousands of tenants. */
const TRIES_TOGETHER = 64;

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
  const extra = createFairShare({ size: MAX.extraBodies });
  /** The calls whose bodies run outside the shared limit. */
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
      if (inExtra.delete(id)) extra.giveBack(tenant);
      else bodies.giveBack(tenant, null, body_bytes);
    },
    /** The slots that the tenant has now, or one of its agents. */
    heldBy: slots.heldBy,
    /** How many more the tenant may have now. */
    roomOf: (tenant: string) => slots.roomOf(tenant),
    /** Of the rows of kernel/limits.ts. */
    inUse: () => ({ runningCalls: slots.inUse, runningBodyBytes: bodies.inUse }),
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
  /** The starved queues by tenant, in the order in which they are tried. */
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
    }, 250);
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

/** A pending call as its queue knows it. */
export interface QueueEntry {
  readonly tenant: string;
  readonly id: string;
  readonly body_bytes: number;
}

/**
 * What is in memory of one agent's pending calls, and what is known of those that are only in the database: whether there are
 * any, and behind which ID. It neither takes calls nor starts them.
 */
export class AgentQueue<W extends QueueEntry> {
  readonly tenant: string;
  readonly agentId: string;
  readonly #waiting: W[] = [];
  /** Calls of this queue that hold a slot: started, and not yet ended. */
  readonly #started = new Set<string>();
  /** Whether the database may hold calls that are neither waiting nor started. */
  #more = false;
  #isTaking = false;
  /** Calls that were offered while others are being taken, which may or may not be among those. */
  #offered: W[] = [];
  /** The oldest call that was offered meanwhile and not kept. */
  #leftOut: string | null = null;
  /** The calls that were last taken in a block, and the last of them. */
  #block: ReadonlySet<string> = new Set();
  #last = "";
  /** Whether there may be calls older than that. */
  #fromStart = true;
  /** Whether others may take what is pending too. */
  isShared = false;

  constructor(tenant: string, agentId: string) {
    this.tenant = tenant;
    this.agentId = agentId;
  }

  /** The call that starts next. */
  get next(): W | undefined {
    return this.#waiting[0];
  }

  /** How many calls it keeps in memory. */
  get length(): number {
    return this.#waiting.length + this.#offered.length;
  }

  /** All of the agent's pending calls are in this queue. */
  get complete(): boolean {
    return !this.#more && !this.#isTaking;
  }

  /** A call that comes now is the next one. */
  get isDry(): boolean {
    return this.complete && this.#waiting.length === 0;
  }

  get empty(): boolean {
    return this.isDry && this.#started.size === 0;
  }

  /** Whether the database is to be asked for more. */
  get wantsMore(): boolean {
    return this.#more && !this.#isTaking;
  }

  /** The ID behind which the database has not been asked. */
  get last(): string {
    return this.#last;
  }

  /**
   * Keeps the call in memory if all that are older are there, or are being taken, and returns whether it did. Else it is
   * found in the database.
   */
  keep(item: W, hasRoom: boolean): boolean {
    const list = this.#isTaking ? this.#offered : this.#waiting;
    const isKept = hasRoom && !this.#more && list.length < MAX.agentQueuedCalls;
    if (isKept) list.push(item);
    else {
      this.#more = true;
      this.#fromStart ||= item.id < this.#last;
      if (this.#leftOut === null || item.id < this.#leftOut) this.#leftOut = item.id;
    }
    return isKept;
  }

  /** There may be calls in the database that were never offered, and others may have left them. */
  checkAgain(): void {
    this.#more = true;
    this.#fromStart = true;
    this.isShared = false;
  }

  /** A call has a slot. */
  start({ id }: QueueEntry): void {
    this.#started.add(id);
  }

  /** The next call has a slot. */
  startNext(): void {
    const next = this.#waiting.shift();
    if (next !== undefined) this.start(next);
  }

  /** A call has given its slot back. */
  end({ id }: QueueEntry): void {
    this.#started.delete(id);
  }

  /** A block is about to be taken: of the calls behind this ID. */
  beginTaking(): string {
    this.#isTaking = true;
    // Cleared before, so that a check meanwhile sets them again.
    this.#more = false;
    const after = this.#fromStart ? "" : this.#last;
    this.#fromStart = false;
    this.#leftOut = null;
    return after;
  }

  /** These have been taken, the oldest first. */
  took(taken: readonly W[]): void {
    this.#block = new Set(taken.map(({ id }) => id));
    this.#last = taken.at(-1)?.id ?? this.#last;
  }

  /** The database is to be asked from the agent's oldest pending call on. */
  fromTheStart(): void {
    this.#fromStart = true;
  }

  /**
   * The end of taking. If all that is pending is in memory now, what was offered meanwhile waits there too; else in the
   * database.
   *
   * @param next the oldest of what is still pending
   */
  endTaking(next: readonly W[], hasMore: boolean): void {
    const offered = this.#offered;
    const leftOut = this.#leftOut;
    this.#offered = [];
    this.#isTaking = false;
    // The block may have been read before these were stored.
    const isMissed =
      offered.some(({ id }) => id < this.#last && !this.#block.has(id)) || (leftOut !== null && leftOut < this.#last);
    this.#fromStart ||= isMissed;
    this.#more ||= hasMore || isMissed;
    const known = new Set([...this.#started, ...next.map(({ id }) => id)]);
    const others = this.#more ? [] : offered.filter(({ id }) => id > this.#last && !known.has(id));
    this.#waiting.push(...next.filter(({ id }) => !this.#started.has(id)), ...others);
  }
}
