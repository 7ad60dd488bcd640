import { expect, test } from "bun:test";
import { bodyInSteps, inOneStep, inSteps, type Steps } from "./turns.ts";

function* counting(to: number, seen: number[]): Steps<string> {
  for (let at = 0; at < to; at++) {
    seen.push(at);
    yield;
  }
  return "done";
}

test("work of one step is done at once, and work of more in turns, with the same result", async () => {
  const seen: number[] = [];
  const small = inSteps(counting(0, seen), "t");
  const large = inSteps(counting(100, seen), "t");
  expect(seen).toEqual([0]);
  const turned = new Promise((resolve) => setImmediate(() => resolve(seen.length)));
  expect(await small).toBe("done");
  expect(await turned).toBeLessThan(100);
  expect(await large).toBe("done");
  expect(seen).toHaveLength(100);
});

test("an error that a step throws is the error of the work", async () => {
  function* failing(): Steps<never> {
    yield;
    throw new Error("no");
  }
  expect(inSteps(failing(), "t")).rejects.toThrow("no");
});

test("a large body is not worked on at once, and a small one is done at once", async () => {
  const seen: number[] = [];
  const large = bodyInSteps(new Uint8Array(20_000), counting(3, seen), "t");
  expect(seen).toEqual([]);
  expect(await large).toBe("done");
  expect(seen).toEqual([0, 1, 2]);
  void bodyInSteps(new Uint8Array(10), counting(1, seen), "t");
  expect(seen).toEqual([0, 1, 2, 0]);
});

test("pieces of work that can't be parted are done one after the other, with others in between", async () => {
  let isOther = false;
  const order: string[] = [];
  const piece = (name: string) => () => {
    order.push(name);
    const until = performance.now() + 10;
    while (performance.now() < until);
    if (!isOther) setImmediate(() => order.push("other"));
    isOther = true;
    return Promise.resolve(name);
  };
  const done = Promise.all(["a", "b", "c"].map((name) => inOneStep(piece(name), "t")));
  expect(order).toEqual([]);
  expect(await done).toEqual(["a", "b", "c"]);
  expect(order.indexOf("other")).toBeLessThan(order.indexOf("c"));
});
