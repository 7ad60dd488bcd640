import { expect, test } from "bun:test";
import fc from "fast-check";
import { createPlaces } from "./places.ts";

const agents = ["a", "b", "c", "d", "e", "f"] as const;

test("never more than the limits, and what is released can be taken again", () => {
  const step = fc.record({
    agent: fc.constantFrom(...agents),
    bytes: fc.integer({ min: 0, max: 40 }),
    take: fc.boolean(),
  });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 200 }), (steps) => {
      const limits = { per_agent: 4, in_all: 12, body_bytes: 100 };
      const places = createPlaces(limits);
      const held: { agent: string; bytes: number }[] = [];
      for (const { agent, bytes, take } of steps) {
        if (take) {
          if (places.take(agent, bytes) === "taken") held.push({ agent, bytes });
        } else {
          const last = held.pop();
          if (last !== undefined) places.release(last.agent, last.bytes);
        }
        expect(places.taken).toBe(held.length);
        expect(held.length).toBeLessThanOrEqual(limits.in_all);
        if (held.length > 1)
          expect(held.reduce((sum, h) => sum + h.bytes, 0)).toBeLessThanOrEqual(limits.body_bytes);
        for (const name of agents)
          expect(held.filter((h) => h.agent === name).length).toBeLessThanOrEqual(limits.per_agent);
      }
      for (const { agent, bytes } of held) places.release(agent, bytes);
      expect(places.take("a", 1_000)).toBe("taken");
    }),
  );
});

test("many stuck agents leave a place for the next one", () => {
  const places = createPlaces({ per_agent: 64, in_all: 4096, body_bytes: 1e9 });
  for (let agent = 0; agent < 500; agent++) while (places.take(`stuck-${agent}`, 1) === "taken");
  expect(places.full()).toBe(false);
  expect(places.take("next", 1)).toBe("taken");
});

test("one agent alone gets all of its places", () => {
  const places = createPlaces({ per_agent: 64, in_all: 1024, body_bytes: 1e9 });
  for (let i = 0; i < 64; i++) expect(places.take("only", 1)).toBe("taken");
  expect(places.take("only", 1)).toBe("own_limit");
});
