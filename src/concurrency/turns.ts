// What others send is worked on step by step, and all such work together takes a few milliseconds of a turn of the event
// loop: whoever sends much, or makes much work by little, keeps nobody else waiting. The steps are shared out by tenant
// first, for one may have any number of streams.
import { createRoundRobin } from "./round-robin.ts";

const TURN_MS = 4;
/** What follows a step, up to the write to a caller, comes after the turn and may cost more than it did. */
const STEPS_MAX = 8;

/** Gives whether there is more to do at once. */
type TurnStep = () => boolean;

const waiting = createRoundRobin<TurnStep>();
let isScheduled = false;

/** Does this step in one of the next turns, and again until it gives false: one of each tenant in turn. */
export function inTurns(step: TurnStep, tenant: string): void {
  waiting.add(tenant, step);
  schedule();
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
    // A step that throws takes no other one along.
    schedule();
  }
}
