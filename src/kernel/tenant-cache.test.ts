import { expect, test } from "bun:test";
import fc from "fast-check";
import { tenantCache } from "./cache.ts";

const TENANTS = ["a", "b", "c"] as const;

test("a tenant cache holds what was set last for a key, or nothing, and never more than its bound", () => {
  const step = fc.record({
    action: fc.constantFrom("set", "set", "set", "get", "delete"),
    tenant: fc.constantFrom(...TENANTS),
    key: fc.integer({ min: 0, max: 30 }),
    weight: fc.integer({ min: 1, max: 12 }),
  });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 300 }), (steps) => {
      const cache = tenantCache<string, { weight: number }>(40);
      const model = new Map<string, { weight: number }>();
      for (const { action, tenant, key, weight } of steps) {
        const name = `${tenant}-${key}`;
        if (action === "set") {
          const value = { weight };
          cache.set(tenant, name, value, weight);
          model.set(name, value);
          expect(cache.get(name)).toBe(value);
        } else if (action === "delete") {
          cache.delete(name);
          model.delete(name);
          expect(cache.get(name)).toBeUndefined();
        } else if (cache.get(name) !== undefined) {
          expect(cache.get(name)).toBe(model.get(name) as { weight: number });
        }
      }
      let weightOfAll = 0;
      for (const name of model.keys()) weightOfAll += cache.get(name)?.weight ?? 0;
      expect(weightOfAll).toBeLessThanOrEqual(40);
    }),
  );
});

test("a tenant alone may fill the cache, and nothing is removed before it is full", () => {
  const cache = tenantCache<number, number>(100);
  for (let key = 0; key < 100; key++) cache.set("a", key, key);
  for (let key = 0; key < 100; key++) expect(cache.get(key)).toBe(key);
});

test("what one tenant sets, however much, costs the others nothing of an even share", () => {
  const cache = tenantCache<string, number>(90);
  for (const tenant of ["b", "c"]) for (let at = 0; at < 30; at++) cache.set(tenant, `${tenant}-${at}`, at);
  for (let at = 0; at < 10_000; at++) cache.set("a", `a-${at}`, at);
  for (const tenant of ["b", "c"]) {
    for (let at = 0; at < 30; at++) expect(cache.get(`${tenant}-${at}`)).toBe(at);
  }
});

test("a tenant that comes late gets an even share from those that have more", () => {
  const cache = tenantCache<string, number>(90);
  for (let at = 0; at < 90; at++) cache.set("a", `a-${at}`, at);
  for (const tenant of ["b", "c"]) for (let at = 0; at < 30; at++) cache.set(tenant, `${tenant}-${at}`, at);
  for (const tenant of ["b", "c"]) {
    for (let at = 0; at < 30; at++) expect(cache.get(`${tenant}-${at}`)).toBe(at);
  }
});

test("an entry of a tenant that is used stays longer than one that is not", () => {
  const cache = tenantCache<number, number>(10);
  for (let key = 0; key < 10; key++) cache.set("a", key, key);
  for (let key = 10; key < 100; key++) {
    expect(cache.get(0)).toBe(0);
    cache.set("a", key, key);
  }
  expect(cache.get(1)).toBeUndefined();
});

test("an entry that has made room is told of, and nothing else is", () => {
  const gone: number[] = [];
  const cache = tenantCache<number, string>(3, (key) => gone.push(key));
  for (const key of [1, 2, 3, 2]) cache.set("a", key, "");
  cache.delete(3);
  expect(gone).toEqual([]);
  for (const key of [4, 5]) cache.set("a", key, "");
  expect(gone).toEqual([1]);
});
