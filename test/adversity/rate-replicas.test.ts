// Rate limits of gateways that share a Postgres: as many calls are let in as one gateway would let in, whichever of them the
// calls come to, and whatever becomes of the others.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { SQL } from "bun";
import type { PayingTenant } from "../support/chain/paying.ts";
import type { Gateway } from "../support/gateway/gateway.ts";
import { openReplicas, type Replicas } from "../support/gateway/replicas.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";
import { holdTable } from "../support/stores/database-faults.ts";
import { missingPgBouncer, startPgBouncer } from "../support/stores/pgbouncer.ts";
import { startDurablePostgres, startPostgres } from "../support/stores/postgres.ts";
import { until } from "../support/until.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

/** A token in a quarter of an hour: no test sees one come in. */
const HARDLY = { invocation_rate_limit: 0.001 };

let replicas: Replicas;
let gateways: readonly Gateway[];
let upstream: Upstream;
beforeAll(async () => {
  upstream = startUpstream(() => Response.json({ hello: "world" }));
  replicas = await openReplicas();
  gateways = [await replicas.start(), await replicas.start()];
});
afterAll(async () => {
  await replicas[Symbol.asyncDispose]();
  await upstream.stop();
});

interface Limited {
  readonly tenant: PayingTenant;
  readonly id: string;
}

/** An agent with these fields, of a tenant of its own. */
async function limited(at: Pick<Replicas, "tenant">, gateway: Gateway, fields: object): Promise<Limited> {
  const tenant = await at.tenant(gateway);
  const id = await tenant.agent({ upstream_url: upstream.url });
  await patch({ tenant, id }, fields);
  return { tenant, id };
}

async function patch({ tenant, id }: Limited, fields: object): Promise<void> {
  expect((await tenant.send("PATCH", `/v1/agents/${id}`, fields)).status).toBe(200);
}

async function call({ tenant, id }: Limited, gateway: Gateway, suffix = ""): Promise<Response> {
  const response = await fetch(`${gateway.url}/v1/proxy/${id}${suffix}`, {
    method: "POST",
    headers: tenant.headers,
    body: "{}",
  });
  await response.arrayBuffer();
  return response;
}

/** So many calls, by turns at each of the gateways. */
function calls(agent: Limited, count: number, at = gateways): Promise<Response[]> {
  return Promise.all(Array.from({ length: count }, (_, i) => call(agent, at[i % at.length] as Gateway)));
}

/** How many there are of each status. */
function statuses(answers: readonly Response[]): Record<number, number> {
  const counted: Record<number, number> = {};
  for (const { status } of answers) counted[status] = (counted[status] ?? 0) + 1;
  return counted;
}

test("a gateway that stands still keeps nobody from its tokens, and takes no more than were there", async () => {
  const [first, second] = gateways as [Gateway, Gateway];
  const agent = await limited(replicas, second, { ...HARDLY, invocation_burst: 300 });
  const atFirst: Promise<Response>[] = [];
  const atSecond: Promise<Response>[] = [];
  for (let round = 0; round < 5; round++) {
    const now = Array.from({ length: 40 }, () => call(agent, first));
    atFirst.push(...now);
    atSecond.push(...Array.from({ length: 40 }, () => call(agent, second)));
    if (round % 2 === 0) await Promise.race(now);
    process.kill(first.pid, "SIGSTOP");
    try {
      atSecond.push(...Array.from({ length: 20 }, () => call(agent, second)));
      await Promise.all(atSecond);
    } finally {
      process.kill(first.pid, "SIGCONT");
    }
  }
  // A call that waits behind a transaction of the gateway that stands still is told so after nine seconds, with its token taken.
  const { 202: made = 0, 503: late = 0, ...others } = statuses(await Promise.all([...atFirst, ...atSecond]));
  expect([made + late, others]).toEqual([300, { 429: 200 }]);
  expect(late).toBeLessThan(100);
});

test.concurrent("two gateways let in what one bucket holds, and a PATCH fills it once for both", async () => {
  const [first, second] = gateways as [Gateway, Gateway];
  const agent = await limited(replicas, first, { ...HARDLY, invocation_burst: 26 });
  const answers = await calls(agent, 100);
  expect(statuses(answers)).toEqual({ 202: 26, 429: 74 });
  expect(answers.find(({ status }) => status === 429)?.headers.get("retry-after")).toBe("60");
  expect(statuses(await calls(agent, 20))).toEqual({ 429: 20 });

  await patch(agent, { invocation_burst: 30 });
  // The other one knows of it within two seconds. Until then it goes on refusing.
  await until(async () => (await call(agent, second)).status !== 429);
  expect(statuses(await calls(agent, 100))).toEqual({ 202: 29, 429: 71 });
  expect((await agent.tenant.send("GET", "/v1/invocations")).body.total).toBe(26 + 30);
});

test.concurrent("whoever waits as told is let in, at whichever gateway", async () => {
  const [first, second] = gateways as [Gateway, Gateway];
  const agent = await limited(replicas, first, { invocation_rate_limit: 1, invocation_burst: 1 });
  expect((await call(agent, first)).status).toBe(202);
  for (const gateway of [second, first, second]) {
    const refused = await call(agent, gateway);
    // On a busy machine the second may be over.
    if (refused.status === 202) continue;
    expect([refused.status, refused.headers.get("retry-after")]).toEqual([429, "1"]);
    await Bun.sleep(1_000);
    expect((await call(agent, gateway)).status).toBe(202);
  }
});

test.concurrent("the calls of a minute at two gateways, on both paths, are one caller's rate", async () => {
  const [first] = gateways as [Gateway];
  const agent = await limited(replicas, first, {});
  const rules = [{ action: "deny", match: { rate_per_min: 25 } }];
  await agent.tenant.send("PUT", "/v1/policy", { default: "allow", on_error: "deny", rules });
  const [polled, streamed] = await Promise.all([
    calls(agent, 40),
    Promise.all(Array.from({ length: 40 }, (_, i) => call(agent, gateways[i % 2] as Gateway, "/stream"))),
  ]);
  const { 200: ok = 0, 202: accepted = 0, 403: denied = 0, ...others } = statuses([...polled, ...streamed]);
  expect([ok + accepted, denied, others]).toEqual([25, 55, {}]);
  // Denied ones count, and another agent has a rate of its own.
  expect(statuses(await calls(agent, 4))).toEqual({ 403: 4 });
  const id = await agent.tenant.agent({ upstream_url: upstream.url });
  expect(statuses(await calls({ ...agent, id }, 30))).toEqual({ 202: 25, 403: 5 });
});

test.concurrent("a rule on the rate judges by the minute before it, as the gateway has seen it", async () => {
  const [first] = gateways as [Gateway];
  const agent = await limited(replicas, first, {});
  expect(statuses(await calls(agent, 10, [first]))).toEqual({ 202: 10 });
  const rules = [{ action: "deny", match: { rate_per_min: 12 } }];
  await agent.tenant.send("PUT", "/v1/policy", { default: "allow", on_error: "deny", rules });
  expect(statuses(await calls(agent, 10, [first]))).toEqual({ 202: 2, 403: 8 });
});

test.concurrent("a gateway that is killed and starts again has no bucket of its own", async () => {
  const [, other] = gateways as [Gateway, Gateway];
  await using killed = await replicas.start();
  const agent = await limited(replicas, other, { ...HARDLY, invocation_burst: 100 });
  const atKilled = Array.from({ length: 100 }, () => call(agent, killed).catch(() => null));
  const atOther = calls(agent, 40, [other]);
  await Promise.race(atKilled);
  await killed.kill9();
  await Promise.all([...atKilled, atOther]);
  expect(statuses(await calls(agent, 110, [other]))[429]).toBeGreaterThanOrEqual(50);
  const made = async () => (await agent.tenant.send("GET", "/v1/invocations")).body.total;
  const before = await made();
  expect(before).toBeLessThanOrEqual(100);
  await killed.restart();
  expect(statuses(await calls(agent, 20, [killed, other]))).toEqual({ 429: 20 });
  expect(await made()).toBe(before);
});

test.concurrent("calls that can't be counted in time are refused, or let pass by on_error, and others go on", async () => {
  await using own = await openReplicas();
  const gateway = await own.start();
  const agent = await limited(own, gateway, { ...HARDLY, invocation_burst: 3 });
  const free = await limited(own, gateway, {});
  const judged = await Promise.all(
    ["deny", "allow"].map(async (on_error) => {
      const one = await limited(own, gateway, {});
      const rules = [{ action: "warn", match: { rate_per_min: 5 } }];
      await one.tenant.send("PUT", "/v1/policy", { default: "allow", on_error, rules });
      return one;
    }),
  );
  const release = await Promise.all([
    holdTable(own.databaseUrl, "agent_buckets"),
    holdTable(own.databaseUrl, "caller_rates"),
  ]);
  const waiting = Promise.all([agent, ...judged].map((one) => call(one, gateway)));
  expect(statuses(await calls(free, 10, [gateway]))).toEqual({ 202: 10 });
  const answers = (await waiting).map(({ status, headers }) => [status, headers.get("retry-after")]);
  expect(answers).toEqual([
    [503, "5"],
    [503, "5"],
    [202, null],
  ]);
  for (const letGo of release) await letGo();
  // The server may have come to the question whose answer nobody waited for: that token is gone.
  expect(statuses(await calls(agent, 5, [gateway]))[202]).toBeOneOf([2, 3]);
});

test.concurrent.skipIf(missingPgBouncer() !== null)("through PgBouncer the bucket is the same", async () => {
  await using pooler = await startPgBouncer((await startPostgres()).port);
  await using pooled = await replicas.start({ env: { DATABASE_URL: pooler.through(replicas.databaseUrl) } });
  const pair = [pooled, gateways[0] as Gateway];
  const agent = await limited(replicas, pooled, { ...HARDLY, invocation_burst: 26 });
  expect(statuses(await calls(agent, 100, pair))).toEqual({ 202: 26, 429: 74 });
});

test.concurrent("a crash of the server fills no bucket", async () => {
  const url = await (await startDurablePostgres()).freshDatabase();
  await using own = await openReplicas(url);
  const pair = [await own.start(), await own.start()];
  const agent = await limited(own, pair[0] as Gateway, { ...HARDLY, invocation_burst: 5 });
  expect(statuses(await calls(agent, 20, pair))).toEqual({ 202: 5, 429: 15 });
  await crash(url);
  for (const gateway of pair) while ((await call(agent, gateway)).status === 503) await Bun.sleep(50);
  expect(statuses(await calls(agent, 40, pair))).toEqual({ 429: 40 });
});

/**
 * All processes of a server are ended when one of them is killed, and it begins again from its log. Returns when it has:
 * gateways go on for a while with what they know, and so do not tell.
 */
async function crash(url: string): Promise<void> {
  const connect = () => new SQL(url, { max: 1 });
  const [client, witness] = [connect(), connect()];
  const other = await witness.reserve();
  const [row] = await client`select pg_backend_pid() as pid`;
  process.kill(row.pid, "SIGKILL");
  const answers = (asked: Promise<unknown>) =>
    asked.then(
      () => true,
      () => false,
    );
  await until(async () => !(await answers(other.unsafe("select 1"))));
  await until(async () => {
    await using next = connect();
    return await answers(next.unsafe("select 1"));
  });
  for (const each of [client, witness]) await each.close({ timeout: 0 }).catch(() => {});
}
