import { expect, test } from "bun:test";
import { thisMoment } from "../../core/age.ts";
import { createRunningCalls } from "./running-calls.ts";

const call = (id: string) => ({
  agentId: "agt_1",
  key: { tenant: "acme", id },
  token: `token of ${id}`,
  believedAt: thisMoment(),
});

test("a call that holds a slot is stopped, and others are not", () => {
  const running = createRunningCalls();
  const [one, other] = [running.add(call("1")), running.add(call("2"))];
  running.stop("1");
  expect([one.stopped, other.stopped, running.size]).toEqual([true, false, 2]);
  running.remove("1");
  expect(running.size).toBe(1);
});

test("of a call that holds no slot every block that is being taken is told, and no later one", async () => {
  const running = createRunningCalls();
  running.add(call("held"));
  const answer = Promise.withResolvers<void>();
  const block = () =>
    running.whileTaking(async (stopped) => {
      await answer.promise;
      return [...stopped];
    });
  const blocks = [block(), block()];
  running.stop("1");
  running.stop("held");
  answer.resolve();
  expect(await Promise.all(blocks)).toEqual([["1"], ["1"]]);
  expect(await block()).toEqual([]);
});

test("what is being claimed by its ID is known by agent, until the claim has an answer, also a bad one", async () => {
  const running = createRunningCalls();
  const [first, second] = [Promise.withResolvers<string>(), Promise.withResolvers<string>()];
  const claims = [
    running.whileClaiming(running.add(call("1")), () => first.promise),
    running.whileClaiming(running.add(call("2")), () => second.promise).catch((error: Error) => error.message),
  ];
  expect([...running.claimingOf("agt_1")]).toEqual(["1", "2"]);
  expect([...running.claimingOf("agt_2")]).toEqual([]);
  first.resolve("claimed");
  expect(await claims[0]).toBe("claimed");
  expect([...running.claimingOf("agt_1")]).toEqual(["2"]);
  second.reject(new Error("the store is away"));
  expect(await claims[1]).toBe("the store is away");
  expect([...running.claimingOf("agt_1")]).toEqual([]);
});
