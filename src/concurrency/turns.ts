// Work on what callers and upstreams send is done in steps, and the steps of all such work together take a few
// milliseconds of one turn of the event loop. So nobody holds up the others by sending much, or by sending little that
// makes much work. Steps are shared out by tenant first, because one tenant may have any number of streams.
// One per thread, since a thread has one event loop, and all such work shares its turns.
import { createRoundRobin } from "./round-robin.ts";

const TURN_MS = 4;
/** What a step leads to, up to the write to a caller, runs after the turn and may cost more than the step. */
const STEPS_MAX = 8;

/** Returns whether there is more to do at once. */
type TurnStep = () => boolean;

const waiting = createRoundRobin<TurnStep>();
let isScheduled = false;

/** Does this step in one of the next turns, and again until it returns false: one of each tenant in turn. */
export function inTurns(step: TurnStep, tenant: string): void {
  waiting.add(tenant, step);
  schedule();
}

/** Until when short steps may be done at once in this turn of the event loop, of performance.now(). */
let atOnceUntil: number | null = null;

/**
 * Whether a short step may be done at once: nobody waits for a turn, and what was done at once in this turn of the event
 * loop has not taken its time yet. To wait for a turn takes longer than most short steps.
 */
export function mayDoAtOnce(): boolean {
  if (waiting.size > 0) return false;
  const now = performance.now();
  if (atOnceUntil === null) {
    atOnceUntil = now + TURN_MS;
    setImmediate(() => {
      atOnceUntil = null;
    });
  }
  return now < atOnceUntil;
}

/** Resolves when the last step has been done. Rejects with what a step throws. */
export function doneInTurns(step: TurnStep, tenant: string): Promise<void> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  inTurns(() => {
    try {
      if (step()) return true;
      resolve();
    } catch (error) {
      reject(error);
    }
    return false;
  }, tenant);
  return promise;
}

function schedule(): void {
  if (isScheduled || waiting.size === 0) return;
  isScheduled = true;
  setImmediate(takeTurn);
}

function takeTurn(): void {
  isScheduled = false;
  const until = performance.now() + TURN_MS;
  try {
    for (let steps = 0; steps < STEPS_MAX && performance.now() < until; steps++) {
      const next = waiting.next();
      if (next === undefined) break;
      if (next.item()) waiting.add(next.tenant, next.item);
    }
  } finally {
    // A step that throws does not stop the others.
    schedule();
  }
}
