import { expect, test } from "bun:test";
import { eachInTurns, mayDoAtOnce } from "./turns.ts";

test("light items are worked on at once, and many heavy ones in turns, each once and in order", async () => {
  // What other tests have left may still take turns.
  while (!mayDoAtOnce()) await new Promise(setImmediate);
  const seen: number[] = [];
  const each = (cost: number) => (item: number, at: number) => {
    seen.push(item + at);
    return cost;
  };
  const items = Array.from({ length: 100 }, (_, at) => at);
  const light = eachInTurns(items, "t", each(1));
  expect(seen.splice(0)).toEqual(items.map((item) => 2 * item));
  await light;
  const heavy = eachInTurns(items, "t", each(100_000));
  expect(seen.length).toBe(3);
  const turned = new Promise((resolve) => setImmediate(() => resolve(seen.length)));
  await heavy;
  expect(await turned).toBeLessThan(100);
  expect(seen).toEqual(items.map((item) => 2 * item));
  await eachInTurns([], "t", each(1));
});
