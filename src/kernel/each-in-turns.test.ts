import { expect, test } from "bun:test";
import { eachInTurns, mayDoAtOnce } from "./turns.ts";

test("light items are worked on at once, and many heavy ones in turns, each once and in order", async () => {
  /** Resolves when nobody waits for a turn, and this one has all its time, however long the machine stood still before. */
  const freshTurn = async () => {
    do await new Promise(setImmediate);
    while (!mayDoAtOnce());
  };
  await freshTurn();
  const seen: number[] = [];
  const each = (cost: number) => (item: number, at: number) => {
    seen.push(item + at);
    return cost;
  };
  const items = Array.from({ length: 100 }, (_, at) => at);
  const light = eachInTurns(items, "t", each(1));
  expect(seen.splice(0)).toEqual(items.map((item) => 2 * item));
  await light;
  await freshTurn();
  const heavy = eachInTurns(items, "t", each(100_000));
  expect(seen.length).toBe(3);
  const turned = new Promise((resolve) => setImmediate(() => resolve(seen.length)));
  await heavy;
  expect(await turned).toBeLessThan(100);
  expect(seen).toEqual(items.map((item) => 2 * item));
  await eachInTurns([], "t", each(1));
});
