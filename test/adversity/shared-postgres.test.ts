// Gateways that share a Postgres: replicas that disagree about the time, one that is held up, and commits that are told
// late. Nobody's running calls are ended for it, and a call that was ended or refused is not made. What must not happen
// is watched for, so the tests wait side by side.
import { expect, setDefaultTimeout, test } from "bun:test";
import { PRICING, pay } from "../contract/priced.ts";
import { collected } from "../support/chain/facilitator-stand-in.ts";
import type { Answer, PayingTenant } from "../support/chain/paying.ts";
import type { Gateway } from "../support/gateway/gateway.ts";
import { openReplicas, type Replicas } from "../support/gateway/replicas.ts";
import { type SteppedClock, steppedClock } from "../support/gateway/stepped-clock.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";
import { delayCommits, holdTable } from "../support/stores/database-faults.ts";
import { invocationOf } from "../support/stores/owed-calls.ts";
import { until } from "../support/until.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const HOUR_MS = 3_600_000;
/** A replica looks for those that are gone when it has been there itself for as long as a lease holds. */
const LEASE_MS = 15_000;
const STILL_MS = 20_000;
/** A lease is renewed in it, and looked at more than once. */
const WATCHED_MS = 7_000;

async function calledThrough(gateway: Gateway, headers: Readonly<Record<string, string>>, id: string) {
  const post = (suffix: string) =>
    fetch(`${gateway.url}/v1/proxy/${id}${suffix}`, { method: "POST", headers, body: "{}" });
  const streamed = post("/stream");
  const { invocation_id } = (await (await post("")).json()) as { invocation_id: string };
  return { streamed, invocation_id };
}

/** What becomes of the running calls of replicas with these clocks, one of each path, when this is done to them. */
async function runningCalls(
  clocks: readonly (SteppedClock | null)[],
  act: (gateways: readonly Gateway[]) => Promise<void> | void,
): Promise<unknown> {
  await using replicas = await openReplicas();
  const answers = Promise.withResolvers<void>();
  const arrived = Promise.withResolvers<void>();
  let arrivals = 0;
  const upstream = startUpstream(async () => {
    if (++arrivals === 2 * clocks.length) arrived.resolve();
    await answers.promise;
    return Response.json({ hello: "world" });
  });
  try {
    const gateways: Gateway[] = [];
    for (const clock of clocks) gateways.push(await replicas.start({ ...clock }));
    const startedAt = performance.now();
    const tenant = await replicas.tenant(gateways[0] as Gateway);
    const id = await tenant.agent({ upstream_url: upstream.url });
    const calls = await Promise.all(gateways.map((gateway) => calledThrough(gateway, tenant.headers, id)));
    await arrived.promise;
    await Bun.sleep(LEASE_MS - (performance.now() - startedAt));
    await act(gateways);
    await Bun.sleep(WATCHED_MS);
    answers.resolve();
    return await Promise.all(
      calls.map(async ({ streamed, invocation_id }) => [
        await streamed.then(
          ({ status }) => status,
          () => "broken off",
        ),
        (await tenant.poll(id, invocation_id)).status,
      ]),
    );
  } finally {
    await upstream.stop();
  }
}

const UNHARMED = [200, "succeeded"];

test.concurrent("a running call goes on though the clock of its only replica is set 20 s ahead", async () => {
  const clock = steppedClock();
  expect(await runningCalls([clock], () => clock.set(20_000))).toEqual([UNHARMED]);
}, 150_000);

test.concurrent("running calls go on though the clock of one replica is set back by an hour", async () => {
  const clock = steppedClock();
  expect(await runningCalls([clock, null], () => clock.set(-HOUR_MS))).toEqual([UNHARMED, UNHARMED]);
}, 150_000);

test.concurrent("running calls go on though their replicas' clocks are 18 s apart, and then an hour", async () => {
  const clock = steppedClock(18_000);
  expect(await runningCalls([null, clock], () => clock.set(HOUR_MS))).toEqual([UNHARMED, UNHARMED]);
}, 150_000);

test.concurrent("running calls go on though all replicas stand still for longer than a lease", async () => {
  const standStill = async (gateways: readonly Gateway[]) => {
    for (const { pid } of gateways) process.kill(pid, "SIGSTOP");
    await Bun.sleep(STILL_MS);
    for (const { pid } of gateways) process.kill(pid, "SIGCONT");
  };
  expect(await runningCalls([null, null], standStill)).toEqual([UNHARMED, UNHARMED]);
}, 150_000);

/** Calls of an agent of which each replica may run two at a time, all through one: what becomes of them when that is lost. */
async function leftBehind(lose: (gateway: Gateway) => unknown, comeBack: (gateway: Gateway) => unknown): Promise<void> {
  await using replicas = await openReplicas();
  const held = Promise.withResolvers<void>();
  const made: number[] = [];
  const upstream = startUpstream(async (request) => {
    const { n } = (await request.json()) as { n: number };
    made.push(n);
    if (n < 2) await held.promise;
    return Response.json({ hello: "world" });
  });
  try {
    const env = { TOLLGATE_AGENT_CONCURRENCY: "4" };
    const other = await replicas.start({ env });
    const lost = await replicas.start({ env });
    const tenant = await replicas.tenant(other);
    const id = await tenant.agent({ upstream_url: upstream.url, emit_receipts: true });
    const call = async (n: number): Promise<string> => {
      const init = { method: "POST", headers: tenant.headers, body: JSON.stringify({ n }) };
      const response = await fetch(`${lost.url}/v1/proxy/${id}`, init);
      return ((await response.json()) as { invocation_id: string }).invocation_id;
    };
    const ids: string[] = [];
    for (let n = 0; n < 8; n++) ids.push(await call(n));
    await until(() => made.length >= 2);
    await lose(lost);
    const ends = () => Promise.all(ids.map(async (each) => (await tenant.send("GET", `/v1/invocations/${each}`)).body));
    for (const each of ids) while (!(await tenant.poll(id, each)).completed_at);
    const seen = await ends();
    const [ended, well] = [
      ["failed", "internal"],
      ["succeeded", null],
    ];
    expect(seen.map(({ status, error_class }) => [status, error_class])).toEqual([
      ended,
      ended,
      ...Array(6).fill(well),
    ]);
    held.resolve();
    await comeBack(lost);
    // What it has begun meanwhile changes nothing.
    expect(await tenant.poll(id, await call(8))).toMatchObject({ status: "succeeded" });
    expect(await ends()).toEqual(seen);
    expect(made.sort()).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8]);
    const receipts = await fetch(`${other.url}/v1/receipts`, { headers: tenant.headers });
    expect((await receipts.text()).trim().split("\n")).toHaveLength(9);
  } finally {
    held.resolve();
    await upstream.stop();
  }
}

test.concurrent(
  "what a killed replica ran ends once, and another one makes what it has left pending",
  () =>
    leftBehind(
      (gateway) => gateway.kill9(),
      (gateway) => gateway.restart(),
    ),
  150_000,
);

test.concurrent(
  "the same of a replica that stands still, which neither makes nor changes any of it when it goes on",
  () =>
    leftBehind(
      ({ pid }) => process.kill(pid, "SIGSTOP"),
      ({ pid }) => process.kill(pid, "SIGCONT"),
    ),
  150_000,
);

test.concurrent("a call that was ended while its replica was held up is not made when that goes on", async () => {
  await using replicas = await openReplicas();
  const made: string[] = [];
  const upstream = startUpstream((request) => {
    made.push(new URL(request.url).pathname);
    return Response.json({ hello: "world" });
  });
  try {
    const other = await replicas.start();
    const paused = await replicas.start();
    const tenant = await replicas.tenant(other);
    const secret = { auth_type: "bearer", source: "managed", plaintext: "upstream-secret-0001" };
    const { body: credential } = await tenant.send("POST", "/v1/credentials", {
      name: "upstream",
      ...secret,
    });
    const id = await tenant.agent({ upstream_url: `${upstream.url}first`, credential_ref: credential.id });
    const streaming = await tenant.agent({
      upstream_url: `${upstream.url}streamed`,
      credential_ref: credential.id,
    });
    const next = await tenant.agent({ upstream_url: `${upstream.url}next`, credential_ref: credential.id });
    const callPaused = async (agentId: string) => {
      const init = { method: "POST", headers: tenant.headers, body: "{}" };
      const response = await fetch(`${paused.url}/v1/proxy/${agentId}`, init);
      return ((await response.json()) as { invocation_id: string }).invocation_id;
    };
    // Their credential can't be read: the calls stay between their claim and their making.
    const release = await holdTable(replicas.databaseUrl, "credentials");
    const invocation = await callPaused(id);
    const streamed = fetch(`${paused.url}/v1/proxy/${streaming}/stream`, {
      method: "POST",
      headers: tenant.headers,
      body: "{}",
    });
    const total = async (query: string) => (await tenant.send("GET", `/v1/invocations?${query}`)).body.total as number;
    await until(async () => (await total("status=running")) >= 2);
    process.kill(paused.pid, "SIGSTOP");
    expect(await tenant.poll(id, invocation, 40)).toMatchObject({
      status: "failed",
      error_class: "internal",
    });
    await until(async () => (await total("error_class=internal")) >= 2);
    await release();
    process.kill(paused.pid, "SIGCONT");
    expect((await streamed).status).not.toBe(200);
    // A call that comes to it later is made.
    expect((await tenant.poll(next, await callPaused(next), 20)).status).toBe("succeeded");
    // Longer than any pause before the credential is read again.
    await Bun.sleep(1_000);
    expect(made).toEqual(["/next"]);
  } finally {
    await upstream.stop();
  }
}, 150_000);

/** The gateway waits for 9 s, and looks once more. */
const LATE_SECONDS = 10.5;

interface Calls {
  readonly replicas: Replicas;
  readonly tenant: PayingTenant;
  readonly upstream: Upstream;
}

interface Kind {
  readonly suffix?: "/stream";
  readonly priced?: true;
  readonly key?: string;
}

/** A call of an agent of its own, which can be sent again and again; its upstream knows it by its name. */
async function openCall({ tenant, upstream }: Calls, name: string, { suffix, priced, key }: Kind) {
  const pricing = priced ? PRICING : null;
  const id = await tenant.agent({ upstream_url: `${upstream.url}${name}`, pricing });
  const payment = await pay();
  const headers = { ...(key && { "idempotency-key": key }), ...(priced && payment.headers) };
  const send = () => tenant.send("POST", `/v1/proxy/${id}${suffix ?? ""}`, { n: 1 }, headers);
  return { id, name, suffix, nonce: payment.authorization.nonce, send };
}
type Call = Awaited<ReturnType<typeof openCall>>;

const asTold = (answer: Answer) => Bun.sleep(1000 * Number(answer.headers.get("retry-after")));

/** Has it paid for before anything is late. */
async function settle({ replicas, tenant }: Calls, call: Call): Promise<void> {
  replicas.facilitator.answer(call.nonce, () => new Response("away", { status: 500 }));
  const path = `/v1/invocations/${invocationOf(await call.send())}`;
  replicas.facilitator.answer(call.nonce, collected);
  await until(async () => (await tenant.send("GET", path)).body.settlement.status === "settled");
}

/** Sends it again until it is not refused any more; gives what became of it. */
async function comeBack(tenant: PayingTenant, call: Call): Promise<string> {
  for (;;) {
    const answer = await call.send();
    if (answer.status === 503) await asTold(answer);
    else if (answer.status === 202) return (await tenant.poll(call.id, invocationOf(answer))).status;
    else return answer.status === 200 ? "succeeded" : `${answer.status} ${answer.text}`;
  }
}

test.concurrent("a call that was refused for a commit that came late is never made, and can be sent again", async () => {
  const made: string[] = [];
  await using replicas = await openReplicas();
  const gateway = await replicas.start();
  const upstream = startUpstream((request) => {
    made.push(new URL(request.url).pathname.slice(1));
    return Response.json({ hello: "world" });
  });
  try {
    const tenant = await replicas.tenant(gateway);
    const calls = { replicas, tenant, upstream };
    const kinds: [string, Kind][] = [
      ["never sent again", {}],
      ["never sent again, streamed", { suffix: "/stream" }],
      ["sent again at once", { key: "k-1" }],
      ["sent again at once, streamed", { key: "k-2", suffix: "/stream" }],
      ["sent again", { key: "k-3" }],
      ["sent again, streamed", { key: "k-4", suffix: "/stream" }],
      ["paid", { priced: true }],
      ["paid, streamed", { priced: true, suffix: "/stream" }],
    ];
    // One after the other: of changes that come at once, a busy gateway refuses some.
    const refused: Call[] = [];
    for (const [name, kind] of kinds) refused.push(await openCall(calls, name.replaceAll(/\W+/g, "-"), kind));
    // Only its claim comes late, and is its caller's all the same.
    const kept = await openCall(calls, "kept", { priced: true, suffix: "/stream" });
    await settle(calls, kept);
    const ids = refused.map(({ id }) => id);
    const ends = [
      await delayCommits(replicas.databaseUrl, "insert", ids, LATE_SECONDS),
      await delayCommits(replicas.databaseUrl, "update", [kept.id], LATE_SECONDS),
    ];

    const claimed = kept.send();
    const answers = await Promise.all(refused.map(({ send }) => send()));
    await Promise.all(ends.map((end) => end()));
    expect(answers.map(({ status }) => status)).toEqual(refused.map(() => 503));

    const outcomes = await Promise.all(
      refused.map(async (call, i) => {
        if (call.name.startsWith("never")) return;
        if (!call.name.includes("at-once")) await asTold(answers[i] as Answer);
        return [call.name, await comeBack(tenant, call)];
      }),
    );
    // The records that came late and were claimed in the same write are given back, and then removed.
    const running = async () => (await tenant.send("GET", "/v1/invocations?status=running")).body.total;
    await until(async () => (await running()) === 0);
    const again = refused.filter(({ name }) => !name.startsWith("never"));
    expect({
      outcomes: outcomes.filter((outcome) => outcome !== undefined),
      kept: (await claimed).status,
      made: made.sort(),
    }).toEqual({
      outcomes: again.map(({ name }) => [name, "succeeded"]),
      kept: 200,
      made: ["kept", ...again.map(({ name }) => name)].sort(),
    });
  } finally {
    await upstream.stop();
  }
}, 150_000);

/** A second for what runs, and the fifteen that the units give besides: what takes longer is killed. It takes ten in all. */
const STOPPED_MS_MAX = 16_000;

test("a stop ends in time while the database is stuck, and a caller who has paid or waits learns its call's ID", async () => {
  await using replicas = await openReplicas();
  const gateway = await replicas.start({
    env: { TOLLGATE_DRAIN_MS: "1000", TOLLGATE_SETTLE_WAIT_MS: "20000" },
  });
  const tenant = await replicas.tenant(gateway);
  const gone = Promise.withResolvers<Response>();
  const upstream = startUpstream(() => gone.promise);
  try {
    const [free, priced] = [
      await tenant.agent({ upstream_url: upstream.url }),
      await tenant.agent({ upstream_url: upstream.url, pricing: PRICING }),
    ];
    const payment = await pay();
    replicas.facilitator.answer(payment.authorization.nonce, () => gone.promise);
    const paid = tenant.send("POST", `/v1/proxy/${priced}`, {}, payment.headers);
    const waits = tenant.send("POST", `/v1/proxy/${free}`, {}, { prefer: "wait=60" });
    await replicas.facilitator.arrival(payment.authorization.nonce);
    await until(async () => (await tenant.send("GET", "/v1/invocations?status=running")).body.total === 1);
    const release = await holdTable(replicas.databaseUrl, "open_invocations");
    const beganAt = performance.now();
    await gateway.stop();
    expect(performance.now() - beganAt).toBeLessThan(STOPPED_MS_MAX);
    await release();
    for (const answer of await Promise.all([paid, waits])) {
      expect(answer).toMatchObject({ status: 202, body: { invocation_id: expect.stringContaining("inv_") } });
    }
  } finally {
    gone.resolve(new Response());
    await upstream.stop();
  }
});
