import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { boundedCache, tenantCache } from "./cache.ts";

describe("a bounded cache", () => {
  test("keeps as much as its bound, and no more", () => {
    const cache = boundedCache<number, number>(10);
    for (let key = 0; key < 100; key++) cache.set(key, key, 2);
    expect(Array.from({ length: 100 }, (_, key) => cache.get(key)).filter((value) => value !== undefined)).toEqual([
      95, 96, 97, 98, 99,
    ]);
  });

  test("keeps nothing heavier than its bound, nor what that replaces", () => {
    const cache = boundedCache<string, string>(8);
    for (const name of ["a", "b"]) cache.set(name, "small");
    cache.set("b", "huge", 9);
    expect([cache.get("a"), cache.get("b")]).toEqual(["small", undefined]);
  });

  test("keeps an entry that is used while others come and go", () => {
    const cache = boundedCache<string, string>(8);
    cache.set("kept", "value");
    for (let other = 0; other < 100; other++) {
      cache.set(`other ${other}`, "");
      expect(cache.get("kept")).toBe("value");
    }
    expect(cache.get("other 1")).toBeUndefined();
  });
});

describe("a cache with shares", () => {
  const TENANTS = ["a", "b", "c"] as const;
  const MAX = 40;

  test("holds what was set last until it makes room, which costs nobody of what is within an even share", () => {
    const step = fc.record({
      action: fc.constantFrom("set", "set", "set", "get", "delete"),
      tenant: fc.constantFrom(...TENANTS),
      key: fc.integer({ min: 0, max: 30 }),
      weight: fc.integer({ min: 1, max: 12 }),
    });
    fc.assert(
      fc.property(fc.array(step, { maxLength: 300, size: "max" }), (steps) => {
        const model = new Map<string, { tenant: string; weight: number }>();
        const heldBy = (of: string) =>
          [...model.values()].reduce((sum, { tenant, weight }) => sum + (tenant === of ? weight : 0), 0);
        const all = () => TENANTS.reduce((sum, tenant) => sum + heldBy(tenant), 0);
        let setting = { tenant: "", weight: 0 };
        const cache = tenantCache<string, object>(MAX, (name) => {
          const { tenant } = model.get(name) ?? { tenant: "" };
          const holders = TENANTS.filter((one) => one === setting.tenant || heldBy(one) > 0);
          if (tenant !== setting.tenant) {
            expect(heldBy(tenant)).toBeGreaterThan(MAX / holders.length);
            expect(heldBy(setting.tenant) + setting.weight).toBeLessThanOrEqual(MAX / holders.length);
          }
          expect(all() + setting.weight).toBeGreaterThan(MAX);
          model.delete(name);
        });
        for (const { action, tenant, key, weight } of steps) {
          const name = `${tenant}-${key}`;
          if (action === "set") {
            setting = { tenant, weight };
            model.delete(name);
            cache.set(tenant, name, setting, weight);
            model.set(name, setting);
          } else if (action === "delete") {
            cache.delete(name);
            model.delete(name);
          }
          expect(cache.get(name)).toBe(model.get(name));
          expect(all()).toBeLessThanOrEqual(MAX);
        }
        for (const [name, entry] of model) expect(cache.get(name)).toBe(entry);
      }),
    );
  });

  test("may be filled by a tenant alone, and gives one that comes late an even share of that", () => {
    const cache = tenantCache<string, number>(90);
    for (let at = 0; at < 90; at++) cache.set("a", `a-${at}`, at);
    for (let at = 0; at < 90; at++) expect(cache.get(`a-${at}`)).toBe(at);
    for (const tenant of ["b", "c"]) for (let at = 0; at < 30; at++) cache.set(tenant, `${tenant}-${at}`, at);
    for (let at = 0; at < 10_000; at++) cache.set("a", `a-${at}`, at);
    for (const tenant of ["b", "c"]) {
      for (let at = 0; at < 30; at++) expect(cache.get(`${tenant}-${at}`)).toBe(at);
    }
  });

  test("makes room for an entry in a few steps, however many were all used", () => {
    const evicted: number[] = [];
    const cache = tenantCache<number, number>(10_000, (key) => evicted.push(key));
    for (let key = 0; key < 10_000; key++) cache.set("one", key, key);
    for (let key = 0; key < 10_000; key++) cache.get(key);
    cache.set("one", 10_000, 0);
    expect(evicted.length).toBe(1);
    // The very oldest goes only after all have been passed over.
    expect(evicted[0]).toBeWithin(1, 100);
  });

  test("keeps an entry of a tenant that is used longer than one that is not", () => {
    const cache = tenantCache<number, number>(10);
    for (let key = 0; key < 10; key++) cache.set("a", key, key);
    for (let key = 10; key < 100; key++) {
      expect(cache.get(0)).toBe(0);
      cache.set("a", key, key);
    }
    expect(cache.get(1)).toBeUndefined();
  });
});
