// Turns of the event loop: how work that callers, upstreams and the store cause gives the loop back in time. Work that one
// tenant can make much of is done in steps, a few milliseconds of them in one turn, one tenant after the other. So nobody
// holds up the others by sending much, or by sending little that makes much work.
// One per thread, since a thread has one event loop, and all work on it shares its turns.

import { createRoundRobin, createSlots } from "./share.ts";
import { countWait, endsWithin, LONG_WAIT_MS } from "./wait.ts";

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
 * Whether a short step may be done at once: nobody waits for a turn, and what was done at once in this turn of the event
 * loop has not taken its time yet. To wait for a turn takes longer than most short steps.
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

/** Does a piece of work that can't be split, and may be long, in a turn with all such work. @throws what it throws */
export function inTurn<T>(tenant: string, piece: () => T): Promise<Awaited<T>> {
  const { promise, resolve, reject } = Promise.withResolvers<T>();
  inTurns(() => {
    try {
      resolve(piece());
    } catch (error) {
      reject(error);
    }
    return false;
  }, tenant);
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
 * Calls `each` for the items in their order: the first ones at once if that may be, since most work is no more than that, and
 * the others in turns with all such work.
 *
 * @param each gives the cost of the item, which is counted and not timed, so that the same work always takes the same steps
 * @throws what `each` throws
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
export function turnOf(tenant: string): Promise<void> | undefined {
  return isTurnUsedUp() ? new Promise((resolve) => waitingRequests.add(tenant, resolve)) : undefined;
}

/**
 * For work that another request has begun and this one waits for too. Thousands may wait for it, and would all go on at
 * once. So each goes on when a request of its tenant may begin.
 *
 * @throws what it rejects with
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

// Work that takes long in one piece runs in the runtime's pool of threads, two pieces of two tenants at a time, and then
// one of each other tenant in turn. So nobody waits behind much work of somebody else, and the pool stays free for what
// else it is for. A fair queue of two would cost each piece 5 to 70 µs of the event loop where many wait (measured), this 1.

const AT_ONCE = 2;

/** Never rejects. */
type ThreadWork = () => Promise<void>;

const waitingPieces = createRoundRobin<ThreadWork>();
const busy = new Set<string>();

/** Rejects with what the work rejects with. */
export function inThreadTurn<T>(tenant: string, work: () => Promise<T>): Promise<T> {
  const { promise, resolve, reject } = Promise.withResolvers<T>();
  waitingPieces.add(tenant, () => work().then(resolve, reject));
  begin();
  return promise;
}

function begin(): void {
  while (busy.size < AT_ONCE) {
    const next = waitingPieces.next(busy);
    if (next === undefined) return;
    void run(next.tenant, next.item);
  }
}

async function run(tenant: string, piece: ThreadWork): Promise<void> {
  busy.add(tenant);
  await piece();
  busy.delete(tenant);
  begin();
}

// Turns of the event loop for work on stored rows that is done in steps: SQLite answers on the event loop, and one long
// piece would hold up every tenant. Few steps are taken in one turn, and they are shared out by tenant.

/** Of all such work together; a tenant alone may take two. */
const inStepSlot = createSlots(3);

/**
 * Takes a step when it is the tenant's turn, in a turn of the event loop with few other such steps. A step that takes long
 * waits for Postgres, which needs no turns of the event loop, so it gives its slot back. SQLite answers before any timer.
 */
export async function inStoreTurns<T>(tenant: string, step: () => Promise<T>): Promise<T> {
  const begun = Promise.withResolvers<T>();
  const slot = inStepSlot(tenant, async () => {
    await new Promise((resolve) => setImmediate(resolve));
    begun.resolve(step());
    await endsWithin(LONG_WAIT_MS, begun.promise).catch(() => {});
  });
  await countWait(slot);
  return begun.promise;
}

// What waits for a whole turn of the event loop, to see what the sockets bring next: all of a turn together, since a timer
// for each costs 0.6 µs (measured on Bun 1.4.5).

export interface TurnWaiter {
  turned(): void;
}

let turnWaiters: TurnWaiter[] = [];

/** Its `turned` is called when every socket has been looked at once more. */
export function waitWholeTurn(waiter: TurnWaiter): void {
  if (turnWaiters.push(waiter) === 1) setImmediate(lookAgain);
}

/** What is set for the end of a turn runs before the sockets are looked at again, so a whole turn has passed at the second. */
function lookAgain(): void {
  setImmediate(tellAll, turnWaiters);
  turnWaiters = [];
}

function tellAll(waiters: TurnWaiter[]): void {
  try {
    for (let next = waiters.shift(); next !== undefined; next = waiters.shift()) next.turned();
  } finally {
    // One that throws does not stop the others.
    if (waiters.length > 0) setImmediate(tellAll, waiters);
  }
}
