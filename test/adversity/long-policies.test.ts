// The longest policies, of the shortest names, come to a hundred times their bytes while they are read: many of them at
// once take neither the memory nor the time of others.
import { expect, test } from "bun:test";
import { startGateway } from "../support/gateway/gateway.ts";
import { computedPauses } from "../support/gateway/pauses.ts";

const RSS_MIB_MAX = 700;
const COMPUTED_MS_MAX = 100;
const AT_ONCE = 60;

/** Each name is another one. */
function longPolicy(): string {
  const rules: object[] = [];
  for (let rule = 0; rule < 110; rule++) {
    const tools = Array.from({ length: 1000 }, (_, at) => `${((rule * 1000 + at) * 7_919) % 1_000_003}`.slice(-5));
    rules.push({ action: "deny", match: { tools: tools.map((name) => `${name}*`) } });
  }
  return JSON.stringify({ default: "allow", on_error: "deny", rules });
}

test("many long policies at once are put one after the other, or refused for now", async () => {
  await using gateway = await startGateway({ env: { TOLLGATE_BLOCKED_MS: "20" } });
  const token = await gateway.token({ tenant: "hostile", user: "mallory" });
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
  const body = longPolicy();
  const puts = Promise.all(
    Array.from({ length: AT_ONCE }, async () => {
      const response = await fetch(`${gateway.url}/v1/policy`, { method: "PUT", headers, body });
      await response.text();
      return [response.status, response.headers.get("retry-after")];
    }),
  );
  const outcomes = new Set((await puts).map(String));
  expect(outcomes).toContain("200,");
  expect([...outcomes].filter((outcome) => outcome !== "200," && outcome !== "503,1")).toEqual([]);
  const peak = /VmHWM:\s+(\d+)/.exec(await Bun.file(`/proc/${gateway.pid}/status`).text())?.[1];
  expect(Number(peak) / 1024).toBeLessThan(RSS_MIB_MAX);
  // What is left to tell is told at the end.
  await gateway.stop();
  expect(computedPauses(gateway.log(), COMPUTED_MS_MAX)).toEqual([]);
}, 120_000);
