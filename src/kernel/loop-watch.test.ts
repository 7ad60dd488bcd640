import { afterEach, beforeEach, describe, expect, jest, spyOn, test } from "bun:test";
import fc from "fast-check";
import type { LogFields } from "../core/log.ts";
import { watchLoop } from "./loop-watch.ts";

let stop = () => {};
afterEach(() => stop());

test("a pause in which the thread waited is told with its length, and by how little was computed", async () => {
  const { promise, resolve } = Promise.withResolvers<LogFields>();
  stop = watchLoop("main", 100, (event, fields = {}) => {
    expect(event).toBe("event_loop_blocked");
    resolve(fields);
  });
  // Its timer runs from here on.
  await Bun.sleep(1);
  Bun.sleepSync(400);
  const told = await promise;
  expect(told).toMatchObject({ thread: "main", times: 1 });
  expect(told["ms"]).toBeGreaterThanOrEqual(300);
  expect(told["cpu_ms"]).toBeLessThan(200);
});

describe("by a simulated clock,", () => {
  const TICK_MS = 10;
  const LEAST_MS = 100;
  let time = 0;
  const restore: { mockRestore(): void }[] = [];
  beforeEach(() => {
    jest.useFakeTimers();
    restore.push(spyOn(performance, "now").mockImplementation(() => time));
  });
  afterEach(() => {
    for (const spy of restore.splice(0)) spy.mockRestore();
    jest.useRealTimers();
  });

  test("the pauses of a second are one line with the longest of them, the first is told at once, and what is left at the end", () => {
    const pauses = fc.array(fc.oneof(fc.constant(0), fc.integer({ min: 0, max: 400 })), {
      maxLength: 400,
      size: "max",
    });
    fc.assert(
      fc.property(pauses, (all) => {
        time = 0;
        const lines: { at: number; ms: unknown; times: unknown }[] = [];
        const late: number[] = [];
        const watching = watchLoop(
          "main",
          LEAST_MS,
          (_, fields) => void lines.push({ at: time, ms: fields?.["ms"], times: fields?.["times"] }),
          (ms) => void late.push(ms),
        );
        const expected: typeof lines = [];
        let [longest, times, toldAt] = [0, 0, Number.NEGATIVE_INFINITY];
        const tell = () => {
          if (times > 0) [expected.length, toldAt] = [expected.push({ at: time, ms: longest, times }), time];
          [longest, times] = [0, 0];
        };
        for (const ms of all) {
          time += TICK_MS + ms;
          jest.advanceTimersByTime(TICK_MS);
          if (ms >= LEAST_MS) [longest, times] = [Math.max(longest, ms), times + 1];
          if (time - toldAt >= 1_000) tell();
        }
        watching();
        tell();
        expect(lines).toEqual(expected);
        expect(late).toEqual(all);
      }),
    );
  });
});
