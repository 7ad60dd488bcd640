import { afterEach, beforeEach, expect, jest, test } from "bun:test";
import { silentLog } from "../core/log.ts";
import { withClockStepGuard } from "./cleanup.ts";

const EVERY_MS = 3_600_000;

beforeEach(() => void jest.useFakeTimers());
afterEach(() => void jest.useRealTimers());

function hours() {
  let [wall, own, runs] = [1_790_000_000_000, 0, 0];
  const clock = { now: () => wall };
  const stop = withClockStepGuard({ clock, log: silentLog, everyMs: EVERY_MS, monotonic: () => own }, async () => {
    runs++;
  });
  return {
    stop,
    runs: () => runs,
    /** An hour passes, and the clock is set by so much beside. */
    pass(stepMs = 0) {
      wall += EVERY_MS + stepMs;
      own += EVERY_MS;
      jest.advanceTimersByTime(EVERY_MS);
    },
  };
}

test("repeated work runs first when the clock has been right for a while, and then goes on", () => {
  const { pass, runs, stop } = hours();
  expect(runs()).toBe(0);
  pass();
  pass();
  expect(runs()).toBe(2);
  stop();
  pass();
  expect(runs()).toBe(2);
});

test.each([40 * 86_400_000, -40 * 86_400_000, 120_000])(
  "repeated work is put off when the clock is set by %d ms",
  (step) => {
    const { pass, runs, stop } = hours();
    pass();
    pass(step);
    expect(runs()).toBe(1);
    pass();
    expect(runs()).toBe(2);
    stop();
  },
);
