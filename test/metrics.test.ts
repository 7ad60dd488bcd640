// The metrics of a gateway, as Prometheus reads them from its own port: which there are, that each thing is counted once,
// and that the port stands whatever comes to it.

import { describe, expect, test } from "bun:test";
import { connect } from "node:net";
import { SQL } from "bun";
import { MAX } from "../src/kernel/limits.ts";
import { ask, idOf } from "./support/gateway/api.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { runCommand, temporaryRoot } from "./support/gateway/process.ts";
import { openReplicas } from "./support/gateway/replicas.ts";
import { startRelay } from "./support/http/relay.ts";
import { startUpstream } from "./support/http/upstream.ts";
import { newMasterKey } from "./support/keys.ts";
import { METRICS, metricsUrl, type Scrape, scrape, scrapeUntil } from "./support/metrics.ts";
import { startPostgres } from "./support/stores/postgres.ts";
import { until } from "./support/until.ts";

const TENANT = "acme-of-the-test";
const env = { TOLLGATE_METRICS_PORT: "0" };

/** Whose labels only come with what happens. A gateway has no wallets and asks no nodes. */
const EMPTY_AT_FIRST = ["tollgate_http_requests_total", "tollgate_wallet_balance_wei", "tollgate_rpc_errors_total"];

async function callerOf(gateway: Gateway) {
  const token = await gateway.token({ tenant: TENANT, user: "alice-of-the-test" });
  const call = (agent: string, headers: Record<string, string> = {}, path = "") =>
    fetch(`${gateway.url}/v1/proxy/${agent}${path}`, {
      method: "POST",
      headers: { authorization: `Bearer ${token}`, prefer: "wait=30", ...headers },
      body: "{}",
    });
  return {
    token,
    call,
    agent: (name: string, upstream_url: string, fields: object = {}) =>
      idOf(ask(gateway, token, "/v1/agents", { name, upstream_url, ...fields })),
    /** The ID of a call that is not waited for. */
    begin: async (agent: string) => {
      const response = await call(agent, { prefer: "respond-async" });
      return ((await response.json()) as { invocation_id: string }).invocation_id;
    },
  };
}

const ended = (found: Scrape, labels: Record<string, string> = {}) =>
  found.value("tollgate_invocations_ended_total", labels);

test("every name is there from the start, with its labels and zeros, and nothing without a name in the manual", async () => {
  await using gateway = await startGateway({ env });
  const response = await fetch(metricsUrl(gateway));
  expect(response.headers.get("content-type")).toBe("text/plain; version=0.0.4; charset=utf-8");
  const found = await scrape(gateway);
  const own = [...found.types].filter(([name]) => name.startsWith("tollgate_"));
  expect(Object.fromEntries(own)).toEqual(
    Object.fromEntries(Object.entries(METRICS).map(([name, [type]]) => [name, type])),
  );
  for (const [name, [type, ...labels]] of Object.entries(METRICS)) {
    const sampled = type === "histogram" ? `${name}_bucket` : name;
    const shown = new Set(
      found.samples
        .filter((sample) => sample.name === sampled)
        .map((sample) => Object.keys(sample.labels).sort().join()),
    );
    if (!EMPTY_AT_FIRST.includes(name)) expect([name, ...shown]).toEqual([name, labels.sort().join()]);
  }
  const ends = found.samples.filter(({ name }) => name === "tollgate_invocations_ended_total");
  expect([ends.length, ended(found)]).toEqual([18, 0]);
  expect(found.value("tollgate_upstream_duration_seconds_bucket", { le: "300" })).toBe(0);
  expect(found.value("tollgate_http_request_duration_seconds_count", { route: "/v1/proxy/{id}" })).toBe(0);
  expect(found.value("tollgate_accepted_total")).toBe(0);
  expect(found.value("process_resident_memory_bytes")).toBeGreaterThan(10_000_000);
  expect(found.value("process_cpu_seconds_total")).toBeGreaterThan(0);
  expect(found.value("tollgate_build_info")).toBe(1);
});

test("calls, requests and decisions are counted once each, by the template of their route, and name no tenant", async () => {
  await using gateway = await startGateway({ env });
  const upstream = startUpstream(({ url }) => {
    const status = Number(new URL(url).pathname.slice(1));
    return new Response(`answer ${status}`, { status });
  });
  const { token, call, agent } = await callerOf(gateway);
  const [good, bad, odd] = [
    await agent("good-agent", `${upstream.url}200`),
    await agent("bad-agent", `${upstream.url}404`),
    await agent("odd-agent", `${upstream.url}299`),
  ];
  const policy = { default: "allow", on_error: "deny", rules: [{ action: "deny", match: { agents: [odd] } }] };
  const put = (document: object) =>
    fetch(`${gateway.url}/v1/policy`, {
      method: "PUT",
      headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
      body: JSON.stringify(document),
    });
  await put(policy);
  expect((await call(odd)).status).toBe(403);
  await put({ ...policy, rules: [] });
  for (let times = 0; times < 3; times++) expect((await call(good, { "idempotency-key": "same" })).status).toBe(202);
  expect((await call(good)).status).toBe(202);
  expect((await call(bad)).status).toBe(202);
  expect((await call(odd, {}, "/stream")).status).toBe(299);
  expect((await call(bad, {}, "/stream")).status).toBe(404);
  const found = await scrapeUntil(gateway, (scraped) => ended(scraped) >= 5);
  expect(found.value("tollgate_accepted_total")).toBe(5);
  expect(ended(found, { mode: "transactional", status: "succeeded", error_class: "none" })).toBe(2);
  expect(ended(found, { mode: "transactional", status: "failed", error_class: "upstream_4xx" })).toBe(1);
  expect(ended(found, { mode: "streaming", status: "succeeded", error_class: "none" })).toBe(1);
  expect(ended(found, { mode: "streaming", status: "failed", error_class: "upstream_4xx" })).toBe(1);
  expect(ended(found)).toBe(5);
  expect(found.value("tollgate_upstream_duration_seconds_count")).toBe(5);
  const requests = (route: string, status: string) => found.value("tollgate_http_requests_total", { route, status });
  expect(requests("/v1/proxy/{id}", "202")).toBe(5);
  expect(requests("/v1/proxy/{id}", "403")).toBe(1);
  // No status that an upstream makes up has a series of its own.
  expect(requests("/v1/proxy/{id}/stream", "2xx")).toBe(1);
  expect(requests("/v1/agents", "201")).toBe(3);
  expect(found.value("tollgate_http_request_duration_seconds_count", { route: "/v1/proxy/{id}" })).toBe(6);
  expect(found.value("tollgate_payments_total")).toBe(0);
  const decisions = (action: string) => found.value("tollgate_policy_decisions_total", { action });
  // Two of the same key found their call before the policy was asked.
  expect([decisions("allow"), decisions("deny"), decisions("warn")]).toEqual([5, 1, 0]);
  for (const secret of [TENANT, "alice-of-the-test", "good-agent", good, "idempotency"]) {
    expect(found.text).not.toContain(secret);
  }
  await upstream.stop();
});

test("whatever is asked for, the series stay as many as there are routes", async () => {
  await using gateway = await startGateway({ env });
  const before = (await scrape(gateway)).samples.length;
  const paths = [
    "/nope",
    "/v1/nope",
    "/v1/agents/x",
    "/v1/agents/x/y",
    "/v1/proxy/%2e%2e/stream",
    "/v1/%61gents",
    "//",
  ];
  await Promise.all(
    Array.from({ length: 300 }, (_, at) =>
      fetch(`${gateway.url}${paths[at % paths.length]}${at}`, { method: at % 2 === 0 ? "GET" : `X${at}` }),
    ),
  );
  const found = await scrape(gateway);
  expect(found.value("tollgate_http_requests_total", { route: "other" })).toBeGreaterThan(100);
  const routes = new Set(found.samples.map(({ labels }) => labels["route"]));
  expect(routes.has("/v1/agents/{id}")).toBe(true);
  // Each of the routes that were met has a few statuses.
  expect(found.samples.length - before).toBeLessThan(20);
  expect([...routes].filter((route) => /\d/.test((route ?? "").replace("v1", "")))).toEqual([]);
});

test.concurrent("what waits and what runs is told while it does", async () => {
  await using gateway = await startGateway({ env: { ...env, TOLLGATE_AGENT_CONCURRENCY: "1" } });
  const gate = Promise.withResolvers<void>();
  const upstream = startUpstream(() => gate.promise.then(() => new Response("late")));
  const { agent, begin } = await callerOf(gateway);
  const [id, other] = [await agent("slow", upstream.url), await agent("slow-too", upstream.url)];
  for (const each of [id, id, id, other, other]) await begin(each);
  const held = await scrapeUntil(
    gateway,
    (found) => found.value("tollgate_queue_depth") === 3 && found.value("tollgate_queue_oldest_age_seconds") > 1,
  );
  expect(held.value("tollgate_running")).toBe(2);
  expect(held.value("tollgate_limit_used_ratio", { limit: "running_calls" })).toBe(2 / MAX.runningCalls);
  expect(held.value("tollgate_limit_used_ratio", { limit: "body_intake_bytes" })).toBe(0);
  gate.resolve();
  const after = await scrapeUntil(gateway, (found) => found.value("tollgate_queue_depth") === 0);
  expect(after.value("tollgate_queue_oldest_age_seconds")).toBe(0);
  await scrapeUntil(gateway, (found) => found.value("tollgate_running") === 0 && ended(found) === 5);
  await upstream.stop();
});

test.concurrent("of two replicas each counts what it ended, and the calls of one that died are counted once", async () => {
  await using replicas = await openReplicas();
  const gate = Promise.withResolvers<void>();
  const upstream = startUpstream(() => gate.promise.then(() => new Response("late")));
  const own = { ...env, TOLLGATE_AGENT_CONCURRENCY: "1" };
  const [first, second, third] = await Promise.all([1, 2, 3].map(() => replicas.start({ env: own })));
  if (first === undefined || second === undefined || third === undefined) throw new Error("no replicas");
  const { agent, begin } = await callerOf(first);
  const id = await agent("slow", upstream.url);
  for (let calls = 0; calls < 3; calls++) await begin(id);
  // All tell of the whole queue, and each of what it runs itself.
  const [, seen] = await Promise.all(
    [first, second].map((gateway) => scrapeUntil(gateway, (found) => found.value("tollgate_queue_depth") === 2)),
  );
  expect((await scrape(first)).value("tollgate_running")).toBe(1);
  expect(seen?.value("tollgate_running")).toBe(0);
  await first.kill9();
  // As its lease is a little later.
  await using sql = new SQL(replicas.databaseUrl, { max: 1 });
  await sql`update processes set lease_until = lease_until - 20000
    where id in (select owner from open_invocations where status = 'running')`;
  gate.resolve();
  const total = async (labels: Record<string, string>) =>
    ended(await scrape(second), labels) + ended(await scrape(third), labels);
  await until(async () => (await total({})) >= 3);
  expect(await total({ error_class: "internal" })).toBe(1);
  expect(await total({ status: "succeeded" })).toBe(2);
  await upstream.stop();
});

test.concurrent("while the database is away a scrape answers, and leaves out what nobody knows", async () => {
  const { freshDatabase } = await startPostgres();
  const url = new URL(await freshDatabase());
  const relay = startRelay(Number(url.port));
  url.port = `${relay.port}`;
  const key = newMasterKey();
  await using gateway = await startGateway({ env: { ...env, DATABASE_URL: url.href, TOLLGATE_MASTER_KEY: key } });
  expect((await scrape(gateway)).value("tollgate_queue_depth")).toBe(0);
  void relay.stall();
  const away = await scrapeUntil(gateway, (found) => Number.isNaN(found.value("tollgate_queue_depth")));
  expect(away.types.get("tollgate_queue_depth")).toBe("gauge");
  expect(away.value("tollgate_queue_oldest_age_seconds")).toBeNaN();
  expect(away.value("tollgate_accepted_total")).toBe(0);
  relay.restore();
  await scrapeUntil(gateway, (found) => found.value("tollgate_queue_depth") === 0);
  relay.stop();
});

test.concurrent("a pause of the event loop is told for a while", async () => {
  await using gateway = await startGateway({ env });
  expect((await scrape(gateway)).value("tollgate_event_loop_lag_seconds")).toBeGreaterThanOrEqual(0);
  process.kill(gateway.pid, "SIGSTOP");
  await Bun.sleep(700);
  process.kill(gateway.pid, "SIGCONT");
  await scrapeUntil(gateway, (found) => found.value("tollgate_event_loop_lag_seconds") > 0.6);
  // It does not begin anew with each reader.
  expect((await scrape(gateway)).value("tollgate_event_loop_lag_seconds")).toBeGreaterThan(0.6);
});

describe("the metrics port", () => {
  test("has GET and HEAD of one path, and stands readers that are many or slow", async () => {
    await using gateway = await startGateway({ env });
    const url = metricsUrl(gateway);
    const post = await fetch(url, { method: "POST", body: "x" });
    expect([post.status, post.headers.get("allow")]).toEqual([405, "GET, HEAD"]);
    expect((await fetch(new URL("/", url))).status).toBe(404);
    expect((await fetch(new URL("/healthz", url))).status).toBe(404);
    const head = await fetch(url, { method: "HEAD" });
    expect([head.status, await head.text()]).toEqual([200, ""]);
    const slow = await Promise.all(
      Array.from({ length: 100 }, () => {
        const { promise, resolve } = Promise.withResolvers<ReturnType<typeof connect>>();
        const socket = connect(Number(new URL(url).port), "127.0.0.1", () => {
          socket.pause();
          socket.write("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(4));
          resolve(socket);
        });
        socket.on("error", () => {});
        return promise;
      }),
    );
    const scrapes = await Promise.all(Array.from({ length: 100 }, () => scrape(gateway)));
    expect(scrapes.every((found) => found.value("tollgate_build_info") === 1)).toBe(true);
    expect((await fetch(`${gateway.url}/healthz`)).status).toBe(200);
    for (const socket of slow) socket.destroy();
  });

  test("has few connections, of which whoever floods it leaves some, and the main port all of its own", async () => {
    await using gateway = await startGateway({ env });
    const port = Number(new URL(metricsUrl(gateway)).port);
    let closed = 0;
    const silent = Array.from({ length: 300 }, () => {
      const socket = connect(port, "127.0.0.1");
      socket.on("error", () => {});
      return socket.on("close", () => closed++);
    });
    // Seven eighths of 256 are left to this address.
    await until(() => closed >= 300 - 224);
    expect((await fetch(`${gateway.url}/healthz`)).status).toBe(200);
    const { promise: answered, resolve } = Promise.withResolvers<string>();
    const other = connect({ port, host: "127.0.0.1", localAddress: "127.0.0.2" }, () =>
      other.write("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
    );
    other.once("data", (bytes) => resolve(String(bytes)));
    expect(await answered).toStartWith("HTTP/1.1 200");
    await until(() => gateway.log().includes('"event":"connections_refused"'));
    for (const socket of [...silent, other]) socket.destroy();
  });

  test("is not there unless it is set, and not on the main port", async () => {
    await using gateway = await startGateway();
    expect((await fetch(`${gateway.url}/metrics`)).status).toBe(404);
    expect(gateway.log()).not.toContain("metrics_listening");
  });

  test("that is taken, or is the main one, keeps the gateway from starting, and the problem names its variable", async () => {
    // Bun would share a port with whoever shares it too.
    const taken = Bun.serve({ hostname: "127.0.0.1", port: 0, reusePort: true, fetch: () => new Response("") });
    const start = (port: string, metrics: string) =>
      runCommand(["--mode", "gateway", "--port", port], {
        cwd: temporaryRoot(),
        env: { PATH: "/usr/bin:/bin", TOLLGATE_DATA_DIR: `${temporaryRoot()}/ports`, TOLLGATE_METRICS_PORT: metrics },
      });
    const used = await start("0", `${taken.port}`);
    expect([used.code, used.stderr]).toEqual([
      2,
      expect.stringContaining(
        `TOLLGATE_HOST and TOLLGATE_METRICS_PORT must be free to listen on: 127.0.0.1:${taken.port}`,
      ),
    ]);
    const same = await start("18999", "18999");
    expect([same.code, same.stderr]).toEqual([
      2,
      expect.stringContaining("TOLLGATE_METRICS_PORT must differ from the port of TOLLGATE_PORT"),
    ]);
    await taken.stop(true);
  });
});
