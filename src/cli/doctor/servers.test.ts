import { expect, test } from "bun:test";
import { eachInTime } from "./servers.ts";

const ITEMS = Array.from({ length: 30 }, (_, index) => index);

test("each item is worked on, eight at a time", async () => {
  let [most, now] = [0, 0];
  const done: number[] = [];
  const left = await eachInTime(ITEMS, Number.POSITIVE_INFINITY, async (item) => {
    most = Math.max(most, ++now);
    await Promise.resolve();
    done.push(item);
    now--;
  });
  expect([left, most, done]).toEqual([0, 8, ITEMS]);
});

test("what has not begun at the end is counted, and what has begun is waited for", async () => {
  const until = performance.now() + 20;
  let ended = 0;
  const left = await eachInTime(ITEMS, until, async () => {
    while (performance.now() < until) await Bun.sleep(1);
    ended++;
  });
  expect([left, ended]).toEqual([22, 8]);
});
