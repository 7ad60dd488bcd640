import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { createCallRates, RATE_WINDOW_MS } from "./observed-rate.ts";

function rates(callersMax?: number) {
  const time = { now: 0 };
  const observed = createCallRates(() => time.now, callersMax);
  return {
    at(now: number, agent = "agt_1", user = "alice", tenant = "acme") {
      time.now = now;
      return observed.observe({ tenant, agentId: agent, user });
    },
  };
}

test("the observed rate of a call counts itself, and the calls of the last 60 seconds", () => {
  const { at } = rates();
  expect([at(0), at(0), at(10), at(59_999)]).toEqual([1, 2, 3, 4]);
});

test("a call exactly 60,000 ms ago is over, one of 59,999 ms ago is not", () => {
  const { at } = rates();
  expect(at(1_000)).toBe(1);
  expect(at(60_999)).toBe(2);
  const again = rates();
  expect(again.at(1_000)).toBe(1);
  expect(again.at(61_000)).toBe(1);
});

test("a caller that calls evenly sixty times a minute is observed at sixty", () => {
  const { at } = rates();
  for (let second = 0; second < 300; second++) expect(at(second * 1000)).toBe(Math.min(second + 1, 60));
});

test("callers and agents have observed rates of their own", () => {
  const { at } = rates();
  for (let call = 0; call < 5; call++) at(call);
  expect(at(6, "agt_1", "bob")).toBe(1);
  expect(at(7, "agt_2", "alice")).toBe(1);
  expect(at(8)).toBe(6);
});

describe("the calls of any callers", () => {
  const call = fc.record({
    user: fc.constantFrom("alice", "bob", "carol"),
    // Short steps and long ones, and some that meet the edge of the window exactly.
    step: fc.oneof(
      fc.nat(50),
      fc.nat(RATE_WINDOW_MS * 2),
      fc.constantFrom(0, 0, 20_000, 29_999, 30_000, 30_001, RATE_WINDOW_MS),
    ),
  });

  test("are counted as a plain list of them is", () => {
    fc.assert(
      fc.property(fc.array(call, { maxLength: 300 }), (calls) => {
        const { at } = rates();
        const all: { user: string; time: number }[] = [];
        let time = 0;
        for (const { user, step } of calls) {
          time += step;
          all.push({ user, time });
          const expected = all.filter((one) => one.user === user && one.time > time - RATE_WINDOW_MS).length;
          expect(at(time, "agt_1", user)).toBe(expected);
        }
      }),
      { numRuns: 500 },
    );
  });
});

test("many calls of one caller cost little memory and stay exact", () => {
  const { at } = rates();
  let rate = 0;
  // A million calls in 100 seconds, ten in each millisecond.
  for (let call = 0; call < 1_000_000; call++) rate = at(Math.floor(call / 10));
  expect(rate).toBe(600_000);
});

test("at the bound the tenant with the most callers forgets some of its own, and nobody else's", () => {
  const { at } = rates(10);
  for (let call = 0; call < 3; call++) at(call, "agt_1", "alice", "acme");
  for (let user = 0; user < 1000; user++) at(3, "agt_2", `user ${user}`, "greedy");
  expect(at(4, "agt_1", "alice", "acme")).toBe(4);
  expect(at(5, "agt_2", "user 999", "greedy")).toBe(2);
  expect(at(5, "agt_2", "user 0", "greedy")).toBe(1);
});
