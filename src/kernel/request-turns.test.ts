import { afterEach, beforeEach, expect, type Mock, spyOn, test } from "bun:test";
import { joinInFlight, turnOf } from "./turns.ts";

/** Goes on with the work of the requests alone: what else the machine does is no part of any turn. */
let time: number;
let monotonic: Mock<typeof performance.now>;
beforeEach(() => {
  time = performance.now();
  monotonic = spyOn(performance, "now").mockImplementation(() => time);
});
afterEach(() => monotonic.mockRestore());

/** A request that holds the event loop for so many milliseconds, right after it has begun. */
async function request(tenant: string, ms: number, begun: string[]): Promise<void> {
  const turn = turnOf(tenant);
  if (turn !== undefined) await turn;
  begun.push(tenant);
  time += ms;
}

const turnOfLoop = () => new Promise<void>((resolve) => setImmediate(resolve));

test("a few requests that come together begin at once", async () => {
  await turnOfLoop();
  const begun: string[] = [];
  const all = ["a", "b", "a"].map((tenant) => request(tenant, 0, begun));
  expect(begun).toEqual(["a", "b", "a"]);
  await Promise.all(all);
});

test("of many requests that come together some begin at once, and the rest a few in each turn", async () => {
  await turnOfLoop();
  const begun: string[] = [];
  const all = Array.from({ length: 40 }, () => request("a", 3, begun));
  expect(begun.length).toBeLessThan(5);
  for (let last = begun.length; last < 40; last = begun.length) {
    await turnOfLoop();
    expect(begun.length - last).toBeLessThanOrEqual(8);
  }
  await Promise.all(all);
});

test("a tenant that sends few waits behind few of a tenant that sends many, and comes after nobody else's", async () => {
  await turnOfLoop();
  const begun: string[] = [];
  const many = Array.from({ length: 100 }, () => request("greedy", 1, begun));
  const few = [request("modest", 0, begun), request("other", 0, begun)];
  await Promise.all(few);
  expect(begun.filter((tenant) => tenant === "greedy").length).toBeLessThan(20);
  await Promise.all(many);
  expect(begun.length).toBe(102);
});

test("requests that waited begin for as long as there is time in a turn, however many they are", async () => {
  await turnOfLoop();
  const begun: string[] = [];
  const all = [10, ...Array.from({ length: 300 }, () => 0)].map((ms) => request("a", ms, begun));
  expect(begun.length).toBe(1);
  await turnOfLoop();
  await turnOfLoop();
  expect(begun.length).toBe(301);
  await Promise.all(all);
});

test("thousands of requests that wait for what another has begun go on in turns, and learn that it failed", async () => {
  const { promise, reject } = Promise.withResolvers<void>();
  let [gone, turns] = [0, 0];
  const waiters = Array.from({ length: 2_000 }, async () => {
    const error = await joinInFlight(promise, "one").catch((thrown: Error) => thrown);
    expect(error?.message).toBe("none");
    time += 0.1;
    gone++;
  });
  const turn = () => {
    turns++;
    if (gone < waiters.length) setImmediate(turn);
  };
  setImmediate(turn);
  reject(new Error("none"));
  await Promise.all(waiters);
  // 200 ms of work in turns of 8 ms.
  expect(turns).toBeGreaterThanOrEqual(15);
});
