import { expect, test } from "bun:test";
import fc from "fast-check";
import { createBudget } from "./memory-budget.ts";

test("a tenant gets the memory that it asks for, up to what it may hold", () => {
  const share = createBudget(1000)("a");
  expect([share.take(500), share.take(500), share.take(1)]).toEqual([500, 375, 0]);
  share.giveBack(400);
  expect(share.take(1000)).toBe(400);
});

test("however much memory others have taken, the next tenant finds some, and all of it comes back", () => {
  const asks = fc.array(fc.tuple(fc.integer({ min: 0, max: 9 }), fc.integer({ min: 0, max: 2_000_000 })));
  fc.assert(
    fc.property(asks, (list) => {
      const budget = createBudget(1_000_000);
      const taken = list.map(([tenant, bytes]) => [tenant, budget(`${tenant}`).take(bytes)] as const);
      const sum = taken.reduce((all, [, bytes]) => all + bytes, 0);
      expect(sum).toBeLessThan(1_000_000);
      const late = budget("late");
      const found = late.take(1_000_000);
      expect(found).toBeGreaterThan(200);
      late.giveBack(found);
      for (const [tenant, bytes] of taken) budget(`${tenant}`).giveBack(bytes);
      expect(late.take(1_000_000)).toBe(875_000);
    }),
  );
});
