// What a gateway promises, in short, on each kind of Postgres: two replicas on an older version, behind a pooler, and
// where a transaction that others were in the way of is undone. The whole contract runs on the version of npm.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { PRICING, pay } from "../contract/priced.ts";
import { collected } from "../support/chain/facilitator-stand-in.ts";
import type { Json, PayingTenant } from "../support/chain/paying.ts";
import type { Gateway } from "../support/gateway/gateway.ts";
import { openReplicas, type Replicas } from "../support/gateway/replicas.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";
import { invocationOf } from "../support/stores/owed-calls.ts";
import { eachPostgres } from "../support/stores/postgres-kinds.ts";
import { until } from "../support/until.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const AT_ONCE = 40;
/** A second, two at most; the rest is for a busy machine. */
const BROKEN_OFF_MS_MAX = 10_000;

eachPostgres((kind) => {
  let replicas: Replicas;
  let first: Gateway;
  let second: Gateway;
  let tenant: PayingTenant;
  let upstream: Upstream;
  const made: string[] = [];
  const held = Promise.withResolvers<void>();
  const brokenOff = Promise.withResolvers<void>();

  beforeAll(async () => {
    replicas = await openReplicas(await kind.freshDatabase());
    [first, second] = await Promise.all([replicas.start(), replicas.start()]);
    tenant = await replicas.tenant(first);
    upstream = startUpstream(async (request) => {
      made.push(`${new URL(request.url).pathname} ${await request.text()}`);
      if (request.url.endsWith("/broken-off")) request.signal.addEventListener("abort", () => brokenOff.resolve());
      if (/\/(held|broken-off)$/.test(request.url)) await held.promise;
      return Response.json({ hello: "world" });
    });
  });
  afterAll(async () => {
    held.resolve();
    await upstream?.stop();
    await replicas?.[Symbol.asyncDispose]();
  });

  /** What the second replica answers to the same caller. */
  async function fromSecond(path: string, init: RequestInit = {}): Promise<Json> {
    const headers = { ...tenant.headers, ...(init.headers as Record<string, string>) };
    const response = await fetch(`${second.url}${path}`, { ...init, headers });
    return { status: response.status, text: await response.text(), headers: response.headers };
  }

  test.concurrent("calls to both replicas at once are each made once, recorded, and counted", async () => {
    const id = await tenant.agent({ upstream_url: `${upstream.url}many` });
    const path = `/v1/proxy/${id}`;
    const ids = await Promise.all(
      Array.from({ length: AT_ONCE }, async (_, n) => {
        if (n % 2 === 0) return invocationOf(await tenant.send("POST", path, { n }));
        return invocationOf(await fromSecond(path, { method: "POST", body: JSON.stringify({ n }) }));
      }),
    );
    const ends = await Promise.all(ids.map(async (each) => (await tenant.poll(id, each)).status));
    expect(ends).toEqual(Array(AT_ONCE).fill("succeeded"));
    const bodies = made.filter((call) => call.startsWith("/many ")).map((call) => call.slice("/many ".length));
    expect(bodies.sort()).toEqual(Array.from({ length: AT_ONCE }, (_, n) => JSON.stringify({ n })).sort());
    const page = JSON.parse((await fromSecond(`/v1/invocations?agent_id=${id}&limit=100`)).text);
    expect([page.total, page.data.map((row: Json) => row.id).sort()]).toEqual([AT_ONCE, ids.sort()]);
  });

  test.concurrent("of one idempotency key, sent at once to both replicas, one call is made", async () => {
    const id = await tenant.agent({ upstream_url: `${upstream.url}keyed` });
    const init = { method: "POST", body: JSON.stringify({ n: 1 }), headers: { "idempotency-key": "k-1" } };
    const answers = await Promise.all([
      ...Array.from({ length: 8 }, () => tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }, init.headers)),
      ...Array.from({ length: 8 }, () => fromSecond(`/v1/proxy/${id}`, init)),
    ]);
    expect(answers.map(({ status }) => status)).toEqual(Array(16).fill(202));
    const ids = new Set(answers.map(invocationOf));
    expect(ids.size).toBe(1);
    expect((await tenant.poll(id, [...ids][0] ?? "")).status).toBe("succeeded");
    expect(made.filter((call) => call.startsWith("/keyed "))).toHaveLength(1);
    expect((await tenant.send("POST", `/v1/proxy/${id}`, { n: 2 }, init.headers)).status).toBe(409);
  });

  test.concurrent("a running call is cancelled through the other replica, once", async () => {
    const id = await tenant.agent({ upstream_url: `${upstream.url}held` });
    const invocation = invocationOf(await tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }));
    await until(async () => (await tenant.poll(id, invocation, 0)).status === "running");
    const path = `/v1/proxy/${id}/invocations/${invocation}/cancel`;
    const answers = await Promise.all([tenant.send("POST", path), fromSecond(path, { method: "POST" })]);
    expect(answers.map(({ status }) => status).sort()).toEqual([200, 409]);
    expect(await tenant.poll(id, invocation)).toMatchObject({ status: "failed", error_class: "cancelled" });
  });

  test.concurrent("a call that is cancelled through the other replica is broken off where it runs, and who waits there learns it", async () => {
    const id = await tenant.agent({ upstream_url: `${upstream.url}broken-off` });
    const invocation = invocationOf(await tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }));
    await until(() => made.some((call) => call.startsWith("/broken-off ")));
    const waiting = tenant.poll(id, invocation, 60);
    const startedAt = performance.now();
    const path = `/v1/proxy/${id}/invocations/${invocation}/cancel`;
    expect((await fromSecond(path, { method: "POST" })).status).toBe(200);
    expect(await waiting).toMatchObject({ status: "failed", error_class: "cancelled" });
    await brokenOff.promise;
    expect(performance.now() - startedAt).toBeLessThan(BROKEN_OFF_MS_MAX);
  });

  test.concurrent("a payment whose first attempt got no answer is collected, and buys its call once", async () => {
    const id = await tenant.agent({ upstream_url: `${upstream.url}paid`, pricing: PRICING, emit_receipts: true });
    const { headers, authorization } = await pay();
    replicas.facilitator.answer(authorization.nonce, () => new Response("away", { status: 502 }));
    const send = () => tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }, headers);
    const [one, other] = await Promise.all([send(), send()]);
    expect([one.status, other.status, invocationOf(one)]).toEqual([202, 202, invocationOf(other)]);
    expect(one.body.invocation_id).toBe(invocationOf(one));
    replicas.facilitator.answer(authorization.nonce, collected);
    expect(await tenant.poll(id, invocationOf(one), 60)).toMatchObject({
      status: "succeeded",
      settlement: { status: "settled" },
    });
    expect(made.filter((call) => call.startsWith("/paid "))).toHaveLength(1);
    const receipt = await fromSecond(`/v1/invocations/${invocationOf(one)}/receipt`);
    expect([receipt.status, JSON.parse(receipt.text)]).toEqual([200, { receipt: expect.stringMatching(/^ey/) }]);
  });

  test.concurrent("receipts that both replicas make are one chain", async () => {
    const id = await tenant.agent({ upstream_url: `${upstream.url}receipts`, emit_receipts: true });
    const path = `/v1/proxy/${id}`;
    const ids = await Promise.all(
      Array.from({ length: 12 }, async (_, n) => {
        if (n % 2 === 0) return invocationOf(await tenant.send("POST", path, { n }));
        return invocationOf(await fromSecond(path, { method: "POST", body: JSON.stringify({ n }) }));
      }),
    );
    await Promise.all(ids.map((each) => tenant.poll(id, each)));
    const { text } = await fromSecond("/v1/receipts?limit=100");
    const file = `${first.dataDir}-receipts.jsonl`;
    await Bun.write(file, text);
    const jwks = `${first.url}/.well-known/jwks.json`;
    const verified = await second.run("receipt", "verify", file, "--jwks", jwks);
    expect([verified.code, verified.stderr]).toEqual([0, expect.any(String)]);
    expect(text.match(/\S+/g)?.length).toBeGreaterThanOrEqual(ids.length);
  });
});
