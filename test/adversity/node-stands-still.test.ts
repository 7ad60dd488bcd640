// A node that answers, but stands still: a stand-in that tells what the real node would have said when it stopped.
import { afterEach, beforeEach, expect, setDefaultTimeout, test } from "bun:test";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../support/chain/rpc-relay.ts";
import { until } from "../support/until.ts";

setDefaultTimeout(120_000);

const VALUE = 10_000n;

let chain: TestChain;
let relay: RpcRelay;
let facilitator: Facilitator;
let freezing: ReturnType<typeof setInterval> | undefined;

beforeEach(async () => {
  chain = await startChain({ blockTimeSeconds: 1 });
  relay = await startRpcRelay(chain.url);
});
afterEach(async () => {
  thaw();
  await facilitator?.[Symbol.asyncDispose]();
  await relay?.stop();
  await chain?.stop();
});

async function freeze(): Promise<void> {
  const frozen = await chain.blockNumber();
  const lag = async () => relay.behind((await chain.blockNumber()) - frozen);
  await lag();
  freezing = setInterval(() => void lag().catch(() => {}), 100);
}

function thaw(): void {
  clearInterval(freezing);
  relay.heal();
}

async function payment() {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE);
  return signPayment(payer, { to: newPayer().address, value: VALUE });
}

test("payments settle through the second node when the first stands still, also of payers who were funded since and after a restart", async () => {
  facilitator = await startFacilitator(chain, { rpcUrls: [relay.url, chain.url] });
  expect((await facilitator.settle((await payment()).settleRequest)).body).toMatchObject({ success: true });
  await freeze();
  for (const restarts of [false, true]) {
    if (restarts) await facilitator.stop().then(() => facilitator.restart());
    const { settleRequest } = await payment();
    expect((await facilitator.settle(settleRequest)).body).toMatchObject({ success: true });
  }
  expect(facilitator.lines("rpc_endpoint_failed").length).toBeLessThan(12);
});

test("without a node whose blocks go on the facilitator is not ready, says so once, takes no new payment, and recovers by itself", async () => {
  facilitator = await startFacilitator(chain, { rpcUrls: [relay.url] });
  const isReady = async () => (await fetch(`${facilitator.openUrl}/healthz`)).ok;
  const { settleRequest: known } = await payment();
  expect((await facilitator.settle(known)).body).toMatchObject({ success: true });
  await freeze();
  await until(async () => !(await isReady()), 60_000);
  const { settleRequest } = await payment();
  expect(await facilitator.settle(settleRequest)).toMatchObject({ status: 503 });
  expect((await facilitator.settle(known)).body).toMatchObject({ success: true });
  expect(facilitator.lines("not_ready")).toMatchObject([{ reason: "no fresh block" }]);
  thaw();
  await until(isReady);
  expect((await facilitator.settle(settleRequest)).body).toMatchObject({ success: true });
});
