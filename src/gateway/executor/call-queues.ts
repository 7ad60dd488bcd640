// In one file, since all of it keeps one account of places.
// Decides which accepted call starts next. Each agent with waiting calls has a queue, first come first served. When
// places are short, the queues of the tenant that holds the least go first and take turns among themselves. A queue in
// memory holds few IDs. The database is the real queue: when the one in memory has run dry, as many calls as there are
// places are taken from it at once.
import {
  type AgentLimit,
  createFairShare,
  type FairShare,
  leastFirst,
  type Shortage,
} from "../../concurrency/fair-share.ts";
import type { AgentLimitOf } from "../replicas/service.ts";
import { AgentQueue, LENGTH_MAX, type QueueEntry } from "./agent-queue.ts";

const WAITING_MAX = 20_000;
const TAKE_AGAIN_MS = 1000;
/** After so many vain tries it is another tenant's turn: a tenant may have thousands of queues. */
const TRIES_MAX = 16;
/** Calls that are taken from the database together. */
const BLOCK_MAX = 64;
/** When the remaining queues are tried, if no call ends before. */
const TRY_AGAIN_MS = 250;
/** Calls that have been made and wait for their record may be so many without a place: while the store is away, no more come. */
const RECORDING_MAX = 256;
/** Bodies that may run outside the shared limit, one per tenant: otherwise small bodies could keep a large one out. */
const BESIDE_MAX = 8;

export interface CallQueuesOptions<W extends QueueEntry> {
  /** Calls that run at once. */
  readonly places: number;
  readonly agentPlaces: number | AgentLimitOf;
  /** Bytes of request bodies that running calls hold in memory. */
  readonly bodyBytes: number;
  /** The most that the body of a call has which is taken without being looked at before. */
  readonly blockBodyBytes: number;
  /**
   * Takes up to so many of the agent's oldest pending calls behind that of ID `after`, none of which is waiting here or
   * being taken already.
   */
  takeBlock(tenant: string, agentId: string, places: number, after: string): Promise<CallBlock<W>>;
  /** The agent's next pending calls behind that of ID `after`, as far as only this process may take them. */
  readOwn(tenant: string, agentId: string, after: string, limit: number): Promise<OwnBlock<W>>;
  /**
   * Runs a call, and resolves when it has ended. Never rejects.
   *
   * @param made called when the upstream has answered: the place is free then, so that the next call is claimed in the same
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
  /** Of those, the ones without a place. */
  #recording = 0;
  #paused = false;
  #tryAgain: ReturnType<typeof setTimeout> | undefined;
  readonly #idle = Promise.withResolvers<void>();

  constructor(options: CallQueuesOptions<W>) {
    this.#options = options;
    this.#places = createFairShare({ size: options.places, agentMax: this.#agentMax(options.agentPlaces) });
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
    if (this.#waiting >= WAITING_MAX || !queue.keep(item)) {
      queue.more = true;
      queue.fromStart ||= item.id < queue.last;
    } else this.#waiting++;
    this.#serve(queue);
  }

  /** Looks for the agent's pending calls in the database, since some may never have been offered. */
  look(tenant: string, agentId: string): void {
    const queue = this.#queueOf(tenant, agentId);
    queue.more = true;
    queue.fromStart = true;
    queue.isShared = false;
    this.#serve(queue);
  }

  /** Starts nothing more; resolves when what runs has ended. */
  pause(): Promise<void> {
    this.#paused = true;
    clearTimeout(this.#tryAgain);
    if (this.#running === 0) this.#idle.resolve();
    return this.#idle.promise;
  }

  #agentMax(agentPlaces: number | AgentLimitOf): number | AgentLimit {
    if (typeof agentPlaces === "number") return agentPlaces;
    return agentPlaces({
      running: (tenant, agentId) => this.#places.heldBy(tenant, agentId),
      more: (_tenant, agentId) => {
        const queue = this.#queues.get(agentId);
        if (queue !== undefined) this.#serve(queue);
      },
    });
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
    let hasPlace = true;
    const giveBack = () => {
      hasPlace = false;
      queue.started.delete(item.id);
      this.#giveBack(queue, held);
    };
    const made = () => {
      if (!hasPlace || this.#recording === RECORDING_MAX) return;
      this.#recording++;
      giveBack();
    };
    void this.#options.run(queue.agentId, item, made).then(() => {
      this.#running--;
      if (hasPlace) giveBack();
      else this.#recording--;
      this.#tellIdle();
    });
  }

  /** Of a place that no call has. */
  #end(queue: AgentQueue<W>, held: QueueEntry): void {
    this.#running--;
    this.#giveBack(queue, held);
    this.#tellIdle();
  }

  /** Gives back the place that a call held, to whoever is next. */
  #giveBack(queue: AgentQueue<W>, held: QueueEntry): void {
    this.#places.giveBack(held.tenant, queue.agentId);
    this.#giveBackBody(held);
    this.#serveShort();
    this.#serve(queue);
  }

  #tellIdle(): void {
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

  /** A queue that waits for its own agent's calls is served when one of them ends, or when the agent may have more. */
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
    // Cleared before, so that a look meanwhile sets them again.
    queue.more = false;
    const after = queue.fromStart ? "" : queue.last;
    queue.fromStart = false;
    this.#options.takeBlock(queue.tenant, queue.agentId, held.length, after).then(
      ({ taken, large }) => {
        const isAll = large === null && taken.length < held.length;
        queue.block = new Set(taken.map(({ id }) => id));
        queue.last = taken.at(-1)?.id ?? queue.last;
        for (const [at, item] of taken.entries()) {
          queue.started.add(item.id);
          this.#run(queue, item, held[at]);
        }
        for (const place of held.slice(taken.length)) this.#end(queue, place);
        if (isAll) this.#goOn(queue, []);
        else if (large !== null) this.#goOn(queue, [large], true);
        else this.#readAhead(queue);
      },
      () => {
        for (const place of held) this.#end(queue, place);
        this.#goOnLater(queue);
      },
    );
  }

  /**
   * What only this process may take is taken one by one from here on, each as soon as a place is free: blocks of one agent
   * follow one another, and with short calls its places would be free for a third of the time (measured).
   */
  #readAhead(queue: AgentQueue<W>): void {
    if (queue.isShared) {
      this.#goOn(queue, [], true);
      return;
    }
    this.#options.readOwn(queue.tenant, queue.agentId, queue.last, LENGTH_MAX).then(
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
      queue.fromStart = true;
      this.#goOn(queue, [], true);
    }, TAKE_AGAIN_MS);
  }

  /** If all that is pending is in memory then, what was offered meanwhile waits there too; else in the database. */
  #goOn(queue: AgentQueue<W>, next: readonly W[], hasMore = false): void {
    const { offered, last, block } = queue;
    queue.offered = [];
    this.#waiting -= offered.length;
    queue.isTaking = false;
    const isMissed = offered.some(({ id }) => id < last && !block.has(id));
    queue.fromStart ||= isMissed;
    queue.more ||= hasMore || isMissed;
    const known = new Set([...queue.started, ...next.map(({ id }) => id)]);
    const others = queue.more ? [] : offered.filter(({ id }) => id > last && !known.has(id));
    this.#enqueue(queue, [...next.filter(({ id }) => !queue.started.has(id)), ...others]);
    this.#serve(queue);
  }
}
