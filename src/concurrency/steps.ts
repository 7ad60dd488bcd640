// Work that is done step by step, so that others get their turn in between: a generator that yields after each step.
import { doneInTurns } from "./turns.ts";

export type Steps<T> = Generator<void, T, void>;

/** All the steps at once, for what is small, or has a thread to itself. */
export function atOnce<T>(steps: Steps<T>): T {
  for (;;) {
    const { done, value } = steps.next();
    if (done) return value;
  }
}

/**
 * Does the first step at once, since most work has no other, and the rest in turns with all such work.
 *
 * @param signal ends it before the next step
 * @throws what a step throws; the signal's reason
 */
export async function inSteps<T>(steps: Steps<T>, tenant: string, signal?: AbortSignal): Promise<T> {
  let step = steps.next();
  if (!step.done) {
    await doneInTurns(() => {
      signal?.throwIfAborted();
      step = steps.next();
      return !step.done;
    }, tenant);
  }
  return step.value as T;
}

/** Does all steps in turns, the first too, where many may have work at the same moment or that step may be long. */
export function inTurnSteps<T>(steps: Steps<T>, tenant: string, signal?: AbortSignal): Promise<T> {
  function* later(): Steps<T> {
    yield;
    return yield* steps;
  }
  return inSteps(later(), tenant, signal);
}

/** Does a piece of work that can't be split, and may be long, in a turn with all such work. */
export function inOneStep<T>(piece: () => T, tenant: string): Promise<Awaited<T>> {
  function* steps(): Steps<T> {
    yield;
    return piece();
  }
  return Promise.resolve(inSteps(steps(), tenant)) as Promise<Awaited<T>>;
}

/** A body up to this size is judged at once. */
const SMALL_BYTES = 16_384;

/** Does steps over a body. The first steps of many large bodies at once would be too much for one turn. */
export function bodyInSteps<T>(body: Pick<Uint8Array, "byteLength">, steps: Steps<T>, tenant: string): Promise<T> {
  const run = body.byteLength > SMALL_BYTES ? inTurnSteps : inSteps;
  return run(steps, tenant);
}
