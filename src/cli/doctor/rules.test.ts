import { expect, test } from "bun:test";
import fc from "fast-check";
import { becomeNextVersion } from "../../../test/support/stores/next-version.ts";
import { newestVersion } from "../../storage/schema-versions.ts";
import type { Problem } from "./finding.ts";
import { freeSpaceProblem, schemaProblem, skewProblem, validityProblem } from "./rules.ts";

const DAY_MS = 86_400_000;
const GIB = 1024 ** 3;
const stateOf = (problem: Problem | null) => problem?.state ?? "ok";

test("free space below 1 GiB warns, and none fails", () => {
  fc.assert(
    fc.property(fc.integer({ min: 0, max: 4 * GIB }), (bytes) => {
      const expected = bytes === 0 ? "fail" : bytes < GIB ? "warn" : "ok";
      expect(stateOf(freeSpaceProblem("/data", bytes))).toBe(expected);
    }),
    { examples: [[0], [1], [GIB - 1], [GIB]] },
  );
});

test("a certificate warns below 14 days, and fails before and after its time", () => {
  const now = Date.parse("2026-11-23T12:00:00Z");
  const judge = (from: number, to: number) => stateOf(validityProblem("it", { from, to }, now, "renew it"));
  expect(judge(0, now + 14 * DAY_MS)).toBe("ok");
  expect(judge(0, now + 14 * DAY_MS - 1)).toBe("warn");
  expect(judge(0, now)).toBe("warn");
  expect(judge(0, now - 1)).toBe("fail");
  expect(judge(now + 1, now + 100 * DAY_MS)).toBe("fail");
  expect(validityProblem("it", { from: 0, to: now + 1.5 * DAY_MS }, now, "renew it")?.text).toBe(
    "it expires in 1 day, at 2026-11-25T00:00:00.000Z",
  );
});

test("a clock that is off by more than 30 s warns, either way", () => {
  fc.assert(
    fc.property(fc.integer({ min: -100_000, max: 100_000 }), (ms) => {
      const problem = skewProblem("its clock", ms, "set it");
      expect(stateOf(problem)).toBe(Math.abs(ms) > 30_000 ? "warn" : "ok");
      if (problem !== null) expect(problem.text.includes("ahead of")).toBe(ms > 0);
    }),
    { examples: [[30_000], [30_001], [-30_000], [-30_001]] },
  );
});

test("an older schema warns, a newer one that allows this program too, another fails, and none is for the first start", () => {
  using _ = becomeNextVersion();
  const judge = (version: number, floor: number) => stateOf(schemaProblem({ version, floor }));
  const known = newestVersion();
  expect([judge(0, 0), judge(known - 1, 1), judge(known, known)]).toEqual(["ok", "warn", "ok"]);
  expect([judge(known + 9, known), judge(known + 9, known + 1)]).toEqual(["warn", "fail"]);
});
