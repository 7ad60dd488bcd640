// Which payments share a transaction.

import { expect, test } from "bun:test";
import fc from "fast-check";
import { SHARED_GAS, SHARED_GAS_MAX } from "../../chain/token.ts";
import { byTransaction, type SendJob } from "./sender.ts";

const anyJob = fc.record({
  payment: fc.constant({} as SendJob["payment"]),
  gas: fc.bigInt(50_000n, 500_000n),
  again: fc.boolean(),
  mayShare: fc.boolean(),
});

test("each payment is in one transaction, and none that may share is past the bounds of count and gas", () => {
  fc.assert(
    fc.property(fc.array(anyJob, { maxLength: 120 }), fc.integer({ min: 0, max: 100 }), (jobs, max) => {
      const groups = byTransaction(jobs, max);
      expect(new Set(groups.flat())).toEqual(new Set(jobs));
      expect(groups.flat()).toHaveLength(jobs.length);
      for (const group of groups) {
        const gas = group.reduce((sum, job) => sum + job.gas, SHARED_GAS);
        expect(group.length).toBeLessThanOrEqual(Math.max(1, max));
        expect(gas).toBeLessThanOrEqual(SHARED_GAS_MAX);
        expect(group.length === 1 || group.every(({ mayShare }) => mayShare)).toBe(true);
      }
    }),
  );
});

test("as few transactions as the count allows, where the gas suffices", () => {
  const jobs = Array.from({ length: 101 }, () => ({ ...fc.sample(anyJob, 1)[0]!, gas: 100_000n, mayShare: true }));
  expect(byTransaction(jobs, 50).map(({ length }) => length)).toEqual([50, 50, 1]);
  expect(byTransaction(jobs, 1)).toHaveLength(101);
  expect(byTransaction(jobs, 0)).toHaveLength(101);
});
