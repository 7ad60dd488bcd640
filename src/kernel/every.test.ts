import { expect, test } from "bun:test";
import { every } from "./loop.ts";

test("repeated work is done again after it has ended, and not once more when it is stopped meanwhile", async () => {
  const begun: PromiseWithResolvers<void>[] = [];
  let waiting = Promise.withResolvers<void>();
  const stop = every(1, async () => {
    const work = Promise.withResolvers<void>();
    begun.push(work);
    waiting.resolve();
    await work.promise;
    return undefined;
  });
  for (let round = 1; round <= 3; round++) {
    await waiting.promise;
    expect(begun.length).toBe(round);
    waiting = Promise.withResolvers();
    if (round < 3) begun[round - 1]?.resolve();
  }
  stop();
  begun[2]?.resolve();
  await Bun.sleep(20);
  expect(begun.length).toBe(3);
});

test("repeated work may ask for another pause", async () => {
  const started = performance.now();
  const { promise, resolve } = Promise.withResolvers<void>();
  let times = 0;
  const stop = every(30_000, async () => {
    if (++times === 2) resolve();
    return 1;
  });
  stop();
  const again = every(1, async () => {
    if (++times === 2) resolve();
    return times === 1 ? 5 : 30_000;
  });
  await promise;
  again();
  expect(performance.now() - started).toBeLessThan(10_000);
});
