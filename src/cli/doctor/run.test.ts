import { expect, test } from "bun:test";
import { StartupProblem } from "../../core/startup.ts";
import { OutboundError } from "../../http/outbound.ts";
import { findings, isHealthy, report, warning } from "./finding.ts";
import { runChecks } from "./run.ts";

const throwing = (what: string, error: unknown) => ({ what, look: () => Promise.reject(error) });

test("findings stand in the order of the checks, whichever ends first", async () => {
  const gate = Promise.withResolvers<void>();
  const checks = [
    { what: "slow", look: () => gate.promise.then(() => findings("slow", [], "good")) },
    {
      what: "fast",
      async look() {
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
    { what: "late", look: () => new Promise(() => {}), msMax: 1 },
    { ...throwing("start", new StartupProblem("it must be there")), advice: "put it there" },
    throwing("host", new OutboundError("blocked", "db.internal: the name is not allowed")),
    { what: "second", after: Promise.reject(new Error("first")), look: async () => findings("second", [], "good") },
  ]);
  expect(report(found)).not.toContain("hunter2");
  expect(found.map(({ state, text, advice }) => [state, text, advice])).toEqual([
    ["fail", "it can't be looked at (E_KEY)", "see to it, and look again"],
    ["fail", "it can't be looked at (unknown)", "see to it, and look again"],
    ["fail", "no answer within 0.001 s", "see to it, and look again"],
    ["fail", "it must be there", "put it there"],
    ["fail", "db.internal: the name is not allowed", "TOLLGATE_ALLOW_HOSTS exempts a trusted host from the host rules"],
    ["ok", "good", null],
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
