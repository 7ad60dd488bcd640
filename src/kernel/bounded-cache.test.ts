import { expect, test } from "bun:test";
import fc from "fast-check";
import { boundedCache } from "./cache.ts";

test("a bounded cache gives only what was last set, and stays within its bound", () => {
  const operation = fc.record({
    key: fc.nat(12),
    value: fc.nat(),
    weight: fc.integer({ min: 1, max: 6 }),
    set: fc.boolean(),
  });
  fc.assert(
    fc.property(fc.array(operation, { maxLength: 200 }), (operations) => {
      const cache = boundedCache<number, number>(10);
      const model = new Map<number, { value: number; weight: number }>();
      for (const { key, value, weight, set } of operations) {
        if (set) {
          cache.set(key, value, weight);
          model.set(key, { value, weight });
        } else {
          const found = cache.get(key);
          if (found !== undefined) expect(found).toBe(model.get(key)!.value);
        }
      }
      // A look-up moves an entry and may drop others, so counting by look-ups misses some at most.
      let held = 0;
      for (const [key, { weight }] of model) if (cache.get(key) !== undefined) held += weight;
      expect(held).toBeLessThanOrEqual(10);
    }),
  );
});

test("an entry that is used stays while others come and go", () => {
  const cache = boundedCache<string, string>(8);
  cache.set("kept", "value");
  for (let other = 0; other < 100; other++) {
    cache.set(`other ${other}`, "");
    expect(cache.get("kept")).toBe("value");
  }
  expect(cache.get("other 1")).toBeUndefined();
});

test("an entry heavier than half the bound is not kept, nor what it replaces", () => {
  const cache = boundedCache<string, string>(8);
  cache.set("a", "small");
  cache.set("a", "huge", 5);
  expect(cache.get("a")).toBe(undefined);
});
