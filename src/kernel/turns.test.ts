import { expect, test } from "bun:test";
import { eachInTurns, inStoreTurns, inTurn, inTurns } from "./turns.ts";
import { ActingRequest, actFor } from "./wait.ts";

/** Holds the event loop. */
function work(ms: number): void {
  const until = performance.now() + ms;
  while (performance.now() < until);
}

test("however much there is to do, others get their turn after a few steps, and each step its own", async () => {
  const done: string[] = [];
  const { promise, resolve } = Promise.withResolvers<void>();
  for (const name of ["a", "b"]) {
    let left = 12;
    inTurns(() => {
      work(3);
      done.push(name);
      if (--left === 0 && done.length === 24) resolve();
      return left > 0;
    }, "one");
  }
  let turns = 0;
  const turn = () => {
    turns++;
    if (done.length < 24) setImmediate(turn);
  };
  setImmediate(turn);
  await promise;
  expect(done.join("")).toBe("ab".repeat(12));
  // Two steps of 3 ms fill a turn.
  expect(turns).toBeGreaterThanOrEqual(10);
});

test("steps that cost nothing give others a turn as well", async () => {
  const STEPS = 10_000;
  let left = STEPS;
  const { promise, resolve } = Promise.withResolvers<void>();
  let turns = 0;
  const turn = () => {
    turns++;
    if (left > 0) setImmediate(turn);
  };
  setImmediate(turn);
  inTurns(() => {
    if (--left === 0) resolve();
    return left > 0;
  }, "one");
  await promise;
  expect(turns).toBeGreaterThan(100);
});

test("a step that is asked for twice is done once", async () => {
  let times = 0;
  const step = () => {
    times++;
    return false;
  };
  inTurns(step, "one");
  inTurns(step, "one");
  await new Promise((resolve) => setImmediate(() => setImmediate(resolve)));
  expect(times).toBe(1);
});

test("a tenant with many streams gets no more turns than one with one", async () => {
  const done: string[] = [];
  const { promise, resolve } = Promise.withResolvers<readonly string[]>();
  const stream = (tenant: string, steps: number) => {
    let left = steps;
    inTurns(() => {
      done.push(tenant);
      // Of the same turn of the event loop, more steps of the other one may follow.
      if (tenant === "few" && left === 1) resolve([...done]);
      return --left > 0;
    }, tenant);
  };
  for (let count = 0; count < 200; count++) stream("many", 50);
  stream("few", 20);
  expect((await promise).filter((tenant) => tenant === "many").length).toBeLessThanOrEqual(21);
});

test("pieces of work that can't be parted are done one after the other, with others in between", async () => {
  let isOther = false;
  const order: string[] = [];
  const piece = (name: string) => () => {
    order.push(name);
    work(10);
    if (!isOther) setImmediate(() => order.push("other"));
    isOther = true;
    return Promise.resolve(name);
  };
  const done = Promise.all(["a", "b", "c"].map((name) => inTurn("t", piece(name))));
  expect(order).toEqual([]);
  expect(await done).toEqual(["a", "b", "c"]);
  expect(order.indexOf("other")).toBeLessThan(order.indexOf("c"));
});

test("an error that a piece of work throws is the error of the work", async () => {
  const piece = () => {
    throw new Error("no");
  };
  await expect(inTurn("t", piece)).rejects.toThrow("no");
  await expect(eachInTurns([1], "t", piece)).rejects.toThrow("no");
});

test("steps that wait for a database which hangs hold up no others, and each is told of its own end", async () => {
  const { promise: hanging, reject } = Promise.withResolvers<string>();
  const steps = Array.from({ length: 12 }, () => inStoreTurns("one", () => hanging).catch((error) => error.message));
  expect(await inStoreTurns("other", async () => "done")).toBe("done");
  const failing = inStoreTurns("other", async () => {
    throw new Error("broken");
  });
  expect(await failing.catch((error) => error.message)).toBe("broken");
  reject(new Error("away"));
  expect(new Set(await Promise.all(steps))).toEqual(new Set(["away"]));
});

test("a request's wait for the turn of its step counts as one for the database", async () => {
  const request = new ActingRequest("one", 150);
  const { promise: hanging, resolve } = Promise.withResolvers<void>();
  const before = Array.from({ length: 6 }, () => inStoreTurns("one", () => hanging));
  const overdue = await actFor(request, () => inStoreTurns("one", async () => request.isOverdue()));
  resolve();
  await Promise.all(before);
  expect(overdue).toBe(true);
});
