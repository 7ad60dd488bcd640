import { expect, test } from "bun:test";
import { named, type Steps } from "../core/steps.ts";
import { mostSpent } from "../core/work.ts";
import { inSteps } from "./steps.ts";

function* counting(to: number, seen: number[]): Steps<string> {
  for (let at = 0; at < to; at++) {
    seen.push(at);
    yield;
  }
  return "done";
}

test("work of one step is done at once, and of more in turns, with what it comes to", async () => {
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

test("what a step throws is what the work comes to", async () => {
  function* failing(): Steps<never> {
    yield;
    throw new Error("no");
  }
  expect(inSteps(failing(), "t")).rejects.toThrow("no");
});

test("steps may be named", async () => {
  mostSpent();
  expect(await inSteps(named("counting", counting(3, [])), "t")).toBe("done");
  expect(mostSpent()?.work).toBe("counting");
});
