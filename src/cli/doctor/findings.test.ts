import { expect, test } from "bun:test";
import fc from "fast-check";
import { becomeNextVersion } from "../../../test/support/stores/next-version.ts";
import { StartupProblem } from "../../core/startup.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import { newestVersion } from "../../storage/migrate.ts";
import { freeSpaceProblem, schemaProblem } from "./database.ts";
import {
  findings,
  isHealthy,
  type Problem,
  report,
  runChecks,
  skewProblem,
  validityProblem,
  warning,
} from "./findings.ts";

const throwing = (what: string, error: unknown) => ({ what, run: () => Promise.reject(error) });

test("findings stand in the order of the checks, whichever ends first", async () => {
  const gate = Promise.withResolvers<void>();
  const checks = [
    { what: "slow", run: () => gate.promise.then(() => findings("slow", [], "good")) },
    {
      what: "fast",
      async run() {
        gate.resolve();
        return findings("fast", [warning("odd", "mend it")], "good");
      },
    },
  ];
  const found = await runChecks(checks);
  expect(report(found)).toBe("ok    slow  good\nwarn  fast  odd; mend it\n");
  expect(isHealthy(found)).toBe(true);
});

test("a check that fails in a way of its own fails without the words of the error, and one that is late fails too", async () => {
  const found = await runChecks([
    throwing("library", Object.assign(new TypeError("the key is hunter2"), { code: "E_KEY" })),
    throwing("thing", "hunter2"),
    { what: "late", run: () => new Promise(() => {}), msMax: 1 },
    { ...throwing("start", new StartupProblem("it must be there")), advice: "put it there" },
    throwing("host", new OutboundError("blocked", "db.internal: the name is not allowed")),
  ]);
  expect(report(found)).not.toContain("hunter2");
  expect(found.map(({ state, text, advice }) => [state, text, advice])).toEqual([
    ["fail", "it can't be checked (E_KEY)", "fix it, and run tollgate doctor again"],
    ["fail", "it can't be checked (unknown)", "fix it, and run tollgate doctor again"],
    ["fail", "no answer within 0.001 s", "fix it, and run tollgate doctor again"],
    ["fail", "it must be there", "put it there"],
    ["fail", "db.internal: the name is not allowed", "TOLLGATE_ALLOW_HOSTS exempts a trusted host from the host rules"],
  ]);
  expect(isHealthy(found)).toBe(false);
});

test("what servers and tenants say breaks no line and steers no terminal", () => {
  const found = findings("facilitator of \u202eacme", [warning("a\nfail  b\u001b[31m", "c\u2028d")], "");
  expect(report(found)).toBe("warn  facilitator of  acme  a fail  b [31m; c d\n");
});

test("what one tenant has chosen does not set the other lines apart", () => {
  const named = (url: string) => findings(`facilitator https://${url} of acme`, [], "fine");
  const [long, short] = report([...named("x".repeat(2_000)), ...named("y")]).split("\n");
  expect(short).toMatch(/^ok {4}facilitator https:\/\/y of acme {1,60}fine$/);
  expect(long).toMatch(/^ok {4}facilitator https:\/\/x+ of acme {2}fine$/);
});

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
  const judge = (from: number, to: number) => stateOf(validityProblem("it", from, to, now, "renew it"));
  expect(judge(0, now + 14 * DAY_MS)).toBe("ok");
  expect(judge(0, now + 14 * DAY_MS - 1)).toBe("warn");
  expect(judge(0, now)).toBe("warn");
  expect(judge(0, now - 1)).toBe("fail");
  expect(judge(now + 1, now + 100 * DAY_MS)).toBe("fail");
  expect(validityProblem("it", 0, now + 1.5 * DAY_MS, now, "renew it")?.text).toBe(
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
