import { afterAll, beforeAll, expect, type Mock, spyOn, test } from "bun:test";
import { eachInTurns } from "./turns.ts";

/** Stands still: no time of a turn is used up by what else the machine does. */
let monotonic: Mock<typeof performance.now>;
beforeAll(() => {
  const time = performance.now();
  monotonic = spyOn(performance, "now").mockImplementation(() => time);
});
afterAll(() => monotonic.mockRestore());

const turnOfLoop = () => new Promise<void>((resolve) => setImmediate(resolve));

test("light items are worked on at once, and many heavy ones in turns, each once and in order", async () => {
  const seen: number[] = [];
  const each = (cost: number) => (item: number, at: number) => {
    seen.push(item + at);
    return cost;
  };
  const items = Array.from({ length: 100 }, (_, at) => at);
  await turnOfLoop();
  const light = eachInTurns(items, "t", each(1));
  expect(seen.splice(0)).toEqual(items.map((item) => 2 * item));
  await light;
  const heavy = eachInTurns(items, "t", each(100_000));
  expect(seen.length).toBe(3);
  const turned = turnOfLoop().then(() => seen.length);
  await heavy;
  expect(await turned).toBeLessThan(100);
  expect(seen).toEqual(items.map((item) => 2 * item));
  await eachInTurns([], "t", each(1));
});
