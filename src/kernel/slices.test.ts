import { expect, test } from "bun:test";
import { inSlices } from "./loop.ts";

test("all are called in their order, and the event loop turns in between", async () => {
  const items = Array.from({ length: 1_000 }, (_, i) => i);
  const seen: number[] = [];
  const inTurn = new Map<number, number>();
  let turn = 0;
  let timer = setImmediate(function count() {
    turn += 1;
    timer = setImmediate(count);
  });
  await inSlices(items, (item) => {
    seen.push(item);
    inTurn.set(turn, (inTurn.get(turn) ?? 0) + 1);
  });
  clearImmediate(timer);
  expect(seen).toEqual(items);
  expect(Math.max(...inTurn.values())).toBeLessThanOrEqual(128);
});
