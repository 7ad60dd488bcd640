import { afterEach, expect, spyOn, test } from "bun:test";
import { isOlder, isWallOlder, thisMoment } from "../kernel/time.ts";

const MINUTE_MS = 60_000;
const restore: { mockRestore(): void }[] = [];
afterEach(() => {
  for (const spy of restore.splice(0)) spy.mockRestore();
});

function pass(own: number, wall: number): void {
  const [monotonic, time] = [performance.now(), Date.now()];
  restore.push(spyOn(performance, "now").mockReturnValue(monotonic + own));
  restore.push(spyOn(Date, "now").mockReturnValue(time + wall));
}

test("a value that was known a moment ago is young", () => {
  expect(isOlder(thisMoment(), MINUTE_MS)).toBe(false);
});

test.each<[string, number, number]>([
  ["both clocks went on", MINUTE_MS, MINUTE_MS],
  ["the machine slept, and only the wall clock knows", 0, MINUTE_MS],
  ["the wall clock was set back meanwhile", 1_000, -MINUTE_MS],
  ["the wall clock stood where it was", MINUTE_MS, 0],
])("a value is old when %s", (_, own, wall) => {
  const moment = thisMoment();
  pass(own, wall);
  expect(isOlder(moment, MINUTE_MS)).toBe(true);
});

test("a value of another thread is as old as the wall clock says, whichever way", () => {
  const { wall } = thisMoment();
  expect(isWallOlder(wall - MINUTE_MS, MINUTE_MS)).toBe(true);
  expect(isWallOlder(wall + 2 * MINUTE_MS, MINUTE_MS)).toBe(true);
  expect(isWallOlder(wall, MINUTE_MS)).toBe(false);
});
