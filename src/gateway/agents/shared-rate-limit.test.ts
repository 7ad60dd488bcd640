// What a replica asks of the bucket that it shares, and what it knows by itself.
import { expect, test } from "bun:test";
import { useStore } from "../../../test/support/stores/one-store.ts";
import type { Store } from "../../storage/store.ts";
import { createSharedRateLimiter } from "./store.ts";

let execute: Store["execute"];
let questions = 0;
useStore("postgres", ({ store }) => {
  execute = (command, input) => {
    questions++;
    return store.execute(command, input);
  };
});

let serial = 0;
const agentWith = (fields: object) => ({
  ...{ id: `agt_${++serial}`, invocation_rate_limit: null, invocation_burst: null, rate_revision: 0 },
  ...fields,
});

/** A replica with a clock of the test's, by which only refusals are remembered. */
function replica() {
  const time = { now: 0 };
  const limiter = createSharedRateLimiter(execute, () => time.now);
  const many = (count: number, agent: ReturnType<typeof agentWith>) =>
    Promise.all(Array.from({ length: count }, () => limiter.take("acme", agent)));
  return { time, takeNow: limiter.takeNow, many };
}

/** How many questions that has taken. */
async function asked(work: () => Promise<unknown>): Promise<number> {
  const before = questions;
  await work();
  return questions - before;
}

test("an agent without a limit is called at once, and nothing is asked", () => {
  const before = questions;
  expect(replica().takeNow("acme", agentWith({}))).toBeNull();
  expect(questions).toBe(before);
});

test("calls at once are one question, and a flood of refused ones none", async () => {
  const { time, takeNow, many } = replica();
  const agent = agentWith({ invocation_rate_limit: 0.001, invocation_burst: 3 });
  expect(
    await asked(async () => expect(await many(500, agent)).toEqual([null, null, null, ...Array(497).fill(60)])),
  ).toBe(1);
  expect(await asked(() => many(1_000, agent))).toBe(0);
  // A refusal is told at once, and believed for a second.
  expect(takeNow("acme", agent)).toBe(60);
  time.now += 1_000;
  expect(await asked(() => many(1_000, agent))).toBe(1);
});

test("a refusal ends with the next token, and not only after a second", async () => {
  const { time, many } = replica();
  const agent = agentWith({ invocation_rate_limit: 2, invocation_burst: 1 });
  expect(await many(2, agent)).toEqual([null, 1]);
  time.now += 499;
  expect(await asked(() => many(5, agent))).toBe(0);
  time.now += 2;
  expect(await asked(() => many(5, agent))).toBe(1);
});

test("a PATCH of another replica ends a refusal, and starts one full bucket for both", async () => {
  const [one, other] = [replica(), replica()];
  const agent = agentWith({ invocation_rate_limit: 0.001, invocation_burst: 2 });
  expect(await one.many(3, agent)).toEqual([null, null, 60]);
  expect(await other.many(1, agent)).toEqual([60]);
  const patched = { ...agent, rate_revision: 1 };
  expect(await other.many(1, patched)).toEqual([null]);
  expect(await one.many(3, patched)).toEqual([null, 60, 60]);
});
