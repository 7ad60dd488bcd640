// A clock for model tests: timers fire only when a test lets time pass.
import { afterEach, beforeEach, jest } from "bun:test";

/** Resolves when everything that waited on a promise that is settled by now has run. */
export async function settled(): Promise<void> {
  for (let turns = 0; turns < 20; turns++) await Promise.resolve();
}

/** Replaces the timers of each test of the current `describe`. All times are in milliseconds, and multiples of ten. */
export function useSimulatedClock() {
  const clock = {
    now: 0,
    async pass(ms: number): Promise<void> {
      for (const end = clock.now + ms; clock.now < end; ) {
        clock.now += 10;
        jest.advanceTimersByTime(10);
        await settled();
      }
    },
  };
  beforeEach(() => {
    jest.useFakeTimers();
    clock.now = 0;
  });
  afterEach(() => void jest.useRealTimers());
  return clock;
}
