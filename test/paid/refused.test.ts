// What the caller of a priced agent meets when the real facilitator will not collect: refusals that are definite end
// the call unpaid and uncalled; a facilitator that can't be spoken to leaves it pending until it can.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { openPayingTenant } from "../support/chain/paying.ts";
import { makePki } from "../support/http/pki.ts";
import {
  expectPending,
  expectServed,
  type PaidAgent,
  type PaidCall,
  type Services,
  startServices,
} from "../support/stores/paid-calls.ts";

/** More than every wait inside takes before it fails and says for what it waited. */
setDefaultTimeout(180_000);

let services: Services;
let agent: PaidAgent;
beforeAll(async () => {
  services = await startServices({ gatewayEnv: { TOLLGATE_LOG_LEVEL: "debug" } });
  agent = await services.open();
});
afterAll(() => services?.[Symbol.asyncDispose]());

/** A coarse 402 that asks for nothing, an invocation that failed for its settlement, no transfer and no call. */
async function expectDeclined(call: PaidCall): Promise<void> {
  const { chain, upstream } = services;
  const answer = await call.send();
  expect([answer.status, Object.keys(answer.body)]).toEqual([402, ["error"]]);
  expect(answer.headers.get("payment-required")).toBeNull();
  const { body } = await agent.tenant.send("GET", "/v1/invocations?limit=1");
  expect(body.data[0]).toMatchObject({
    status: "failed",
    error_class: null,
    payment_nonce: call.nonce,
    settlement: { status: "settlement_failed", attempts: 1 },
  });
  expect(body.data[0].settlement.reason).not.toContain("0x");
  expect(await chain.transfers({ from: call.payment.authorization.from })).toEqual([]);
  expect(upstream.of(call.nonce)).toEqual([]);
  expect((await call.send()).status).toBe(402);
}

test("a payer without the money is declined", async () => {
  const call = await agent.call();
  await services.chain.blacklist(call.payment.authorization.from);
  await expectDeclined(call);
});

test("a tenant whose account is disabled is declined; enabled again, it is served", async () => {
  const { facilitator } = services;
  await facilitator.run("account", "disable", "gateway");
  await expectDeclined(await agent.call());
  await facilitator.run("account", "enable", "gateway");
  const call = await agent.call();
  const answer = await call.send();
  expect(answer.status).toBe(202);
  await expectServed(services, call, answer.body.invocation_id);
});

test("a certificate that the facilitator does not know leaves the call pending; with the right one it is served", async () => {
  const { facilitator, gateway } = services;
  const { tenant } = agent;
  const { body: config } = await tenant.send("GET", "/v1/settlement/config");
  const path = `/v1/credentials/${config.facilitator_credential_ref}`;
  const { otherCa } = await makePki();
  const bundle = otherCa.cert + otherCa.key + facilitator.client.ca;
  expect((await tenant.send("PUT", path, { plaintext: bundle })).status).toBe(200);
  const call = await agent.call();
  const invocation_id = expectPending(await call.send());
  expect(await call.look(invocation_id)).toMatchObject({
    status: "pending",
    settlement: { status: "pending" },
  });
  expect((await call.send()).body.invocation_id).toBe(invocation_id);
  expect((await tenant.send("PUT", path, { plaintext: facilitator.client.bundle })).status).toBe(200);
  await expectServed(services, call, invocation_id);
  for (const key of [otherCa.key, facilitator.client.key]) {
    const secret = key.split("\n")[2] ?? key;
    expect(secret.length).toBeGreaterThan(30);
    expect(gateway.log() + facilitator.log()).not.toContain(secret);
    for (const open of ["/v1/credentials", path, "/v1/settlement/config"]) {
      expect((await tenant.send("GET", open)).text).not.toContain(secret.slice(-20));
    }
  }
});

test("an upstream that fails after the money has moved is told apart", async () => {
  const { chain, upstream } = services;
  const call = await agent.call();
  upstream.fail(call.nonce);
  const answer = await call.send();
  expect(answer.status).toBe(202);
  const view = await call.ended(answer.body.invocation_id);
  const [transfer] = await chain.transfers({ nonce: call.nonce });
  expect(view).toMatchObject({
    status: "failed",
    error_class: "upstream_5xx",
    settlement: { status: "settled_upstream_failed", tx_hash: transfer?.transaction_hash },
  });
  expect(upstream.of(call.nonce)).toHaveLength(1);
});

test("one payment for two tenants' agents, or two bodies, makes one call", async () => {
  const { facilitator, gateway } = services;
  const call = await agent.call();
  const first = await call.send();
  expect(first.status).toBe(202);
  const other = await openPayingTenant(gateway, facilitator);
  const { to, value } = call.payment.authorization;
  const pricing = { amount: value, asset: "USDC", network: "base", pay_to: to };
  const upstream_url = "http://127.0.0.1:9/";
  for (const [caller, id] of [
    [other, await other.agent({ upstream_url, pricing })],
    [agent.tenant, await agent.tenant.agent({ upstream_url, pricing })],
  ] as const) {
    const answer = await caller.send("POST", `/v1/proxy/${id}`, { call: 1 }, call.payment.headers);
    expect([answer.status, Object.keys(answer.body)]).toEqual([402, ["error"]]);
    expect(answer.headers.get("payment-required")).toBeNull();
  }
  await expectServed(services, call, first.body.invocation_id);
});
