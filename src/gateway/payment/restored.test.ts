import { expect, test } from "bun:test";
import fc from "fast-check";
import { createRestoreGuard, type RestoreGuard } from "./restored.ts";

const NOW = 1_800_000_000;
const MARGIN = 6;

const isTaken = (guard: RestoreGuard, validBefore: number, now: number) =>
  validBefore >= now + MARGIN && validBefore <= guard.latest(now) && !guard.mayBeOlder(validBefore);

test("what was taken before a restore is never taken after it, whatever restores came before", () => {
  const times = fc.tuple(
    fc.integer({ min: 0, max: 2_000 }),
    fc.integer({ min: 0, max: 2_000 }),
    fc.integer({ min: 6, max: 900 }),
  );
  fc.assert(
    fc.property(
      times,
      fc.integer({ min: 0, max: 2_000 }),
      fc.boolean(),
      ([until, after, ahead], earlier, wasRestored) => {
        // An earlier restore, a payment, the restore that forgets it, and the payment once more.
        const first = createRestoreGuard(wasRestored ? (NOW - earlier) * 1_000 : null);
        const second = createRestoreGuard((NOW + until) * 1_000);
        const validBefore = NOW + ahead;
        fc.pre(isTaken(first, validBefore, NOW));
        expect(isTaken(second, validBefore, NOW + until + after)).toBe(false);
      },
    ),
    { numRuns: 500 },
  );
});

test("from a minute after a restore on, what is signed as demanded is taken, also by clocks that are a little off", () => {
  const guard = createRestoreGuard(NOW * 1_000);
  const ages = fc.integer({ min: 61 + 20, max: 838 });
  fc.assert(
    fc.property(ages, fc.integer({ min: -20, max: 20 }), (age, skew) => {
      const now = NOW + age;
      expect(isTaken(guard, now + skew + guard.timeoutSeconds(now), now)).toBe(true);
    }),
  );
  expect(isTaken(guard, NOW + 60, NOW)).toBe(false);
});

test("without a restore, and long after one, all is as usual", () => {
  for (const guard of [createRestoreGuard(null), createRestoreGuard((NOW - 841) * 1_000)]) {
    expect([guard.timeoutSeconds(NOW), guard.latest(NOW) - NOW]).toEqual([60, 660]);
    expect(isTaken(guard, NOW + MARGIN, NOW)).toBe(true);
  }
});
