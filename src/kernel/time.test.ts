import { afterEach, expect, setSystemTime, spyOn, test } from "bun:test";
import fc from "fast-check";
import { isOlder, isWallOlder, thisMoment } from "./time.ts";

const MINUTE_MS = 60_000;
const START = Date.UTC(2026, 0, 1);
const restore: { mockRestore(): void }[] = [];
afterEach(() => {
  for (const spy of restore.splice(0)) spy.mockRestore();
  setSystemTime();
});

/** Two clocks that the test sets: that of the thread, and that of the machine. */
function clocks() {
  let [monotonic, wall] = [1_000, START];
  restore.push(spyOn(performance, "now").mockImplementation(() => monotonic));
  setSystemTime(wall);
  return (own: number, machine: number) => {
    monotonic += own;
    wall += machine;
    setSystemTime(wall);
  };
}

/** What happens to the clocks, and how much time has passed in truth. */
const event = fc.oneof(
  fc.record({ runs: fc.nat(MINUTE_MS) }),
  // The monotonic clock stands while the machine sleeps.
  fc.record({ sleeps: fc.nat(MINUTE_MS) }),
  fc.record({ stepped: fc.integer({ min: -2 * MINUTE_MS, max: 2 * MINUTE_MS }) }),
);

test("a value is never taken for younger than it is, unless the machine slept and its clock was stepped as well", () => {
  fc.assert(
    fc.property(
      fc.array(event, { maxLength: 8, size: "max" }),
      fc.integer({ min: 1, max: 3 * MINUTE_MS }),
      (events, ms) => {
        const pass = clocks();
        const moment = thisMoment();
        let [ran, slept, stepped] = [0, 0, 0];
        for (const what of events) {
          if ("runs" in what) [ran] = [ran + what.runs, pass(what.runs, what.runs)];
          else if ("sleeps" in what) [slept] = [slept + what.sleeps, pass(0, what.sleeps)];
          else [stepped] = [stepped + what.stepped, pass(0, what.stepped)];
        }
        const isOld = isOlder(moment, ms);
        if (ran >= ms) expect(isOld).toBe(true);
        if (stepped === 0 && ran + slept >= ms) expect(isOld).toBe(true);
        if (stepped === 0) expect(isOld).toBe(ran + slept >= ms);
        // Another thread knows the wall clock only, whichever way that was set.
        expect(isWallOlder(moment.wall, ms)).toBe(Math.abs(ran + slept + stepped) >= ms);
      },
    ),
  );
});

test.each<[string, number, number, boolean]>([
  ["young, a moment after it was known", 0, 0, false],
  ["old when both clocks went on", MINUTE_MS, MINUTE_MS, true],
  ["old when the machine slept, and only the wall clock knows", 0, MINUTE_MS, true],
  ["old when the wall clock was set back meanwhile", 1_000, -MINUTE_MS, true],
  ["old when the wall clock stood where it was", MINUTE_MS, 0, true],
])("a value is %s", (_, own, wall, isOld) => {
  const pass = clocks();
  const moment = thisMoment();
  pass(own, wall);
  expect(isOlder(moment, MINUTE_MS)).toBe(isOld);
});
