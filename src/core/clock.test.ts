import { expect, test } from "bun:test";
import { timeBounds } from "./time.ts";

test("the bounds of the time: no later than what has passed, and no earlier than the clock or that says, whatever the steps", () => {
  let [wall, own] = [1_000_000, 50];
  const { earliest, latest } = timeBounds({ now: () => wall }, () => own);
  expect([earliest(), latest()]).toEqual([1_000_000, 1_000_000]);
  own += 1_000;
  wall += 3_600_000;
  expect([earliest(), latest()]).toEqual([1_001_000, 4_600_000]);
  wall -= 7_200_000;
  expect([earliest(), latest()]).toEqual([wall, 1_001_000]);
});
