import { afterEach, beforeEach, describe, expect, jest, spyOn, test } from "bun:test";
import fc from "fast-check";
import type { LogFields } from "../core/log.ts";
import { watchLoop } from "./loop-watch.ts";

let stop = () => {};
afterEach(() => stop());

/** The first pause that is told, with its level, when the thread has been held by `hold`. */
async function toldAfter(hold: () => void): Promise<LogFields> {
  const { promise, resolve } = Promise.withResolvers<LogFields>();
  const written =
    (level: string) =>
    (event: string, fields: LogFields = {}) =>
      resolve({ level, event, ...fields });
  stop = watchLoop("main", 100, { info: written("info"), warn: written("warn") });
  // Its timer runs from here on.
  await Bun.sleep(1);
  hold();
  return promise;
}

test("a pause in which the thread waited is told as information, by how little was computed", async () => {
  const told = await toldAfter(() => Bun.sleepSync(400));
  expect(told).toMatchObject({ level: "info", event: "event_loop_blocked", thread: "main", times: 1 });
  expect(told["ms"]).toBeGreaterThanOrEqual(300);
  expect(told["cpu_ms"]).toBeLessThan(200);
});

test("a pause that the thread computed is a warning", async () => {
  const used = () => process.threadCpuUsage().user + process.threadCpuUsage().system;
  const told = await toldAfter(() => {
    // On a busy machine the thread waits as well.
    for (const until = used() + 200_000; used() < until; );
  });
  expect(told).toMatchObject({ level: "warn", event: "event_loop_blocked", thread: "main", times: 1 });
  expect(told["cpu_ms"]).toBeGreaterThanOrEqual(150);
});

describe("by a simulated clock,", () => {
  const TICK_MS = 20;
  const LEAST_MS = 100;
  let [time, cpu] = [0, 0];
  const restore: { mockRestore(): void }[] = [];
  beforeEach(() => {
    jest.useFakeTimers();
    restore.push(spyOn(performance, "now").mockImplementation(() => time));
    restore.push(spyOn(process, "threadCpuUsage").mockImplementation(() => ({ user: cpu * 1000, system: 0 })));
  });
  afterEach(() => {
    for (const spy of restore.splice(0)) spy.mockRestore();
    jest.useRealTimers();
  });

  test("the pauses of a time are one line of each kind with the longest of them, the first is told at once, and what is left at the end", () => {
    const pause = fc.record({
      ms: fc.oneof(fc.constant(0), fc.integer({ min: 0, max: 2_000 })),
      isComputed: fc.boolean(),
    });
    const pauses = fc.array(pause, { maxLength: 400, size: "max" });
    let linesMost = 0;
    fc.assert(
      fc.property(pauses, (all) => {
        [time, cpu] = [0, 0];
        const lines: { level: string; at: number; ms: unknown; times: unknown }[] = [];
        const late: number[] = [];
        const written = (level: string) => (_: string, fields?: LogFields) =>
          void lines.push({ level, at: time, ms: fields?.["ms"], times: fields?.["times"] });
        const log = { info: written("info"), warn: written("warn") };
        const watching = watchLoop("main", LEAST_MS, log, (ms) => void late.push(ms));
        const expected: typeof lines = [];
        const kinds = [
          { level: "warn", everyMs: 1_000, longest: 0, times: 0, toldAt: Number.NEGATIVE_INFINITY },
          { level: "info", everyMs: 60_000, longest: 0, times: 0, toldAt: Number.NEGATIVE_INFINITY },
        ];
        const tell = (isEnd = false) => {
          for (const kind of kinds) {
            const { level, longest, times } = kind;
            if (times === 0 || (!isEnd && time - kind.toldAt < kind.everyMs)) continue;
            expected.push({ level, at: time, ms: longest, times });
            Object.assign(kind, { longest: 0, times: 0, toldAt: time });
          }
        };
        for (const { ms, isComputed } of all) {
          time += TICK_MS + ms;
          if (isComputed) cpu += ms / 2;
          jest.advanceTimersByTime(TICK_MS);
          const kind = kinds[isComputed ? 0 : 1];
          if (kind !== undefined && ms >= LEAST_MS)
            [kind.longest, kind.times] = [Math.max(kind.longest, ms), kind.times + 1];
          tell();
        }
        watching();
        tell(true);
        linesMost = Math.max(linesMost, lines.filter(({ level }) => level === "info").length);
        expect(lines).toEqual(expected);
        expect(late).toEqual(all.map(({ ms }) => ms));
      }),
    );
    expect(linesMost).toBeGreaterThan(2);
  });
});
