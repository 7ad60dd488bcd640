// This version and a next one, whose schema only tests know, beside each other on one database, as in an upgrade that stops
// nothing: the old one has data and load, the new one starts beside it and brings the schema up to date, both serve, and the
// old one leaves.

import { expect, setDefaultTimeout, test } from "bun:test";
import { startChain } from "./support/chain/chain.ts";
import { startFacilitator } from "./support/chain/facilitator.ts";
import type { PayingTenant } from "./support/chain/paying.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { newMasterKey } from "./support/keys.ts";
import { createCallers } from "./support/load/callers.ts";
import { openLoadedTenant, startLoad } from "./support/load/tenant.ts";
import { startCountingUpstream } from "./support/load/upstream.ts";
import { disagreements, quietRecords } from "./support/load/verify.ts";
import { nextVersion } from "./support/stores/next-version.ts";
import { invocationOf } from "./support/stores/owed-calls.ts";
import { startPostgres } from "./support/stores/postgres.ts";
import { until } from "./support/until.ts";

/** All of both versions starts, also on a busy machine. */
setDefaultTimeout(180_000);

const LARGE = 50_000;

/** The same tenant's requests, to another gateway. */
function through({ url }: Gateway, { headers }: PayingTenant): PayingTenant["send"] {
  return async (method, path, json, more = {}) => {
    const body = json === undefined ? {} : { body: JSON.stringify(json) };
    const answer = await fetch(`${url}${path}`, { method, headers: { ...headers, ...more }, ...body });
    const text = await answer.text();
    return { status: answer.status, headers: answer.headers, text, body: text === "" ? undefined : JSON.parse(text) };
  };
}

/** What one gateway has written holds at the other. */
async function agree(
  one: PayingTenant["send"],
  other: PayingTenant["send"],
  { free, slow }: { free: string; slow: string },
) {
  const key = { "idempotency-key": crypto.randomUUID() };
  const call = (send: PayingTenant["send"], id: string, more = {}) => send("POST", `/v1/proxy/${id}`, { n: -1 }, more);
  const first = await call(one, free, key);
  const again = await call(other, free, key);
  expect([first.status, again.status, invocationOf(again)]).toEqual([202, 202, invocationOf(first)]);

  const running = invocationOf(await call(one, slow));
  const look = async () => (await other("GET", `/v1/invocations/${running}`)).body;
  await until(async () => (await look()).status === "running");
  expect((await other("POST", `/v1/proxy/${slow}/invocations/${running}/cancel`)).status).toBe(200);
  await until(async () => (await look()).error_class === "cancelled");

  const { id: agent } = (await one("POST", "/v1/agents", { name: `new ${running}` })).body;
  expect((await other("GET", `/v1/agents/${agent}`)).status).toBe(200);
  const rules = [{ action: "deny", match: { max_body_bytes: LARGE, tools: [`of ${running}`] } }];
  const put = await one("PUT", "/v1/policy", { default: "allow", on_error: "allow", rules });
  expect(put.status).toBe(200);
  expect((await other("GET", "/v1/policy")).body).toMatchObject({ version: put.body.version, rules });
  const denied = [{ action: "deny", match: { max_body_bytes: LARGE } }];
  expect((await one("PUT", "/v1/policy", { default: "allow", on_error: "allow", rules: denied })).status).toBe(200);
  const large = { n: -1, text: "x".repeat(LARGE) };
  await until(async () => (await other("POST", `/v1/proxy/${free}`, large)).status === 403);
}

test.concurrent("on Postgres both versions serve beside each other, and nothing is lost or done twice", async () => {
  await using stack = new AsyncDisposableStack();
  const chain = await startChain();
  stack.defer(() => chain.stop());
  const upstream = startCountingUpstream();
  stack.defer(() => upstream.stop());
  const server = await startPostgres();
  const program = nextVersion();
  const shared = { env: { DATABASE_URL: await server.freshDatabase() } };
  const settling = stack.use(await startFacilitator(chain, shared));
  const env = {
    DATABASE_URL: await server.freshDatabase(),
    TOLLGATE_MASTER_KEY: newMasterKey(),
  };
  const old = stack.use(await startGateway({ env }));
  const tenant = await openLoadedTenant({ gateway: old, facilitator: settling, upstream, chain });
  const gateways = [old];
  const callers = createCallers({ gateways, headers: tenant.headers });
  startLoad(callers, tenant);
  await callers.accepted(30);

  const settlingToo = stack.use(await startFacilitator(chain, { ...shared, program, beside: settling }));
  const added = stack.use(await startGateway({ env, program }));
  gateways.push(added);
  const other = await openLoadedTenant({ gateway: added, facilitator: settlingToo, upstream, chain });
  const others = createCallers({ gateways, headers: other.headers, firstNumber: 1_000_000 });
  startLoad(others, other);
  await Promise.all([callers.accepted(60), others.accepted(60)]);
  await agree(tenant.send, through(added, tenant), tenant.agents);
  await agree(through(added, tenant), tenant.send, tenant.agents);

  gateways.shift();
  await old.stop();
  await Promise.all([callers.accepted(20), others.accepted(20)]);
  await Promise.all([callers.stop(), others.stop()]);
  const transfers = await chain.transfers();
  const records = new Map([
    ...(await quietRecords({ send: through(added, tenant) })),
    ...(await quietRecords({ send: through(added, other) })),
  ]);
  const calls = [...callers.calls, ...others.calls];
  // What `agree` has cancelled was made by one call of no number.
  expect(disagreements({ calls, records, upstream, transfers }, { gatewaysDied: false })).toEqual([]);
});

test.concurrent("on SQLite the new version goes on where the old one was stopped, and the other way round", async () => {
  await using stack = new AsyncDisposableStack();
  const chain = await startChain();
  stack.defer(() => chain.stop());
  const upstream = startCountingUpstream(300);
  stack.defer(() => upstream.stop());
  const facilitator = stack.use(await startFacilitator(chain));
  // What waits for a place is left to the next one.
  const env = { TOLLGATE_AGENT_CONCURRENCY: "8" };
  const old = stack.use(await startGateway({ env }));
  const tenant = await openLoadedTenant({ gateway: old, facilitator, upstream, chain });
  const gateways = [old];
  const callers = createCallers({ gateways, headers: tenant.headers });
  startLoad(callers, tenant);
  await callers.accepted(50);
  const waiting = Array.from({ length: 30 }, () => callers.send({ kind: "keyed", agent: tenant.agents.slow }));
  await Promise.all(waiting);
  await old.stop();
  const there = { ...env, TOLLGATE_DATA_DIR: old.dataDir };
  const added = stack.use(await startGateway({ env: there, program: nextVersion() }));
  gateways.splice(0, 1, added);
  await callers.accepted(50);
  await callers.stop();
  const records = await quietRecords({ send: through(added, tenant) });
  const evidence = { calls: callers.calls, records, upstream, transfers: await chain.transfers() };
  expect(disagreements(evidence, { gatewaysDied: false })).toEqual([]);

  await added.stop();
  const back = stack.use(await startGateway({ env: there }));
  expect(back.log()).toContain('"database_is_newer"');
  expect(await quietRecords({ send: through(back, tenant) })).toEqual(records);
});
