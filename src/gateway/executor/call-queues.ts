// Decides which accepted call starts next. Each agent with waiting calls has a queue, first come first served. When
// places are short, the queues of the tenant that holds the least go first and take turns among themselves. A queue in
// memory holds few IDs. The database is the real queue: when the one in memory has run dry, as many calls as there are
// places are taken from it at once.
import { createFairShare, type FairShare, leastFirst, type Shortage } from "../../concurrency/fair-share.ts";
import { AgentQueue, type QueueEntry } from "./agent-queue.ts";

const QUEUE_LENGTH_MAX = 256;
const WAITING_MAX = 20_000;
const TAKE_AGAIN_MS = 1000;
/** After so many vain tries it is another tenant's turn: a tenant may have thousands of queues. */
const TRIES_MAX = 16;
/** Calls that are taken from the database together. */
const BLOCK_MAX = 64;
/** When the remaining queues are tried, if no call ends before. */
const TRY_AGAIN_MS = 250;
/** Bodies that may run outside the shared limit, one per tenant: otherwise small bodies could keep a large one out. */
const BESIDE_MAX = 8;

export interface CallQueuesOptions<W extends QueueEntry> {
  /** Calls that run at once. */
  readonly places: number;
  readonly agentPlaces: number;
  /** Bytes of request bodies that running calls hold in memory. */
  readonly bodyBytes: number;
  /** The most that the body of a call has which is taken without being looked at before. */
  readonly blockBodyBytes: number;
  /** Takes up to so many of the agent's oldest pending calls, none of which is waiting here or being taken already. */
  takeBlock(tenant: string, agentId: string, places: number): Promise<CallBlock<W>>;
  /** Runs a call. Its place is free again when this resolves. Never rejects. */
  run(agentId: string, item: W): Promise<void>;
}

/** Calls that have been taken together. */
export interface CallBlock<W> {
  /** The oldest first. */
  readonly taken: readonly W[];
  /** The one that is next and was not taken, since its body is large: it needs memory of its own first. */
  readonly large: W | null;
}

/** A place that a call holds from before it is stored. Exactly one of these is called. */
export interface HeldPlace<W> {
  /** Runs the call, and frees the place at its end. */
  run(inHand: W): void;
  giveBack(): void;
}

export class CallQueues<W extends QueueEntry> {
  readonly #options: CallQueuesOptions<W>;
  readonly #queues = new Map<string, AgentQueue<W>>();
  readonly #places: FairShare;
  readonly #bodies: FairShare;
  readonly #beside = createFairShare({ size: BESIDE_MAX });
  /** The calls whose bodies run outside the shared limit. */
  readonly #besides = new Set<string>();
  /** Queues whose next call waits for places that other agents hold, by tenant, in turn. */
  readonly #short = new Map<string, Set<AgentQueue<W>>>();
  #waiting = 0;
  #blockPlaces = 0;
  #running = 0;
  #paused = false;
  #tryAgain: ReturnType<typeof setTimeout> | undefined;
  readonly #idle = Promise.withResolvers<void>();

  constructor(options: CallQueuesOptions<W>) {
    this.#options = options;
    this.#places = createFairShare({ size: options.places, agentMax: options.agentPlaces });
    this.#bodies = createFairShare({ size: options.bodyBytes, least: 0 });
  }

  get running(): number {
    return this.#running;
  }

  /** Takes a place for a call that is about to be stored. Null when it could not start at once: then it is offered. */
  reserve(agentId: string, item: W): HeldPlace<W> | null {
    const queue = this.#queueOf(item.tenant, agentId);
    const isNext = queue.complete && queue.waiting.length === 0 && !this.#paused;
    if (!isNext || this.#take(agentId, item) !== null) return null;
    this.#hold(queue, item);
    return {
      run: (inHand) => this.#run(queue, inHand),
      giveBack: () => {
        queue.started.delete(item.id);
        this.#end(queue, item);
      },
    };
  }

  /** Adds a call that has just become pending in the database. If it can start at once, `inHand` is run. */
  offer(agentId: string, item: W, inHand: W): void {
    const place = this.reserve(agentId, item);
    if (place !== null) {
      place.run(inHand);
      return;
    }
    const queue = this.#queueOf(item.tenant, agentId);
    if (queue.complete && queue.waiting.length < QUEUE_LENGTH_MAX && this.#waiting < WAITING_MAX) {
      this.#enqueue(queue, [item]);
    } else {
      queue.more = true;
    }
    this.#serve(queue);
  }

  /** Looks for the agent's pending calls in the database, since some may never have been offered. */
  look(tenant: string, agentId: string): void {
    const queue = this.#queueOf(tenant, agentId);
    queue.more = true;
    this.#serve(queue);
  }

  /** Starts nothing more; resolves when what runs has ended. */
  pause(): Promise<void> {
    this.#paused = true;
    clearTimeout(this.#tryAgain);
    if (this.#running === 0) this.#idle.resolve();
    return this.#idle.promise;
  }

  #queueOf(tenant: string, agentId: string): AgentQueue<W> {
    const queue = this.#queues.get(agentId) ?? new AgentQueue<W>(tenant, agentId);
    this.#queues.set(agentId, queue);
    return queue;
  }

  #enqueue(queue: AgentQueue<W>, items: readonly W[]): void {
    queue.waiting.push(...items);
    this.#waiting += items.length;
  }

  #hold(queue: AgentQueue<W>, item: W): void {
    queue.started.add(item.id);
    this.#running++;
  }

  /** @param held what its place was taken for, if that was not the call itself */
  #run(queue: AgentQueue<W>, item: W, held: QueueEntry = item): void {
    void this.#options.run(queue.agentId, item).then(() => {
      queue.started.delete(item.id);
      this.#end(queue, held);
    });
  }

  /** Gives back the place that a call held. */
  #end(queue: AgentQueue<W>, held: QueueEntry): void {
    this.#running--;
    this.#places.giveBack(held.tenant, queue.agentId);
    this.#giveBackBody(held);
    this.#serveShort();
    this.#serve(queue);
    if (this.#paused && this.#running === 0) this.#idle.resolve();
  }

  /** Takes a place and memory for the body, or says which of them is short. */
  #take(agentId: string, item: QueueEntry): Shortage | null {
    const short = this.#places.take(item.tenant, agentId);
    if (short !== null) return short;
    const heavy = this.#takeBody(item);
    if (heavy !== null) this.#places.giveBack(item.tenant, agentId);
    return heavy;
  }

  #takeBody({ tenant, id, body_bytes }: QueueEntry): Shortage | null {
    const heavy = this.#bodies.take(tenant, null, body_bytes);
    if (heavy === null) return null;
    if (this.#bodies.heldBy(tenant) > 0 || this.#beside.heldBy(tenant) > 0) return heavy;
    const short = this.#beside.take(tenant);
    if (short === null) this.#besides.add(id);
    return short;
  }

  #giveBackBody({ tenant, id, body_bytes }: QueueEntry): void {
    if (this.#besides.delete(id)) this.#beside.giveBack(tenant);
    else this.#bodies.giveBack(tenant, null, body_bytes);
  }

  /** Starts what the queue may start, and takes more when that is all it has. */
  #serve(queue: AgentQueue<W>): void {
    if (this.#paused) return;
    for (let next = queue.waiting[0]; next !== undefined; next = queue.waiting[0]) {
      const short = this.#take(queue.agentId, next);
      if (short !== null) {
        this.#waitFor(queue, short);
        return;
      }
      queue.waiting.shift();
      this.#waiting--;
      this.#hold(queue, next);
      this.#run(queue, next);
    }
    if (queue.more && !queue.isTaking) this.#takeMore(queue);
    else if (queue.empty) this.#queues.delete(queue.agentId);
  }

  /** A queue that waits for its own agent's calls is served when one of them ends. */
  #waitFor(queue: AgentQueue<W>, short: Shortage): void {
    if (short !== "own") this.#shortOf(queue.tenant).add(queue);
  }

  #shortOf(tenant: string): Set<AgentQueue<W>> {
    const queues = this.#short.get(tenant) ?? new Set<AgentQueue<W>>();
    this.#short.set(tenant, queues);
    return queues;
  }

  #serveShort(): void {
    for (const tenant of leastFirst(this.#short.keys(), (name) => this.#places.heldBy(name))) {
      this.#serveShortOf(tenant);
      if (this.#shortOf(tenant).size === 0) this.#short.delete(tenant);
    }
    if (this.#short.size === 0) return;
    this.#tryAgain ??= setTimeout(() => {
      this.#tryAgain = undefined;
      this.#serveShort();
    }, TRY_AGAIN_MS);
  }

  /** Queues that are tried in vain move to the end. */
  #serveShortOf(tenant: string): void {
    const queues = this.#shortOf(tenant);
    let tries = TRIES_MAX;
    for (const queue of queues) {
      if (this.#places.roomOf(tenant) <= 0 || tries === 0) return;
      const before = this.#running;
      queues.delete(queue);
      this.#serve(queue);
      tries = this.#running > before ? TRIES_MAX : tries - 1;
    }
  }

  /** Places, with memory for what is taken for them; none when that is short. */
  #placesFor(queue: AgentQueue<W>): QueueEntry[] {
    const held: QueueEntry[] = [];
    while (held.length < BLOCK_MAX) {
      const id = `block ${this.#blockPlaces++}`;
      const place = { tenant: queue.tenant, id, body_bytes: this.#options.blockBodyBytes };
      const short = this.#take(queue.agentId, place);
      if (short !== null) {
        if (held.length === 0) this.#waitFor(queue, short);
        break;
      }
      this.#running++;
      held.push(place);
    }
    return held;
  }

  #takeMore(queue: AgentQueue<W>): void {
    const held = this.#placesFor(queue);
    if (held.length === 0) return;
    queue.isTaking = true;
    // Cleared before, so that an offer meanwhile sets it again.
    queue.more = false;
    this.#options.takeBlock(queue.tenant, queue.agentId, held.length).then(
      ({ taken, large }) => {
        queue.isTaking = false;
        queue.more ||= large !== null || taken.length === held.length;
        if (large !== null) this.#enqueue(queue, [large]);
        for (const [at, item] of taken.entries()) {
          queue.started.add(item.id);
          this.#run(queue, item, held[at]);
        }
        for (const place of held.slice(taken.length)) this.#end(queue, place);
      },
      () => {
        for (const place of held) this.#end(queue, place);
        // The store is away. Its calls are taken when it is back.
        setTimeout(() => {
          queue.isTaking = false;
          queue.more = true;
          this.#serve(queue);
        }, TAKE_AGAIN_MS);
      },
    );
  }
}
