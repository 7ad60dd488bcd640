import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { gweiToWei, quoteFees, raiseFees } from "./fees.ts";

const wei = fc.bigInt({ min: 0n, max: 10n ** 12n });

describe("the fees of a new transaction", () => {
  test("suffice for the base fee, and stay within the cap", () => {
    fc.assert(
      fc.property(wei, wei, wei, (baseFee, tip, cap) => {
        const fees = quoteFees(baseFee, tip, cap);
        if (fees === null) return baseFee > cap;
        return fees.maxFee >= baseFee && fees.maxFee <= cap && fees.maxPriorityFee <= fees.maxFee;
      }),
    );
  });

  test("leave room for the base fee to double", () => {
    expect(quoteFees(100n, 3n, 1000n)).toEqual({ maxFee: 203n, maxPriorityFee: 3n });
    expect(quoteFees(100n, 3n, 150n)).toEqual({ maxFee: 150n, maxPriorityFee: 3n });
    expect(quoteFees(100n, 300n, 100n)).toEqual({ maxFee: 100n, maxPriorityFee: 100n });
    expect(quoteFees(101n, 3n, 100n)).toBeNull();
  });
});

describe("the fees of a replacement", () => {
  const before = fc.tuple(wei, wei).map(([a, b]) => ({ maxFee: a + b, maxPriorityFee: b }));

  test("are at least an eighth higher in both, within the cap, and suffice for the base fee", () => {
    fc.assert(
      fc.property(before, wei, wei, wei, (old, baseFee, tip, cap) => {
        const fees = raiseFees(old, baseFee, tip, cap);
        if (fees === null) return;
        expect(fees.maxFee * 8n).toBeGreaterThanOrEqual(old.maxFee * 9n);
        expect(fees.maxPriorityFee * 8n).toBeGreaterThanOrEqual(old.maxPriorityFee * 9n);
        expect(fees.maxFee).toBeGreaterThan(old.maxFee);
        expect(fees.maxPriorityFee).toBeGreaterThan(old.maxPriorityFee);
        expect(fees.maxFee).toBeLessThanOrEqual(cap);
        expect(fees.maxFee).toBeGreaterThanOrEqual(baseFee);
        expect(fees.maxPriorityFee).toBeLessThanOrEqual(fees.maxFee);
      }),
    );
  });

  test("are refused only when the cap leaves no room", () => {
    fc.assert(
      fc.property(before, wei, wei, wei, (old, baseFee, tip, cap) => {
        const hasRoom = baseFee <= cap && old.maxFee + old.maxFee / 8n < cap;
        return !hasRoom || raiseFees(old, baseFee, tip, cap) !== null;
      }),
    );
  });

  test("can be raised again and again, but not for ever", () => {
    let fees = quoteFees(1_000_000n, 1_000n, 5_000_000_000n);
    let raises = 0;
    while (fees !== null && raises < 1000) {
      fees = raiseFees(fees, 1_000_000n, 1_000n, 5_000_000_000n);
      raises++;
    }
    expect(raises).toBeGreaterThan(50);
    expect(raises).toBeLessThan(100);
  });
});

test("a cap may be given with a fraction of a gwei", () => {
  expect(gweiToWei(5)).toBe(5_000_000_000n);
  expect(gweiToWei(0.05)).toBe(50_000_000n);
});
