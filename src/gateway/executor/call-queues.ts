// Decides which accepted call starts next. Each agent with waiting calls has a queue, first come first served. A queue in
// memory holds few IDs. The database is the real queue: when the one in memory has run dry, as many calls as there are
// slots are taken from it at once.
import type { Shortage } from "../../concurrency/fair-share.ts";
import { AgentQueue, LENGTH_MAX, type QueueEntry } from "./agent-queue.ts";
import { createRunSlots, createStarvedQueues, type RunSlots, type RunSlotsOptions } from "./run-slots.ts";

/** Kept in memory, and read ahead for one tenant. The others are found in the database. */
const WAITING_MAX = 20_000;
const TAKE_AGAIN_MS = 1000;
/** Calls that are taken from the database together. */
const BLOCK_MAX = 64;
/** Calls that have been made and wait for their record may be so many without a slot: while the store is away, no more come. */
const RECORDING_MAX = 256;

export interface CallQueuesOptions<W extends QueueEntry> extends RunSlotsOptions {
  /** The most that the body of a call has which is taken without being looked at before. */
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
  /** The one that is next and was not taken, since its body is large: it needs memory of its own first. */
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
  /** Queues whose next call waits for slots that other agents hold. */
  readonly #starved: ReturnType<typeof createStarvedQueues<AgentQueue<W>>>;
  /** Calls that all queues keep in memory. */
  #waiting = 0;
  /** The same by tenant. */
  readonly #waitingOf = new Map<string, number>();
  #blockSlots = 0;
  #running = 0;
  /** Of those, the ones without a slot. */
  #recording = 0;
  #paused = false;
  readonly #idle = Promise.withResolvers<void>();

  constructor(options: CallQueuesOptions<W>) {
    this.#options = options;
    this.#slots = createRunSlots(options);
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
    if (queue.keep(item, this.#waiting < WAITING_MAX)) this.#keep(item.tenant, 1);
    this.#serve(queue);
  }

  /** Looks for the agent's pending calls in the database, since some may never have been offered. */
  look(tenant: string, agentId: string): void {
    const queue = this.#queueOf(tenant, agentId);
    queue.lookAgain();
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
      if (!hasSlot || this.#recording === RECORDING_MAX) return;
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

  /** Of a slot that no call has. */
  #end(queue: AgentQueue<W>, held: QueueEntry): void {
    this.#running--;
    this.#giveBack(queue, held);
    this.#tellIdle();
  }

  /** Gives back the slot that a call held, to whoever is next. */
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
   * A queue that waits for its own agent's calls is served when one of them ends, and at each look for pending calls, since
   * the agent may have more by then.
   */
  #waitFor(queue: AgentQueue<W>, short: Shortage): void {
    if (short !== "own") this.#starved.add(queue);
  }

  /** Slots, with memory for what is taken for them; none when that is short. */
  #slotsFor(queue: AgentQueue<W>): QueueEntry[] {
    const held: QueueEntry[] = [];
    while (held.length < BLOCK_MAX) {
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
    const room = Math.min(LENGTH_MAX, WAITING_MAX - (this.#waitingOf.get(tenant) ?? 0));
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
    }, TAKE_AGAIN_MS);
  }

  #goOn(queue: AgentQueue<W>, next: readonly W[], hasMore = false): void {
    const before = queue.length;
    queue.goOn(next, hasMore);
    this.#keep(queue.tenant, queue.length - before);
    this.#serve(queue);
  }
}
