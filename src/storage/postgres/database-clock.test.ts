import { expect, test } from "bun:test";
import { openDatabaseClock } from "./store.ts";

const EVERY_MS = 5;
/** How far it may have gone on by itself on a busy machine: all that it must not show is further away. */
const NEAR_MS = 60_000;

/** Resolves when the server has been asked so many times more. */
function server(start: number) {
  let asked = 0;
  const waiting: { at: number; resolve(): void }[] = [];
  const state = { time: start, isAway: false };
  return {
    state,
    async ask() {
      asked++;
      for (const { at, resolve } of waiting) if (asked >= at) resolve();
      if (state.isAway) throw new Error("away");
      return state.time;
    },
    times(more: number): Promise<void> {
      const { promise, resolve } = Promise.withResolvers<void>();
      waiting.push({ at: asked + more, resolve });
      return promise;
    },
  };
}

test("the database clock shows the server's time, whatever this machine's clock shows", async () => {
  const { ask } = server(1_000);
  const clock = await openDatabaseClock(ask);
  expect(Math.abs(clock.now() - 1_000)).toBeLessThan(NEAR_MS);
  clock.stop();
});

test("the database clock follows the server, and goes on by itself while the server is away", async () => {
  const { state, ask, times } = server(1_000_000);
  const clock = await openDatabaseClock(ask, EVERY_MS);
  state.time = 5_000_000;
  await times(2);
  expect(Math.abs(clock.now() - 5_000_000)).toBeLessThan(NEAR_MS);
  state.isAway = true;
  await times(3);
  expect(Math.abs(clock.now() - 5_000_000)).toBeLessThan(NEAR_MS);
  clock.stop();
});

test("the database clock does not step when an answer of the server is slow to arrive", async () => {
  const serverTime = () => 1_000_000 + performance.now();
  let [isSlow, answered] = [false, Promise.withResolvers<void>()];
  const ask = async () => {
    const time = serverTime();
    if (isSlow) await Bun.sleep(100);
    setImmediate(answered.resolve);
    return time;
  };
  const clock = await openDatabaseClock(ask, EVERY_MS);
  isSlow = true;
  answered = Promise.withResolvers();
  await answered.promise;
  const before = clock.now() - serverTime();
  answered = Promise.withResolvers();
  await answered.promise;
  expect(Math.abs(clock.now() - serverTime() - before)).toBeLessThan(10);
  expect(Math.abs(clock.now() - serverTime())).toBeLessThan(10);
  clock.stop();
});

test("a server that does not answer at the start is no clock", async () => {
  const { state, ask } = server(0);
  state.isAway = true;
  expect(openDatabaseClock(ask)).rejects.toThrow("away");
});
