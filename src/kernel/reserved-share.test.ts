import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { createReservedShare } from "./share.ts";

const totals = fc.integer({ min: 1, max: 3_000 });
const names = (count: number) => Array.from({ length: count }, (_, n) => `account ${n}`);

/** Takes until it is refused, and says how many it got. */
function takeAll(shares: ReturnType<typeof createReservedShare>, name: string): number {
  let count = 0;
  while (shares.take(name)) count++;
  return count;
}

test("one alone may have nearly all: seven of eight", () => {
  expect([1, 2, 3, 8, 2_000, 4_096].map((total) => takeAll(createReservedShare(total), "alone"))).toEqual([
    1, 1, 2, 7, 1_750, 3_584,
  ]);
});

test("however many flood, the next one gets a place, and the one after it", () => {
  const shares = createReservedShare(2_000);
  for (const name of names(5)) takeAll(shares, name);
  for (const name of ["next", "one more"]) expect(shares.take(name)).toBe(true);
});

test("of what one leaves free, each of those who come gets a first place, however much it wants", () => {
  const shares = createReservedShare(2_000);
  takeAll(shares, "flooder");
  const got = names(100).map((name) => takeAll(shares, name));
  expect(Math.min(...got)).toBeGreaterThanOrEqual(1);
});

test("one who holds all it may, however long, keeps nobody from a first place", () => {
  fc.assert(
    fc.property(totals, (total) => {
      const shares = createReservedShare(total);
      takeAll(shares, "flooder");
      expect(shares.take("other")).toBe(total > 1);
    }),
  );
});

test("there are never more taken than there are, and what is given back can be taken again", () => {
  const steps = fc.array(fc.record({ name: fc.constantFrom(...names(5)), takes: fc.boolean() }));
  fc.assert(
    fc.property(fc.integer({ min: 1, max: 20 }), steps, (total, sequence) => {
      const shares = createReservedShare(total);
      const held: string[] = [];
      for (const { name, takes } of sequence) {
        const at = held.indexOf(name);
        if (takes) {
          if (shares.take(name)) held.push(name);
        } else if (at >= 0) {
          held.splice(at, 1);
          shares.giveBack(name);
        }
        expect(held.length).toBeLessThanOrEqual(total);
      }
      for (const name of held) shares.giveBack(name);
      expect(takeAll(shares, "alone")).toBe(takeAll(createReservedShare(total), "alone"));
    }),
  );
});

describe("when so many want more than there is", () => {
  /** Places are given back one by one, in any order, and whoever still wants one asks at once. */
  function sharesAfterAWhile(total: number, count: number, seed: number): number[] {
    const shares = createReservedShare(total);
    const held = new Map(names(count).map((name) => [name, takeAll(shares, name)]));
    let random = seed;
    const next = (most: number) => {
      random = (random * 48_271) % 2_147_483_647;
      return random % most;
    };
    for (let turn = 0; turn < 2 * total * count; turn++) {
      const name = `account ${next(count)}`;
      const own = held.get(name) ?? 0;
      if (own === 0) continue;
      shares.giveBack(name);
      held.set(name, own - 1);
      const first = next(count);
      for (let at = 0; at < count; at++) {
        const asks = `account ${(first + at) % count}`;
        held.set(asks, (held.get(asks) ?? 0) + takeAll(shares, asks));
      }
    }
    return [...held.values()];
  }

  test("none ends up with less than its share of seven eighths, less one", () => {
    fc.assert(
      fc.property(
        fc.integer({ min: 20, max: 300 }),
        fc.integer({ min: 2, max: 12 }),
        fc.integer({ min: 1, max: 2_000_000_000 }),
        (total, count, seed) => {
          const least = Math.min(...sharesAfterAWhile(total, count, seed));
          expect(least).toBeGreaterThanOrEqual(Math.floor((total * 7) / 8 / count) - 1);
        },
      ),
      { numRuns: 50 },
    );
  });
});
