import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { BASE } from "../../test/support/network.ts";
import { freeingFees, quoteFees, raiseFees } from "./fees.ts";

/** A suggestion of nodes, within the bounds of the network. */
const tipOf = (suggested: bigint) => ({ suggested, least: BASE.fees.leastTip, most: BASE.fees.mostTip });

const wei = fc.bigInt({ min: 0n, max: 10n ** 12n });

describe("the fees of a new transaction", () => {
  test("suffice for the base fee, and stay within the cap", () => {
    fc.assert(
      fc.property(wei, wei, wei, (baseFee, tip, cap) => {
        const fees = quoteFees(baseFee, tipOf(tip), cap);
        if (fees === null) return baseFee > cap;
        return fees.maxFee >= baseFee && fees.maxFee <= cap && fees.maxPriorityFee <= fees.maxFee;
      }),
    );
  });

  test("leave room for the base fee to double", () => {
    expect(quoteFees(100n, tipOf(3n), 1000n)).toEqual({ maxFee: 203n, maxPriorityFee: 3n });
    expect(quoteFees(100n, tipOf(3n), 150n)).toEqual({ maxFee: 150n, maxPriorityFee: 3n });
    expect(quoteFees(100n, tipOf(300n), 100n)).toEqual({ maxFee: 100n, maxPriorityFee: 100n });
    expect(quoteFees(101n, tipOf(3n), 100n)).toBeNull();
  });
});

const before = fc.tuple(wei, wei).map(([a, b]) => ({ maxFee: a + b, maxPriorityFee: b }));
const CENTIGWEI = 10_000_000n;

describe("what a node suggests as a tip", () => {
  test("costs at most the base fee, or a hundredth of a gwei", () => {
    fc.assert(
      fc.property(wei, wei, wei, (baseFee, tip, cap) => {
        const paid = quoteFees(baseFee, tipOf(tip), cap)?.maxPriorityFee ?? 0n;
        expect(paid).toBeLessThanOrEqual(tip);
        expect(paid <= baseFee || paid <= CENTIGWEI).toBe(true);
      }),
    );
    const low = 5_000_000n;
    expect(quoteFees(low, tipOf(1_000_000n), 5n * 10n ** 9n)?.maxPriorityFee).toBe(1_000_000n);
    expect(quoteFees(low, tipOf(5n * 10n ** 9n), 5n * 10n ** 9n)?.maxPriorityFee).toBe(CENTIGWEI);
  });

  test("takes a replacement no further than that, but for the step that nodes ask for", () => {
    fc.assert(
      fc.property(before, wei, wei, wei, (old, baseFee, tip, cap) => {
        const paid = raiseFees(old, baseFee, tipOf(tip), cap)?.maxPriorityFee ?? 0n;
        const step = old.maxPriorityFee + old.maxPriorityFee / 8n + 1n;
        return paid <= step || paid <= baseFee || paid <= CENTIGWEI;
      }),
    );
  });
});

describe("the fees of a transaction that does nothing, in place of another,", () => {
  test("are there always, within the cap, and those of a replacement wherever these are possible", () => {
    fc.assert(
      fc.property(before, wei, wei, wei, (old, baseFee, tip, cap) => {
        const fees = freeingFees(old, baseFee, tipOf(tip), cap);
        expect(fees.maxFee).toBeLessThanOrEqual(cap);
        expect(fees.maxPriorityFee).toBeLessThanOrEqual(fees.maxFee);
        const raised = raiseFees(old, baseFee, tipOf(tip), cap);
        if (raised !== null) expect(fees).toEqual(raised);
      }),
    );
  });

  test("are raised while the base fee is over the cap too, and the cap itself where there is no room", () => {
    expect(freeingFees({ maxFee: 80n, maxPriorityFee: 1n }, 500n, tipOf(1n), 100n).maxFee).toBe(100n);
    expect(freeingFees({ maxFee: 100n, maxPriorityFee: 7n }, 500n, tipOf(1n), 100n)).toEqual({
      maxFee: 100n,
      maxPriorityFee: 7n,
    });
  });
});

describe("the fees of a replacement", () => {
  test("are at least an eighth higher in both, within the cap, and suffice for the base fee", () => {
    fc.assert(
      fc.property(before, wei, wei, wei, (old, baseFee, tip, cap) => {
        const fees = raiseFees(old, baseFee, tipOf(tip), cap);
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
        return !hasRoom || raiseFees(old, baseFee, tipOf(tip), cap) !== null;
      }),
    );
  });

  test("can be raised again and again, but not for ever", () => {
    let fees = quoteFees(1_000_000n, tipOf(1_000n), 5_000_000_000n);
    let raises = 0;
    while (fees !== null && raises < 1000) {
      fees = raiseFees(fees, 1_000_000n, tipOf(1_000n), 5_000_000_000n);
      raises++;
    }
    expect(raises).toBeGreaterThan(50);
    expect(raises).toBeLessThan(100);
  });
});
