// Decides which accepted call starts next. Each agent with waiting calls has a queue, first come first served. When
// places are short, the queues of the tenant that holds the least go first and take turns among themselves. A queue in
// memory holds few IDs. The database is the real queue: the rest is read from it when the queue has run dry.
import { createFairShare, type FairShare, leastFirst, type Shortage } from "../../concurrency/fair-share.ts";

export interface QueueEntry {
  readonly tenant: string;
  readonly id: string;
  readonly body_bytes: number;
}

const QUEUE_LENGTH_MAX = 256;
const WAITING_MAX = 20_000;
const READ_AGAIN_MS = 1000;
/** After so many vain tries it is another tenant's turn: a tenant may have thousands of queues. */
const TRIES_MAX = 16;
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
  /** The agent's oldest pending calls, oldest first. */
  read(agentId: string, limit: number): Promise<W[]>;
  /** Runs a call. Its place is free again when this resolves. Never rejects. */
  run(agentId: string, item: W): Promise<void>;
}

class AgentQueue<W extends QueueEntry> {
  readonly agentId: string;
  readonly waiting: W[] = [];
  /** Calls of this queue that hold a place: started, and not yet ended. */
  readonly started = new Set<string>();
  /** Whether the database may hold calls that are neither waiting nor started. */
  more = false;
  reading = false;

  constructor(agentId: string) {
    this.agentId = agentId;
  }

  /** All of the agent's pending calls are in this queue. */
  get complete(): boolean {
    return !this.more && !this.reading;
  }

  get empty(): boolean {
    return this.complete && this.waiting.length === 0 && this.started.size === 0;
  }
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
    const queue = this.#queueOf(agentId);
    const isNext = queue.complete && queue.waiting.length === 0 && !this.#paused;
    if (!isNext || this.#take(agentId, item) !== null) return null;
    this.#hold(queue, item);
    return {
      run: (inHand) => this.#run(queue, inHand),
      giveBack: () => this.#end(queue, item),
    };
  }

  /** Adds a call that has just become pending in the database. If it can start at once, `inHand` is run. */
  offer(agentId: string, item: W, inHand: W): void {
    const place = this.reserve(agentId, item);
    if (place !== null) {
      place.run(inHand);
      return;
    }
    const queue = this.#queueOf(agentId);
    if (queue.complete && queue.waiting.length < QUEUE_LENGTH_MAX && this.#waiting < WAITING_MAX) {
      this.#enqueue(queue, [item]);
    } else {
      queue.more = true;
    }
    this.#serve(queue);
  }

  /** Reads the agent's pending calls from the database, since some may never have been offered. */
  look(agentId: string): void {
    const queue = this.#queueOf(agentId);
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

  #queueOf(agentId: string): AgentQueue<W> {
    const queue = this.#queues.get(agentId) ?? new AgentQueue<W>(agentId);
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

  #run(queue: AgentQueue<W>, item: W): void {
    void this.#options.run(queue.agentId, item).then(() => this.#end(queue, item));
  }

  /** Gives back the place that a call held. */
  #end(queue: AgentQueue<W>, item: W): void {
    this.#running--;
    queue.started.delete(item.id);
    this.#places.giveBack(item.tenant, queue.agentId);
    this.#giveBackBody(item);
    this.#serveShort();
    this.#serve(queue);
    if (this.#paused && this.#running === 0) this.#idle.resolve();
  }

  /** Takes a place and memory for the body, or says which of them is short. */
  #take(agentId: string, item: W): Shortage | null {
    const short = this.#places.take(item.tenant, agentId);
    if (short !== null) return short;
    const heavy = this.#takeBody(item);
    if (heavy !== null) this.#places.giveBack(item.tenant, agentId);
    return heavy;
  }

  #takeBody({ tenant, id, body_bytes }: W): Shortage | null {
    const heavy = this.#bodies.take(tenant, null, body_bytes);
    if (heavy === null) return null;
    if (this.#bodies.heldBy(tenant) > 0 || this.#beside.heldBy(tenant) > 0) return heavy;
    const short = this.#beside.take(tenant);
    if (short === null) this.#besides.add(id);
    return short;
  }

  #giveBackBody({ tenant, id, body_bytes }: W): void {
    if (this.#besides.delete(id)) this.#beside.giveBack(tenant);
    else this.#bodies.giveBack(tenant, null, body_bytes);
  }

  /** Starts what the queue may start, and reads more when that is all it has. */
  #serve(queue: AgentQueue<W>): void {
    if (this.#paused) return;
    for (let next = queue.waiting[0]; next !== undefined; next = queue.waiting[0]) {
      const short = this.#take(queue.agentId, next);
      // A queue that waits for its own agent's calls is served when one of them ends.
      if (short !== null && short !== "own") this.#shortOf(next.tenant).add(queue);
      if (short !== null) return;
      queue.waiting.shift();
      this.#waiting--;
      this.#hold(queue, next);
      this.#run(queue, next);
    }
    if (queue.more && !queue.reading) this.#readMore(queue);
    else if (queue.empty) this.#queues.delete(queue.agentId);
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

  #readMore(queue: AgentQueue<W>): void {
    queue.reading = true;
    // Cleared before the read, so that an offer during the read sets it again.
    queue.more = false;
    const limit = QUEUE_LENGTH_MAX + queue.started.size;
    this.#options.read(queue.agentId, limit).then(
      (found) => {
        queue.reading = false;
        queue.more ||= found.length === limit;
        this.#enqueue(
          queue,
          found.filter((item) => !queue.started.has(item.id)),
        );
        this.#serve(queue);
      },
      () => {
        // The store is away. Its calls are read when it is back.
        setTimeout(() => {
          queue.reading = false;
          queue.more = true;
          this.#serve(queue);
        }, READ_AGAIN_MS);
      },
    );
  }
}
