// Blocks stop coming while a paid call waits for its settlement, for longer than anybody waits, and come again. The
// caller was never told that its payment failed nor asked for another one, pays once, and gets its call once.

import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import {
  expectPending,
  expectServed,
  type PaidAgent,
  type PaidCall,
  type Services,
  startServices,
} from "../support/stores/paid-calls.ts";
import { until } from "../support/until.ts";

/** More than every wait inside takes before it fails and says for what it waited. */
setDefaultTimeout(180_000);

const SEND = "eth_sendRawTransaction";

let services: Services;
let agent: PaidAgent;
beforeAll(async () => {
  services = await startServices({ facilitatorEnv: { TOLLGATE_INCLUSION_TIMEOUT_MS: "1500" } });
  agent = await services.open();
});
afterAll(() => services?.[Symbol.asyncDispose]());

const hashOf = ({ nonce }: PaidCall) => services.facilitator.payment(nonce)?.["transaction_hash"];

/** A busy facilitator may broadcast after the gateway has given up waiting. */
async function broadcastHashOf(call: PaidCall): Promise<string> {
  await until(async () => typeof hashOf(call) === "string");
  return String(hashOf(call));
}

/** Sends the call while no block is made, and what it must look like then. */
async function expectOpen(call: PaidCall): Promise<string> {
  const id = expectPending(await call.send());
  expect(await call.look(id)).toMatchObject({ status: "pending", settlement: { status: "pending" } });
  expect(services.upstream.of(call.nonce)).toEqual([]);
  return id;
}

async function expectSettledOnce(call: PaidCall, id: string, hash: unknown): Promise<void> {
  const { settlement } = await expectServed(services, call, id);
  expect(settlement.tx_hash).toBe(hash);
}

/** Blocks stop, a call comes and is asked for again in every way, blocks come again. */
async function expectPatience(): Promise<void> {
  const { chain, relay } = services;
  const call = await agent.call();
  await chain.pauseMining();
  const before = relay.count(SEND);
  const id = await expectOpen(call);
  const hash = await broadcastHashOf(call);
  expect(hash).toMatch(/^0x[0-9a-f]{64}$/);
  // Whoever asks again in the meantime gets the same call, and no demand.
  const replays = await Promise.all([call.send(), call.send(), call.send()]);
  expect(replays.map(({ status, body }) => [status, body.invocation_id])).toEqual(Array(3).fill([202, id]));
  // Until the gateway has asked again in the background, too.
  await until(async () => (await call.look(id)).settlement.attempts >= 2);
  expect(hashOf(call)).toBe(hash);
  await chain.resumeMining();
  await expectSettledOnce(call, id, hash);
  const sent = relay.params(SEND).slice(before);
  expect(new Set(sent.map(([raw]) => raw)).size).toBe(1);
}

test(
  "a payment is pending when the facilitator gives up waiting first, and settled when blocks come again",
  expectPatience,
);

test("a payment is settled with the hash of the first broadcast though both processes end in between", async () => {
  const { chain, facilitator, gateway } = services;
  const call = await agent.call();
  await chain.pauseMining();
  const id = await expectOpen(call);
  const hash = await broadcastHashOf(call);
  await Promise.all([facilitator.stop(), gateway.stop()]);
  await Promise.all([facilitator.restart(), gateway.restart()]);
  const replay = await call.send();
  expect([replay.status, replay.body.invocation_id]).toEqual([202, id]);
  await chain.resumeMining();
  await expectSettledOnce(call, id, hash);
});

test("a payment whose time runs out unmined is refused only when it can't land any more", async () => {
  const { chain } = services;
  const call = await agent.call({ validBefore: Math.floor(Date.now() / 1000) + 8 });
  await chain.pauseMining();
  const id = await expectOpen(call);
  const { nonce } = call;
  const { validBefore } = call.payment.authorization;
  while (Date.now() / 1000 < Number(validBefore)) {
    expect((await call.look(id)).status).toBe("pending");
    await Bun.sleep(250);
  }
  // Without a block whose time is past its end nothing is certain, whatever the clock says.
  expect((await call.look(id)).settlement).toMatchObject({ status: "pending" });
  await chain.resumeMining();
  await chain.mine();
  const view = await call.ended(id);
  expect(view).toMatchObject({
    status: "failed",
    error_class: null,
    settlement: { status: "settlement_failed" },
  });
  expect(await chain.transfers({ nonce })).toEqual([]);
  expect(services.upstream.of(nonce)).toEqual([]);
  expect((await call.send()).status).toBe(402);
});

test("a payment is pending when the gateway gives up waiting first, and settled when blocks come again", async () => {
  await Promise.all([services.facilitator.stop(), services.gateway.stop()]);
  await services.facilitator.restart({ TOLLGATE_INCLUSION_TIMEOUT_MS: "15000" });
  await services.gateway.restart({ TOLLGATE_SETTLE_WAIT_MS: "1000" });
  await expectPatience();
});
