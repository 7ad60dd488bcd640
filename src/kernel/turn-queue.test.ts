import { expect, test } from "bun:test";
import fc from "fast-check";
import { createTurnQueue } from "./batch.ts";

interface Item {
  readonly tenant: string;
  readonly n: number;
}

function arriving(tenants: readonly string[]): Item[] {
  return tenants.map((tenant, n) => ({ tenant, n }));
}

test("what is taken together comes in the order of its arrival", () => {
  const queue = createTurnQueue<Item>();
  const items = arriving(["a", "a", "b", "a"]);
  for (const item of items) queue.add(item);
  expect(queue.take(4)).toEqual(items);
  expect([queue.size, queue.take(4)]).toEqual([0, []]);
});

test("of more, one of each tenant in turn is taken, also of those that came later", () => {
  const queue = createTurnQueue<Item>();
  const [a0, a1, a2, a3, b4, b5, c6] = arriving(["a", "a", "a", "a", "b", "b", "c"]) as [Item, Item, Item, ...Item[]];
  for (const item of [a0, a1, a2, a3 as Item, b4 as Item]) queue.add(item);
  expect(queue.take(3)).toEqual([a0, b4 as Item, a1]);
  queue.add(b5 as Item);
  queue.add(c6 as Item);
  expect(queue.size).toBe(4);
  expect(queue.take(3)).toEqual([a2, b5 as Item, c6 as Item]);
  expect(queue.take(3)).toEqual([a3 as Item]);
});

test("what is put back comes next, and nobody who came meanwhile waits for all of it", () => {
  const queue = createTurnQueue<Item>();
  const [a0, a1, a2, b3, b4, c5] = arriving(["a", "a", "a", "b", "b", "c"]) as [Item, Item, Item, Item, Item, Item];
  for (const item of [a0, a1, a2]) queue.add(item);
  const [, ...later] = queue.take(3);
  for (const item of [b3, c5]) queue.add(item);
  queue.putBack(later);
  queue.add(b4);
  expect(queue.size).toBe(5);
  expect(queue.take(3)).toEqual([a1, b3, c5]);
  expect(queue.take(3)).toEqual([a2, b4]);
});

/** What happens to a queue: somebody comes, or some are taken, of which the last ones are put back. */
const steps = fc.array(
  fc.oneof(
    fc.record({ tenant: fc.constantFrom("a", "b", "c", "d") }),
    fc.record({ most: fc.integer({ min: 1, max: 6 }), back: fc.integer({ min: 0, max: 6 }) }),
  ),
  { maxLength: 80 },
);

test("whatever comes and is put back, each tenant's own keep their order, and no tenant is passed over", () => {
  fc.assert(
    fc.property(steps, (all) => {
      const queue = createTurnQueue<Item>();
      const waiting = new Map<string, Item[]>();
      const of = (tenant: string) => waiting.get(tenant) ?? [];
      let size = 0;
      for (const [n, step] of all.entries()) {
        if ("tenant" in step) {
          queue.add({ ...step, n });
          waiting.set(step.tenant, [...of(step.tenant), { ...step, n }]);
          size++;
          continue;
        }
        const taken = queue.take(step.most);
        expect(taken).toHaveLength(Math.min(step.most, size));
        const counts = Map.groupBy(taken, ({ tenant }) => tenant);
        for (const [tenant, own] of counts) expect(own).toEqual(of(tenant).slice(0, own.length));
        // Who is left behind has had as many as anybody, but for one in this round.
        const most = Math.max(0, ...[...counts.values()].map((own) => own.length));
        for (const [tenant, own] of waiting) {
          const count = counts.get(tenant)?.length ?? 0;
          if (count < own.length) expect(count).toBeGreaterThanOrEqual(most - 1);
        }
        const done = taken.slice(0, Math.max(taken.length - step.back, 0));
        queue.putBack(taken.slice(done.length));
        for (const { tenant } of done) waiting.set(tenant, of(tenant).slice(1));
        size -= done.length;
        expect(queue.size).toBe(size);
      }
      const rest = queue.take(Number.MAX_SAFE_INTEGER);
      for (const [tenant, own] of waiting) expect(rest.filter((item) => item.tenant === tenant)).toEqual(own);
    }),
    { numRuns: 500 },
  );
});
