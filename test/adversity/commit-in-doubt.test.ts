// The answer of an accept's commit is lost, and its record has landed all the same. What is decided of it must hold
// whatever comes between the steps of the decision: one slow statement, another caller, another replica.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { SQL } from "bun";
import { PRICING, pay } from "../contract/priced.ts";
import { collected } from "../support/chain/facilitator-stand-in.ts";
import type { PayingTenant } from "../support/chain/paying.ts";
import type { Gateway } from "../support/gateway/gateway.ts";
import { openReplicas, type Replicas } from "../support/gateway/replicas.ts";
import { type Relay, startRelay } from "../support/http/relay.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";
import { invocationOf } from "../support/stores/owed-calls.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const [COMMIT, REMOVAL, LEASE] = [4201, 4202, 4203];
/** Two sweeps and more. */
const WATCHED_MS = 6_000;

let replicas: Replicas;
let relay: Relay;
let gateway: Gateway;
let tenant: PayingTenant;
let upstream: Upstream;
const made: string[] = [];

beforeAll(async () => {
  replicas = await openReplicas();
  const url = new URL(replicas.databaseUrl);
  relay = startRelay(Number(url.port));
  url.port = `${relay.port}`;
  gateway = await replicas.start({ env: { DATABASE_URL: url.href } });
  tenant = await replicas.tenant(gateway);
  upstream = startUpstream((request) => {
    made.push(new URL(request.url).pathname);
    return Response.json({ hello: "world" });
  });
  await using client = new SQL(replicas.databaseUrl, { max: 1 });
  // Each waits until the test lets go of its lock; nobody holds it otherwise.
  for (const [name, key] of [
    ["commit", COMMIT],
    ["removal", REMOVAL],
    ["lease", LEASE],
  ])
    await client.unsafe(
      `create function fault_${name}() returns trigger language plpgsql
         as $$ begin perform pg_advisory_xact_lock_shared(${key}); return null; end $$`,
    );
  await client.unsafe(
    `create constraint trigger fault_commit after insert on open_invocations deferrable initially deferred
       for each row execute function fault_commit()`,
  );
  await client.unsafe(
    `create constraint trigger fault_lease after update on payments deferrable initially deferred
       for each row when (new.attempts > old.attempts) execute function fault_lease()`,
  );
  await client.unsafe(
    `create trigger fault_removal before delete on refused_calls for each statement execute function fault_removal()`,
  );
});
afterAll(async () => {
  await replicas?.[Symbol.asyncDispose]();
  relay?.stop();
  await upstream?.stop();
});

const pick = ({ facilitator_credential_ref }: { facilitator_credential_ref: string }) => ({
  facilitator_credential_ref,
});

/** A session of its own that holds something until it is told to let go. */
async function hold(statement: string) {
  const client = new SQL(replicas.databaseUrl, { max: 1 });
  const held = await client.reserve();
  await held.unsafe("begin");
  await held.unsafe(statement);
  return async () => {
    await held.unsafe("rollback");
    held.release();
    await client.close({ timeout: 0 });
  };
}
const holdKey = (key: number) => hold(`select pg_advisory_xact_lock(${key})`);

async function until(what: string, count = 1): Promise<void> {
  await using client = new SQL(replicas.databaseUrl, { max: 1 });
  for (;;) {
    const [row] = await client.unsafe(`select count(*)::int as n from ${what}`);
    if (row.n >= count) return;
    await Bun.sleep(3);
  }
}
const waitsFor = (key: number) => until(`pg_locks where locktype = 'advisory' and objid = ${key} and not granted`);
const NOTE_WAITS = "pg_locks where relation = 'refused_calls'::regclass and not granted";

/** The commit of this call lands, and its answer is lost; gives its answer, and what lets the note of it be removed. */
async function inDoubt<T>(agent: string, send: () => Promise<T>) {
  const landed = await holdKey(COMMIT);
  const removed = await holdKey(REMOVAL);
  const answer = send();
  await waitsFor(COMMIT);
  const noted = await hold("lock table refused_calls in share mode");
  relay.cut();
  await until(NOTE_WAITS);
  await landed();
  await until(`invocations where agent_id = '${agent}'`);
  await noted();
  await waitsFor(REMOVAL);
  return { answer, removed };
}

test("a call that was refused with 503 is not made, however late the removal of its note", async () => {
  const id = await tenant.agent({ upstream_url: `${upstream.url}refused` });
  const { answer, removed } = await inDoubt(id, () => tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }));
  const { status } = await answer;
  expect(status).toBe(503);
  // The note is written once more, where it still is.
  await Bun.sleep(500);
  await removed();
  await Bun.sleep(WATCHED_MS);
  expect(made.filter((path) => path === "/refused")).toEqual([]);
}, 150_000);

test("a call that was accepted is not removed by whoever comes between", async () => {
  const id = await tenant.agent({ upstream_url: `${upstream.url}accepted` });
  const send = () => tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }, { "idempotency-key": "k-1" });
  const { answer, removed } = await inDoubt(id, send);
  // Nobody can say yet what becomes of it.
  expect((await send()).status).toBe(503);
  expect((await answer).status).toBe(503);
  await removed();
  let again = await send();
  while (again.status === 503) again = await send();
  const answers = [again];
  const found = [];
  for (const each of answers) {
    const path = `/v1/proxy/${id}/invocations/${invocationOf(each)}`;
    found.push((await tenant.send("GET", path)).status);
  }
  expect(found).toEqual(answers.map(() => 200));
}, 150_000);

test("a payment is sent again at once, and buys its call, though the refused record of it has just appeared", async () => {
  const id = await tenant.agent({ upstream_url: `${upstream.url}again`, pricing: PRICING });
  const { headers } = await pay();
  const send = () => tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }, headers);
  const landed = await holdKey(COMMIT);
  const refused = send();
  await waitsFor(COMMIT);
  relay.cut();
  expect((await refused).status).toBe(503);
  await landed();
  await until(`invocations where agent_id = '${id}'`);
  const { status, text } = await send();
  expect([status, text]).toEqual([202, expect.stringContaining("invocation_id")]);
}, 150_000);

test("a payment that was leased without an answer has not left, so that a cancel still closes it", async () => {
  const { facilitator } = replicas;
  const away = startRelay(Number(new URL(facilitator.url).port));
  away.refuse();
  const { body: config } = await tenant.send("GET", "/v1/settlement/config");
  const settleBy = (facilitator_url: string) =>
    tenant.send("PATCH", "/v1/settlement/config", { ...pick(config), facilitator_url });
  try {
    expect((await settleBy(`https://127.0.0.1:${away.port}`)).status).toBe(200);
    const id = await tenant.agent({ upstream_url: `${upstream.url}leased`, pricing: PRICING });
    const { headers, authorization } = await pay();
    const leased = await holdKey(LEASE);
    // Nobody listens where the facilitator should be.
    const answer = await tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }, headers);
    expect(answer.status).toBe(202);
    await waitsFor(LEASE);
    relay.cut();
    await leased();
    const ofPayment = `payments where nonce = '${authorization.nonce.toLowerCase()}'`;
    await until(`${ofPayment} and attempts > 1`);
    away.restore();
    const invocation = invocationOf(answer);
    const cancelled = await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`);
    expect(cancelled.status).toBe(200);
    expect(facilitator.of(authorization.nonce).length).toBe(0);
    await until(`${ofPayment} and next_attempt_at is null`);
    const { settlement } = (await tenant.send("GET", `/v1/invocations/${invocation}`)).body;
    expect([settlement.status, facilitator.of(authorization.nonce).length]).toEqual(["settlement_failed", 0]);
  } finally {
    await settleBy(config.facilitator_url);
    away.stop();
  }
}, 150_000);

test("a call that was refused by a replica which has lost the database is not made by another one", async () => {
  await using _other = await replicas.start();
  const id = await tenant.agent({ upstream_url: `${upstream.url}elsewhere` });
  const landed = await holdKey(COMMIT);
  const answer = tenant.send("POST", `/v1/proxy/${id}`, { n: 1 });
  await waitsFor(COMMIT);
  relay.refuse();
  await landed();
  try {
    expect((await answer).status).toBe(503);
    await Bun.sleep(WATCHED_MS);
    expect(made.filter((path) => path === "/elsewhere")).toEqual([]);
  } finally {
    relay.restore();
  }
}, 150_000);

test("a payment that another replica has sent is not removed with the record of a refused call", async () => {
  const { facilitator } = replicas;
  await using _other = await replicas.start();
  const id = await tenant.agent({ upstream_url: `${upstream.url}sent`, pricing: PRICING });
  const { headers, authorization } = await pay();
  const answered = Promise.withResolvers<void>();
  facilitator.answer(authorization.nonce, async (call) => {
    await answered.promise;
    return collected(call);
  });
  const landed = await holdKey(COMMIT);
  const answer = tenant.send("POST", `/v1/proxy/${id}`, { n: 1 }, headers);
  await waitsFor(COMMIT);
  relay.refuse();
  try {
    await landed();
    expect((await answer).status).toBe(503);
    // The other replica finds it when its lease has run out, and sends it.
    await facilitator.arrival(authorization.nonce);
  } finally {
    relay.restore();
  }
  await until("refused_calls");
  await Bun.sleep(WATCHED_MS);
  answered.resolve();
  await Bun.sleep(WATCHED_MS);
  // The facilitator has collected it, so there is a record of it, and its call is made.
  const { data } = (await tenant.send("GET", `/v1/invocations?agent_id=${id}`)).body;
  expect({
    records: data.map((row: { status: string; settlement: { status: string } }) => [row.status, row.settlement.status]),
    made: made.filter((path) => path === "/sent").length,
  }).toEqual({ records: [["succeeded", "settled"]], made: 1 });
}, 150_000);
