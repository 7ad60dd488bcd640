import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { createFairShare, type FairShare, leastFirst } from "./share.ts";

const TENANTS = ["a", "b", "c", "d"] as const;
const AGENTS = ["x", "y", "z"] as const;

/** Takes one by one, each time for another agent if there are any, until the tenant gets no more. */
function takeAll(share: FairShare, tenant: string, agents = 0): number {
  let taken = 0;
  if (agents === 0) {
    while (share.take(tenant) === null) taken++;
    return taken;
  }
  for (let misses = 0, next = 0; misses < agents; next++) {
    if (share.take(tenant, `${tenant}-${next % agents}`) === null) [taken, misses] = [taken + 1, 0];
    else misses++;
  }
  return taken;
}

test("nobody gets more than there is, than an agent may hold, or than was given back", () => {
  const step = fc.record({
    tenant: fc.constantFrom(...TENANTS),
    agent: fc.constantFrom(...AGENTS),
    amount: fc.integer({ min: 0, max: 40 }),
    take: fc.boolean(),
  });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 200 }), fc.integer({ min: 1, max: 200 }), (steps, size) => {
      const share = createFairShare({ size, agentMax: 50, least: 0 });
      const held: { tenant: string; agent: string; amount: number }[] = [];
      for (const { take, ...what } of steps) {
        if (!take) {
          const last = held.pop();
          if (last !== undefined) share.giveBack(last.tenant, last.agent, last.amount);
        } else if (share.take(what.tenant, what.agent, what.amount) === null) held.push(what);
        expect(share.free).toBe(size - sum(held));
        expect(share.free).toBeGreaterThanOrEqual(0);
        for (const tenant of TENANTS) {
          const own = held.filter((one) => one.tenant === tenant);
          expect(share.heldBy(tenant)).toBe(sum(own));
          for (const agent of AGENTS) {
            const ofAgent = sum(own.filter((one) => one.agent === agent));
            expect(share.heldBy(tenant, agent)).toBe(ofAgent);
            expect(ofAgent).toBeLessThanOrEqual(50);
          }
        }
      }
    }),
  );
});

const sum = (held: readonly { amount: number }[]) => held.reduce((all, { amount }) => all + amount, 0);

describe("a tenant alone", () => {
  test("gets seven eighths of everything, but always one", () => {
    fc.assert(
      fc.property(fc.integer({ min: 1, max: 10_000 }), (size) => {
        const share = createFairShare({ size });
        expect(takeAll(share, "a")).toBe(Math.max(1, size - Math.ceil(size / 8)));
      }),
    );
  });

  test("gets what is too much for anybody's share, while nobody holds anything", () => {
    const share = createFairShare({ size: 100, least: 0 });
    expect(share.take("a", "x", 101)).not.toBeNull();
    expect(share.take("a", "x", 100)).toBeNull();
    expect(share.take("b", "y", 1)).not.toBeNull();
  });

  test("shares among its agents in the same way: many of them that are stuck leave something for the next", () => {
    const share = createFairShare({ size: 4096, agentMax: 64 });
    takeAll(share, "a", 500);
    expect(share.heldBy("a")).toBeGreaterThan(3500);
    for (let agent = 0; agent < 500; agent++) expect(share.heldBy("a", `a-${agent}`)).toBeGreaterThan(0);
    expect(share.take("a", "next")).toBeNull();
    const one = createFairShare({ size: 4096 });
    takeAll(one, "a", 1);
    expect(one.heldBy("a")).toBeGreaterThan(3000);
    expect(one.take("a", "next")).toBeNull();
  });
});

describe("whoever comes next", () => {
  test("finds something, when so many tenants as a process serves hold all that they may", () => {
    const share = createFairShare({ size: 4096, agentMax: 64 });
    const got = Array.from({ length: 20 }, (_, tenant) => takeAll(share, `t${tenant}`, 100));
    expect(got[0]).toBeGreaterThan(3500);
    expect(got[1]).toBeGreaterThan(300);
    expect(got[2]).toBeGreaterThan(60);
    expect(Math.min(...got)).toBeGreaterThan(0);
    expect(share.take("next", "only")).toBeNull();
  });

  test("finds bytes too", () => {
    const share = createFairShare({ size: 256 * 1024 * 1024, least: 0 });
    const body = 1024 * 1024;
    for (const tenant of ["a", "b"]) while (share.take(tenant, "x", body) === null);
    expect(share.take("next", "x", body)).toBeNull();
  });
});

test("those that wait are ordered by what they hold, and each is looked at once however many there are", () => {
  fc.assert(
    fc.property(fc.array(fc.integer({ min: 0, max: 5 }), { maxLength: 100 }), (amounts) => {
      let looks = 0;
      const names = [...amounts.keys()];
      const held = (name: number) => amounts[name] ?? 0;
      const ordered = leastFirst(names, (name) => {
        looks++;
        return held(name);
      });
      expect(ordered).toEqual(names.toSorted((a, b) => held(a) - held(b)));
      expect(looks).toBe(names.length);
    }),
  );
});
