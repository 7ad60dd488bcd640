// What a tenant, or a stranger, can make a gateway log: a few short lines for each request.
import { expect, test } from "bun:test";
import { ask, idOf } from "./support/gateway/api.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { startGateway } from "./support/gateway/gateway.ts";
import { until } from "./support/until.ts";

const TIMES = 20;
/** Of a call that is refused or fails: its request, what went wrong, its end. */
const LINES_MAX = 3;
const CHARACTERS_MAX = 2_000;
const LONG = "x".repeat(6_000);

test("a request of a tenant causes three lines at most, however long its parts are, and strangers twenty a second", async () => {
  await using gateway = await startGateway();
  const token = await gateway.token({ tenant: "acme", user: "alice" });
  const credential = { name: "gone", source: "vault", auth_type: "bearer", vault_ref: "nowhere" };
  const credential_ref = await idOf(ask(gateway, token, "/v1/credentials", credential));
  const upstream_url = "http://127.0.0.1:9/";
  const failing = await idOf(ask(gateway, token, "/v1/agents", { name: "a", upstream_url, credential_ref }));
  const unreachable = await idOf(ask(gateway, token, "/v1/agents", { name: "b", upstream_url }));
  const headers = {
    authorization: `Bearer ${token}`,
    "x-request-id": "r".repeat(128),
    "x-service-model": "m".repeat(250),
  };
  const send = async (path: string, init: RequestInit = {}) =>
    void (await fetch(`${gateway.url}${path}`, { headers, ...init }));
  const post = { method: "POST", body: LONG, headers: { ...headers, prefer: "wait=10" } };
  const requests: (() => Promise<void>)[] = [
    () => send(`/v1/agents/${LONG}`),
    () => send("/v1/agents", { ...post, headers: { ...headers, "content-type": "application/json" } }),
    () => send(`/v1/proxy/${failing}`, post),
    () => send(`/v1/proxy/${failing}/stream`, post),
    () => send(`/v1/proxy/${unreachable}`, post),
    () => send(`/v1/proxy/${unreachable}/stream`, post),
    () => send(`/v1/proxy/${unreachable}`, { ...post, headers: { ...post.headers, "x-payment": LONG } }),
    () => send(`/v1/invocations?model=${LONG}`),
  ];
  // A busy machine holds up the event loop, which says so in lines of its own.
  const linesOf = () =>
    gateway
      .log()
      .split("\n")
      .filter((line) => !line.includes('"event_loop_blocked"'));
  for (const request of requests) {
    const before = linesOf().length;
    await Promise.all(Array.from({ length: TIMES }, request));
    // The log is written a moment later; what follows has come when this line has.
    await send(`/v1/agents/mark-${before}`);
    await until(() => gateway.log().includes(`mark-${before}`));
    const lines = linesOf().slice(before);
    expect(lines.length).toBeGreaterThanOrEqual(TIMES);
    expect(lines.length).toBeLessThanOrEqual(TIMES * LINES_MAX + 2);
    expect(Math.max(...lines.map((line) => line.length))).toBeLessThan(CHARACTERS_MAX);
  }
  const from = linesOf().length;
  const startedAt = performance.now();
  await Promise.all(Array.from({ length: 200 }, () => send(`/v1/${LONG}`, { headers: { authorization: LONG } })));
  const seconds = Math.ceil((performance.now() - startedAt) / 1000);
  await until(() => gateway.log().includes("unauthenticated_requests"));
  expect(linesOf().length - from).toBeLessThanOrEqual(seconds * 21 + 2);
});

test("a terminal whose reader stops does not stop the gateway", async () => {
  // Stopped, it reads no more of the terminal that it made. The buffer of a terminal is full after some eighty lines.
  const inTerminal = `exec script -q -f -c "${tollgateBinary()} $*" /dev/null`;
  await using gateway = await startGateway({
    program: ["sh", "-c", inTerminal, "sh"],
    env: { TOLLGATE_LOG_FORMAT: "json" },
  });
  const token = await gateway.token({ tenant: "acme", user: "alice" });
  process.kill(gateway.pid, "SIGSTOP");
  try {
    const headers = { authorization: `Bearer ${token}` };
    for (let asked = 0; asked < 500; asked++) {
      const signal = AbortSignal.timeout(20_000);
      expect((await fetch(`${gateway.url}/v1/agents`, { headers, signal })).status).toBe(200);
    }
  } finally {
    process.kill(gateway.pid, "SIGCONT");
  }
});
