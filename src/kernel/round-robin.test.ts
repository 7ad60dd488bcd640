import { expect, test } from "bun:test";
import fc from "fast-check";
import { createRoundRobin } from "./share.ts";

test("whoever waits has its turn after at most one of each other tenant, and its own in their order", () => {
  const arrivals = fc.array(fc.integer({ min: 0, max: 4 }), { maxLength: 60 });
  fc.assert(
    fc.property(arrivals, (tenants) => {
      const robin = createRoundRobin<number>();
      const left = new Map<string, number[]>();
      for (const [item, tenant] of tenants.entries()) {
        robin.add(`${tenant}`, item);
        left.set(`${tenant}`, [...(left.get(`${tenant}`) ?? []), item]);
      }
      expect(robin.size).toBe(tenants.length);
      const since = new Map<string, Set<string>>();
      for (let next = robin.next(); next !== undefined; next = robin.next()) {
        const { tenant, item } = next;
        expect(left.get(tenant)?.shift()).toBe(item);
        for (const [other, items] of left) {
          if (other === tenant || items.length === 0) continue;
          const served = since.get(other) ?? new Set<string>();
          // Nobody twice while this one waits.
          expect(served.has(tenant)).toBe(false);
          since.set(other, served.add(tenant));
        }
        since.delete(tenant);
      }
      expect(robin.size).toBe(0);
      expect([...left.values()].flat()).toEqual([]);
    }),
  );
});

test("a tenant that waits already is not there twice, and can be passed over", () => {
  const robin = createRoundRobin<string>();
  robin.add("a", "first");
  robin.add("a", "first");
  robin.add("b", "second");
  expect(robin.size).toBe(2);
  expect(robin.next(new Set(["a"]))).toEqual({ tenant: "b", item: "second" });
  expect(robin.next(new Set(["a"]))).toBeUndefined();
  expect(robin.next()).toEqual({ tenant: "a", item: "first" });
  expect(robin.next()).toBeUndefined();
});
