// Blocks stop coming while a paid call waits for its settlement, for longer than anybody waits, and come again. The
// caller was never told that its payment failed nor asked for another one, pays once, and gets its call once.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { type PaidCall, startWings, type Wings } from "../support/paying.ts";

setDefaultTimeout(60_000);

const SEND = "eth_sendRawTransaction";

let wings: Wings;
beforeAll(async () => {
  wings = await startWings({ facilitatorEnv: { TOLLGATE_INCLUSION_TIMEOUT_MS: "1500" } });
});
afterAll(() => wings?.stop());

const hashOf = ({ payment }: PaidCall) =>
  wings.facilitator.payment(payment.authorization.nonce)?.["transaction_hash"];

/** Sends the call while no block is made, and what it must look like then. */
async function expectPending(call: PaidCall): Promise<string> {
  const answer = await call.send();
  expect(answer.status).toBe(202);
  expect(answer.headers.get("x-payment-response")).toBeNull();
  const { invocation_id } = answer.body;
  expect(await call.view(invocation_id)).toMatchObject({
    status: "pending",
    settlement: { status: "pending" },
  });
  expect(call.arrivals()).toBe(0);
  return invocation_id;
}

async function expectSettledOnce(call: PaidCall, id: string, hash: unknown): Promise<void> {
  const view = await call.until(id, ({ status }) => status !== "pending" && status !== "running");
  expect(view).toMatchObject({ status: "succeeded", settlement: { status: "settled", tx_hash: hash } });
  expect(call.arrivals()).toBe(1);
  const { nonce } = call.payment.authorization;
  expect(await wings.chain.transfers({ nonce })).toMatchObject([{ transaction_hash: hash }]);
  expect(await wings.chain.transfers({ from: call.payment.authorization.from })).toHaveLength(1);
  const replay = await call.send();
  expect([replay.status, replay.body.invocation_id]).toEqual([202, id]);
  const told = JSON.parse(Buffer.from(replay.headers.get("x-payment-response") ?? "", "base64").toString());
  expect(told).toMatchObject({ success: true, transaction: hash });
}

/** Blocks stop, a call comes and is asked for again in every way, blocks come again. */
async function expectPatience(): Promise<void> {
  const { chain, relay } = wings;
  const call = await wings.paidCall();
  await chain.pauseMining();
  const before = relay.count(SEND);
  const id = await expectPending(call);
  const hash = hashOf(call);
  expect(hash).toMatch(/^0x[0-9a-f]{64}$/);
  // Whoever asks again in the meantime gets the same call, and no demand.
  const replays = await Promise.all([call.send(), call.send(), call.send()]);
  expect(replays.map(({ status, body }) => [status, body.invocation_id])).toEqual(Array(3).fill([202, id]));
  // Until the gateway has asked again in the background, too.
  await call.until(id, ({ settlement }) => settlement.attempts >= 2);
  expect(hashOf(call)).toBe(hash);
  await chain.resumeMining();
  await expectSettledOnce(call, id, hash);
  const sent = relay.params(SEND).slice(before);
  expect(new Set(sent.map(([raw]) => raw)).size).toBe(1);
}

test("the facilitator gives up waiting first: pending, and settled when blocks come again", expectPatience);

test("both processes end in between: settled with the hash of the first broadcast all the same", async () => {
  const { chain, facilitator, gateway } = wings;
  const call = await wings.paidCall();
  await chain.pauseMining();
  const id = await expectPending(call);
  const hash = hashOf(call);
  await Promise.all([facilitator.stop(), gateway.stop()]);
  await Promise.all([facilitator.restart(), gateway.restart()]);
  const replay = await call.send();
  expect([replay.status, replay.body.invocation_id]).toEqual([202, id]);
  await chain.resumeMining();
  await expectSettledOnce(call, id, hash);
});

test("a payment whose time runs out unmined is refused only when it can't land any more", async () => {
  const { chain } = wings;
  const call = await wings.paidCall({ validBefore: Math.floor(Date.now() / 1000) + 8 });
  await chain.pauseMining();
  const id = await expectPending(call);
  const { validBefore, nonce } = call.payment.authorization;
  while (Date.now() / 1000 < Number(validBefore)) {
    expect((await call.view(id)).status).toBe("pending");
    await Bun.sleep(250);
  }
  // Without a block whose time is past its end nothing is certain, whatever the clock says.
  expect((await call.view(id)).settlement).toMatchObject({ status: "pending" });
  await chain.resumeMining();
  await chain.mine();
  const view = await call.until(id, ({ status }) => status === "failed");
  expect(view).toMatchObject({ error_class: null, settlement: { status: "settlement_failed" } });
  expect(await chain.transfers({ nonce })).toEqual([]);
  expect(call.arrivals()).toBe(0);
  expect((await call.send()).status).toBe(402);
});

test("the gateway gives up waiting first: pending, and settled when blocks come again", async () => {
  await Promise.all([wings.facilitator.stop(), wings.gateway.stop()]);
  await wings.facilitator.restart({ TOLLGATE_INCLUSION_TIMEOUT_MS: "15000" });
  await wings.gateway.restart({ TOLLGATE_SETTLE_WAIT_MS: "1000" });
  await expectPatience();
});
