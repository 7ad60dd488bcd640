import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { useSimulatedClock } from "../../test/support/simulated-clock.ts";
import { every, mapLimit, poll } from "./loop.ts";

describe("by a simulated clock,", () => {
  const clock = useSimulatedClock();

  const tens = (most: number) => fc.integer({ min: 1, max: most / 10 }).map((count) => 10 * count);

  test("repeated work begins each pause after it last ended, never beside itself, and not after its stop", async () => {
    const step = fc.record({ takes: tens(200), next: fc.option(tens(300), { nil: undefined }) });
    const plan = fc.record({
      ms: tens(200),
      steps: fc.array(step, { minLength: 1, maxLength: 8, size: "max" }),
      stopAt: tens(2_000),
    });
    await fc.assert(
      fc.asyncProperty(plan, async ({ ms, steps, stopAt }) => {
        clock.now = 0;
        const begun: number[] = [];
        let running = 0;
        const stop = every(ms, async () => {
          const { takes, next } = steps[begun.length % steps.length] ?? { takes: 10, next: undefined };
          begun.push(clock.now);
          expect(++running).toBe(1);
          await new Promise((resolve) => setTimeout(resolve, takes));
          running--;
          return next;
        });
        await clock.pass(stopAt);
        stop();
        await clock.pass(1_000);
        const expected: number[] = [];
        for (let at = ms; at <= stopAt; ) {
          const { takes, next } = steps[expected.length % steps.length] ?? { takes: 10, next: undefined };
          expected.push(at);
          at += takes + (next ?? ms);
        }
        expect(begun).toEqual(expected);
      }),
      { numRuns: 60 },
    );
  });

  const BETWEEN = { leastMs: 250, mostMs: 2_000 };

  /** A poll whose looks find what they are given, and when they were. */
  function watched(find: () => boolean | number, takes = 0) {
    const looks: number[] = [];
    let looking = 0;
    const loop = poll(BETWEEN, async () => {
      looks.push(clock.now);
      expect(++looking).toBe(1);
      if (takes > 0) await new Promise((resolve) => setTimeout(resolve, takes));
      looking--;
      return find();
    });
    return {
      ...loop,
      pass: async (ms: number) => {
        await clock.pass(ms);
        return looks.splice(0);
      },
    };
  }

  test("a look comes when it is due by what was found, at once when work was made, and never after the stop", async () => {
    const step = fc.record({
      found: fc.oneof(fc.boolean(), tens(3_000)),
      passes: tens(3_000),
      isSoon: fc.boolean(),
    });
    await fc.assert(
      fc.asyncProperty(
        fc.array(step, { maxLength: 10, size: "max" }),
        fc.constantFrom(0, 100),
        async (steps, takes) => {
          clock.now = 0;
          let found: boolean | number = false;
          const loop = watched(() => found, takes);
          // The model: when the next look is due, the pause so far, and whether one is under way until then.
          let [pause, due, until, isWanted] = [BETWEEN.leastMs, BETWEEN.leastMs, 0, false];
          let isLooking = false;
          const after = () => {
            pause = found === true || isWanted ? BETWEEN.leastMs : Math.min(2 * pause, BETWEEN.mostMs);
            const known = typeof found === "number" ? Math.max(found, BETWEEN.leastMs) : BETWEEN.mostMs;
            due = until + Math.min(pause, known);
            isLooking = false;
          };
          for (const one of steps) {
            found = one.found;
            if (one.isSoon) {
              loop.soon();
              pause = BETWEEN.leastMs;
              isWanted = true;
              if (!isLooking) due = Math.min(due, clock.now + BETWEEN.leastMs);
            }
            const expected: number[] = [];
            const end = clock.now + one.passes;
            for (;;) {
              if (isLooking && until <= end) after();
              if (isLooking || due > end) break;
              expected.push(due);
              [isLooking, isWanted, until] = [true, false, due + takes];
            }
            expect(await loop.pass(one.passes)).toEqual(expected);
          }
          loop.stop();
          loop.soon();
          expect(await loop.pass(5_000)).toEqual([]);
        },
      ),
      { numRuns: 60 },
    );
  });

  test("what finds nothing is looked for less and less often, and never later than the longest pause", async () => {
    const loop = watched(() => false);
    expect(await loop.pass(8_000)).toEqual([250, 750, 1_750, 3_750, 5_750, 7_750]);
    loop.soon();
    expect(await loop.pass(1_000)).toEqual([8_250, 8_750]);
    loop.stop();
  });
});

test("each item has its work in order, few at a time; one that fails is told when those at work have ended", async () => {
  const plan = fc.record({
    fails: fc.array(fc.boolean(), { maxLength: 30, size: "max" }),
    limit: fc.integer({ min: 1, max: 5 }),
    turns: fc.infiniteStream(fc.nat(4)),
  });
  await fc.assert(
    fc.asyncProperty(plan, async ({ fails, limit, turns }) => {
      const begun: number[] = [];
      let running = 0;
      const next = turns[Symbol.iterator]();
      const all = mapLimit(fails.keys(), limit, async (at) => {
        begun.push(at);
        expect(++running).toBeLessThanOrEqual(limit);
        for (let left = next.next().value ?? 0; left > 0; left--) await Promise.resolve();
        running--;
        if (fails[at]) throw new Error("failed");
      });
      const isFailed = await all.then(
        () => false,
        () => true,
      );
      expect(running).toBe(0);
      expect(begun).toEqual(begun.map((_, at) => at));
      expect(isFailed).toBe(fails.includes(true));
      // Each failure takes one of those who work away, and while one is left all are begun.
      if (fails.filter(Boolean).length < limit) expect(begun).toHaveLength(fails.length);
    }),
  );
});
