// Turns of the event loop: how work that callers, upstreams and the store cause gives the loop back in time. Work that one
// tenant can make much of is done in steps, a few milliseconds of them in one turn, one tenant after the other. So nobody
// holds up the others by sending much, or by sending little that makes much work.
// One per thread, since a thread has one event loop, and all work on it shares its turns.
import { AsyncLocalStorage } from "node:async_hooks";
import { countWait, endsWithin, LONG_WAIT_MS } from "./wait.ts";

/** Turns among all that wait: one of each tenant in turn, and within a tenant in the order of arrival. */
export function createRoundRobin<T>() {
  const waiting = new Map<string, Set<T>>();
  let size = 0;
  return {
    get size() {
      return size;
    },
    /** An item that waits already keeps its place. */
    add(tenant: string, item: T): void {
      const items = waiting.get(tenant) ?? new Set<T>();
      if (items.has(item)) return;
      waiting.set(tenant, items.add(item));
      size++;
    },
    /** Takes out the next one that is of none of the tenants `passedOver`. */
    next(passedOver?: ReadonlySet<string>): { readonly tenant: string; readonly item: T } | undefined {
      for (const [tenant, items] of waiting) {
        if (passedOver?.has(tenant)) continue;
        // It stands last from now on.
        waiting.delete(tenant);
        for (const item of items) {
          items.delete(item);
          if (items.size > 0) waiting.set(tenant, items);
          size--;
          return { tenant, item };
        }
      }
      return undefined;
    },
  };
}

const TURN_MS = 4;
/** What a step leads to, up to the write to a caller, runs after the turn and may cost more than the step. */
const STEPS_MAX = 8;

/** Returns whether there is more to do at once. */
type TurnStep = () => boolean;

const waitingSteps = createRoundRobin<TurnStep>();
let isScheduled = false;

/** Does this step in one of the next turns, and again until it returns false: one of each tenant in turn. */
export function inTurns(step: TurnStep, tenant: string): void {
  waitingSteps.add(tenant, step);
  schedule();
}

/** Until when short steps may be done at once in this turn of the event loop, of performance.now(). */
let atOnceUntil: number | null = null;

/**
 * Whether a short step, which takes less time than most waits for a turn, may be done at once: nobody waits for a turn, and what
 * was done at once in this turn of the event loop has not taken its time yet.
 */
export function mayDoAtOnce(): boolean {
  if (waitingSteps.size > 0) return false;
  const now = performance.now();
  if (atOnceUntil === null) {
    atOnceUntil = now + TURN_MS;
    setImmediate(() => {
      atOnceUntil = null;
    });
  }
  return now < atOnceUntil;
}

/** Does a short step at once if that may be, and in one of the next turns where many come in one moment. */
export const atOnceOrInTurn = <T>(tenant: string, step: () => T): T | Promise<Awaited<T>> =>
  mayDoAtOnce() ? step() : inTurn(tenant, step);

/** Does a piece of work that can't be split, and may be long, in a turn with all such work. @throws what it throws */
export function inTurn<T>(tenant: string, piece: () => T): Promise<Awaited<T>> {
  const { promise, resolve, reject } = Promise.withResolvers<T>();
  // Bound, since a turn is begun by another request, and a piece that asks the store must do so for its own request.
  const step = AsyncLocalStorage.bind(() => {
    try {
      resolve(piece());
    } catch (error) {
      reject(error);
    }
    return false;
  });
  inTurns(step, tenant);
  return promise as Promise<Awaited<T>>;
}

function schedule(): void {
  if (isScheduled || waitingSteps.size === 0) return;
  isScheduled = true;
  setImmediate(takeTurn);
}

function takeTurn(): void {
  isScheduled = false;
  const until = performance.now() + TURN_MS;
  try {
    for (let steps = 0; steps < STEPS_MAX && performance.now() < until; steps++) {
      const next = waitingSteps.next();
      if (next === undefined) break;
      if (next.item()) waitingSteps.add(next.tenant, next.item);
    }
  } finally {
    // A step that throws does not stop the others.
    schedule();
  }
}

/** The work of one step. A unit is the cost of looking at a byte: a nanosecond or two. */
const STEP_WORK = 262_144;

/**
 * Calls `each` for the items in their order: the first ones at once if that may be, which is all of most work, the others in turns.
 * @param each gives the item's cost, which is counted and not timed, so that the steps are always the same. @throws what it throws
 */
export async function eachInTurns<T>(items: readonly T[], tenant: string, each: (item: T, at: number) => number) {
  for (let at = 0; at < items.length; ) {
    const step = () => {
      for (let work = 0; work < STEP_WORK && at < items.length; at++) work += each(items[at] as T, at);
    };
    if (at === 0 && mayDoAtOnce()) step();
    else await inTurn(tenant, step);
  }
}

// When a request begins. Those that arrive in one turn of the event loop begin at once, for up to a few milliseconds; the
// others follow in the next turns, one tenant after the other. So a thousand that arrive together hold up no streams.

/** Includes what a request does up to its first wait, such as a query of SQLite. */
const BEGUN_MS_MAX = 8;
/** Requests that begin together before their cost is measured. */
const BEGUN_AT_ONCE = 4;
/** This many promise steps bring a request to its first wait, or far enough. */
const STEPS = 32;

const waitingRequests = createRoundRobin<() => void>();
/** When the first request of this turn of the event loop began; null before that. */
let turnBeganAt: number | null = null;

/** Whether a request that begins now has to wait. If not, it counts as begun in this turn of the event loop. */
export function isTurnUsedUp(): boolean {
  const now = performance.now();
  if (turnBeganAt !== null) return waitingRequests.size > 0 || now - turnBeganAt > BEGUN_MS_MAX;
  beginTurn(now);
  return false;
}

/** Undefined when a request of the tenant may begin at once; else it may when this resolves. */
export const turnOf = (tenant: string): Promise<void> | undefined =>
  isTurnUsedUp() ? new Promise((resolve) => waitingRequests.add(tenant, resolve)) : undefined;

/**
 * The outcome of work that another request has begun. Thousands may wait for it, so each goes on only when a request of its tenant
 * may begin. @throws what it rejects with
 */
export async function joinInFlight<T>(shared: Promise<T>, tenant: string): Promise<T> {
  try {
    return await shared;
  } finally {
    if (turnBeganAt === null) beginTurn(performance.now());
    await new Promise<void>((resolve) => waitingRequests.add(tenant, resolve));
  }
}

function beginTurn(now: number): void {
  turnBeganAt = now;
  setImmediate(nextTurn);
}

async function nextTurn(): Promise<void> {
  turnBeganAt = null;
  if (waitingRequests.size === 0) return;
  const began = performance.now();
  beginTurn(began);
  while (waitingRequests.size > 0 && performance.now() - began <= BEGUN_MS_MAX) {
    for (let begun = 0; begun < BEGUN_AT_ONCE; begun++) waitingRequests.next()?.item();
    for (let step = 0; step < STEPS; step++) await null;
  }
}

/** Adds to a count; one that comes to nothing is dropped. @returns the count */
export function addTo<K>(counts: Map<K, number>, key: K, by: number): number {
  const count = (counts.get(key) ?? 0) + by;
  if (count > 0) counts.set(key, count);
  else counts.delete(key);
  return count;
}

// Work in few slots, one piece of each tenant in turn, and few of one tenant at a time. So nobody waits behind much work of
// somebody else. A fair queue would cost each piece 5 to 70 µs of the event loop where many wait (measured), this 1.

/** @param each how many slots one tenant may have */
function createTurnSlots(size: number, each: number) {
  const waiting = createRoundRobin<() => Promise<void>>();
  const held = new Map<string, number>();
  const full = new Set<string>();
  let running = 0;

  function count(tenant: string, by: number): void {
    running += by;
    if (addTo(held, tenant, by) === each) full.add(tenant);
    else full.delete(tenant);
  }

  function begin(): void {
    while (running < size) {
      const next = waiting.next(full);
      if (next === undefined) return;
      void run(next.tenant, next.item);
    }
  }

  async function run(tenant: string, piece: () => Promise<void>): Promise<void> {
    count(tenant, 1);
    await piece();
    count(tenant, -1);
    begin();
  }

  /** Rejects with what the work rejects with. */
  return <T>(tenant: string, work: () => Promise<T>): Promise<T> => {
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    // Bound, since a piece is begun by one that has left its slot, which acts for another request.
    const piece = AsyncLocalStorage.bind(() => work().then(resolve, reject));
    waiting.add(tenant, piece);
    begin();
    return promise;
  };
}

/** For work that takes long in one piece, in the runtime's pool of threads, which stays free for what else it is for. */
export const inThreadTurn = createTurnSlots(2, 1);

const inStepSlot = createTurnSlots(3, 2);

/**
 * A step of work on stored rows, in a turn with few other such steps: SQLite answers on the event loop (before any timer), and one
 * long piece would hold up every tenant. A step that takes long waits for Postgres, which needs no turns: it gives its slot back.
 */
export async function inStoreTurns<T>(tenant: string, step: () => Promise<T>): Promise<T> {
  const begun = Promise.withResolvers<T>();
  const slot = inStepSlot(tenant, async () => {
    await new Promise(setImmediate);
    begun.resolve(step());
    await endsWithin(LONG_WAIT_MS, begun.promise).catch(() => {});
  });
  await countWait(() => slot);
  return begun.promise;
}

// What waits for a whole turn of the event loop, to see what the sockets bring next: all of a turn together, since a timer
// for each costs 0.6 µs (measured on Bun 1.4.5).

let turnWaiters: (() => void)[] = [];

/** Calls `turned` when every socket has been looked at once more. */
export function waitWholeTurn(turned: () => void): void {
  if (turnWaiters.push(turned) === 1) setImmediate(lookAgain);
}

/** What is set for the end of a turn runs before the sockets are looked at again, so a whole turn has passed at the second. */
function lookAgain(): void {
  setImmediate(tellAll, turnWaiters);
  turnWaiters = [];
}

function tellAll(waiters: (() => void)[]): void {
  try {
    for (let next = waiters.shift(); next !== undefined; next = waiters.shift()) next();
  } finally {
    // One that throws does not stop the others.
    if (waiters.length > 0) setImmediate(tellAll, waiters);
  }
}
