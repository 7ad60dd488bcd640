import { afterEach, beforeEach, expect, jest, test } from "bun:test";
import { type Poll, poll } from "./loop.ts";

beforeEach(() => void jest.useFakeTimers());
afterEach(() => void jest.useRealTimers());

const BETWEEN = { leastMs: 250, mostMs: 2_000 };

/** A poll whose looks find what they are given, and when they were. */
function watched(find: () => boolean | number) {
  const looks: number[] = [];
  let time = 0;
  let loop: Poll;
  const pass = async (ms: number) => {
    for (const end = time + ms; time < end; time += 10) {
      jest.advanceTimersByTime(10);
      await Promise.resolve();
      await Promise.resolve();
    }
    return looks.splice(0);
  };
  loop = poll(BETWEEN, async () => {
    looks.push(time + 10);
    return find();
  });
  return { pass, soon: () => loop.soon(), stop: () => loop.stop() };
}

test("what finds nothing is looked for less and less often, and never later than the longest pause", async () => {
  const { pass, stop } = watched(() => false);
  expect(await pass(8_000)).toEqual([250, 750, 1_750, 3_750, 5_750, 7_750]);
  stop();
  expect(await pass(5_000)).toEqual([]);
});

test("what finds something is looked for again at once", async () => {
  const { pass, stop } = watched(() => true);
  expect(await pass(1_000)).toEqual([250, 500, 750, 1_000]);
  stop();
});

test("what is known to come is looked for when it comes", async () => {
  let next: boolean | number = false;
  const { pass, stop } = watched(() => next);
  await pass(3_750);
  next = 400;
  expect(await pass(2_000)).toEqual([5_750]);
  next = 1;
  expect(await pass(900)).toEqual([6_150, 6_400, 6_650]);
  stop();
});

test("who has made work does not wait for the pause that there was", async () => {
  const { pass, soon, stop } = watched(() => false);
  await pass(3_800);
  soon();
  soon();
  expect(await pass(1_000)).toEqual([4_050, 4_550]);
  stop();
  soon();
  expect(await pass(5_000)).toEqual([]);
});
