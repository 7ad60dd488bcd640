// Work that is done step by step, so that others get their turn in between: a generator that yields after each step.

import { during } from "./loop-profile.ts";

export type Steps<T> = Generator<void, T, void>;

/** The same steps, each under a name: see concurrency/loop-profile.ts. */
export function* named<T>(work: string, steps: Steps<T>): Steps<T> {
  for (;;) {
    const { done, value } = during(work, () => steps.next());
    if (done) return value;
    yield;
  }
}

/** All the steps at once, for what is small, or has a thread to itself. */
export function atOnce<T>(steps: Steps<T>): T {
  for (;;) {
    const { done, value } = steps.next();
    if (done) return value;
  }
}
