// Nodes that answer, and know less than others: stand-ins that tell what the real node would have said when it stopped, or
// leave something out.
import { expect, setDefaultTimeout, test } from "bun:test";
import { startChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { startRpcRelay } from "../support/chain/rpc-relay.ts";
import { until } from "../support/until.ts";

setDefaultTimeout(120_000);

const VALUE = 10_000n;

/** A chain, a stand-in for its node, and a facilitator that asks the stand-in first. */
async function openWorld({ hasSecondNode = true } = {}) {
  await using stack = new AsyncDisposableStack();
  const chain = await startChain({ blockTimeSeconds: 1 });
  stack.defer(() => chain.stop());
  const relay = await startRpcRelay(chain.url);
  stack.defer(() => relay.stop());

  async function payment() {
    const payer = newPayer();
    await chain.fundUsdc(payer.address, VALUE);
    return signPayment(payer, { to: newPayer().address, value: VALUE });
  }
  const opened = stack.move();
  return {
    chain,
    relay,
    payment,
    async start() {
      const rpcUrls = hasSecondNode ? [relay.url, chain.url] : [relay.url];
      return opened.use(await startFacilitator(chain, { rpcUrls }));
    },
    standStill: async () => relay.standStill(await chain.blockNumber()),
    /** The stand-in says that its newest blocks are so much older. */
    tellEarlierTimes(seconds: number): void {
      const earlier = (block: unknown) => {
        if (typeof block !== "object" || block === null || !("timestamp" in block)) return block;
        return { ...block, timestamp: `0x${(Number(block.timestamp) - seconds).toString(16)}` };
      };
      relay.on("eth_getBlockByNumber", { kind: "rewrite", rewrite: earlier });
    },
    async expectCollected(facilitator: Facilitator) {
      const { settleRequest, authorization } = await payment();
      expect((await facilitator.settle(settleRequest)).body).toMatchObject({ success: true });
      expect(await chain.transfers({ nonce: authorization.nonce })).toHaveLength(1);
    },
    [Symbol.asyncDispose]: () => opened.disposeAsync(),
  };
}

test.concurrent("payments settle through the second node when a stand-in for the first stands still, of payers who were funded since too, and after a restart", async () => {
  await using world = await openWorld();
  const { relay, payment, start, standStill, expectCollected } = world;
  const facilitator = await start();
  await expectCollected(facilitator);
  await standStill();
  await expectCollected(facilitator);
  const { settleRequest: funded } = await payment();
  await until(() => facilitator.lines("rpc_endpoint_failed").length > 0);
  expect((await facilitator.settle(funded)).body).toMatchObject({ success: true });
  expect(facilitator.lines("rpc_endpoint_failed")).toMatchObject([
    { level: "warn", endpoint: 0, error: "behind the others" },
  ]);
  await facilitator.stop();
  await facilitator.restart();
  await expectCollected(facilitator);
  relay.heal();
  await until(() => facilitator.lines("rpc_endpoint_recovered").length === 1);
  expect(facilitator.lines("not_ready")).toEqual([]);
});

const LEFT_OUT = [
  ["no receipts", "eth_getTransactionReceipt"],
  ["no blocks", "eth_getBlockByNumber"],
  ["no logs of the token and no receipts", "eth_getLogs"],
] as const;

test.concurrent.each(LEFT_OUT)(
  "payments settle through the second node when a stand-in for the first has %s",
  async (_, method) => {
    await using world = await openWorld();
    const { relay, start, expectCollected } = world;
    relay.on(method, { kind: "result", result: method === "eth_getLogs" ? [] : null });
    relay.on("eth_getTransactionReceipt", { kind: "result", result: null });
    const facilitator = await start();
    for (let payments = 0; payments < 3; payments++) await expectCollected(facilitator);
    expect(facilitator.lines("rpc_endpoint_failed").filter(({ level }) => level === "warn").length).toBeLessThan(2);
  },
);

test.concurrent("payments settle through the second node when a stand-in for the first lies behind by minutes", async () => {
  await using world = await openWorld();
  const { chain, relay, start, tellEarlierTimes, expectCollected } = world;
  await chain.mine(20);
  relay.behind(15);
  tellEarlierTimes(300);
  const facilitator = await start();
  for (let payments = 0; payments < 2; payments++) await expectCollected(facilitator);
  expect(facilitator.lines("rpc_endpoint_failed")).toMatchObject([{ endpoint: 0, error: "behind the others" }]);
});

test.concurrent("where blocks go on payments settle however old their times are by this machine's clock; without a node whose blocks go on the facilitator is not ready, says so once, takes no new payment, and recovers by itself", async () => {
  await using world = await openWorld({ hasSecondNode: false });
  const { relay, payment, start, standStill, tellEarlierTimes, expectCollected } = world;
  tellEarlierTimes(60);
  const facilitator = await start();
  const health = async () => {
    const answer = await fetch(`${facilitator.openUrl}/healthz`);
    return [answer.status, await answer.text()] as const;
  };
  const { settleRequest: known } = await payment();
  // The first block that is seen does not show yet that others come.
  await until(async () => (await facilitator.settle(known)).status === 200);
  expect((await facilitator.settle(known)).body).toMatchObject({ success: true });
  await expectCollected(facilitator);
  await standStill();
  // Nobody asks: the facilitator finds out by itself.
  await until(() => facilitator.lines("not_ready").length > 0, 60_000);
  expect(await health()).toEqual([503, expect.stringContaining("no fresh block")]);
  const { settleRequest } = await payment();
  expect(await facilitator.settle(settleRequest)).toMatchObject({ status: 503, retryAfter: expect.any(String) });
  expect((await facilitator.settle(known)).body).toMatchObject({ success: true });
  await facilitator.stop();
  relay.heal();
  await standStill();
  tellEarlierTimes(3600);
  await facilitator.restart();
  // A payment whose time is right is not declined by the time of the old block.
  expect(await facilitator.settle(settleRequest)).toMatchObject({ status: 503, retryAfter: expect.any(String) });
  expect((await facilitator.settle(known)).body).toMatchObject({ success: true });
  relay.heal();
  tellEarlierTimes(60);
  await until(async () => (await facilitator.settle(settleRequest)).status === 200);
  expect((await facilitator.settle(settleRequest)).body).toMatchObject({ success: true });
  expect(facilitator.lines("not_ready")).toMatchObject([{ reason: "no fresh block" }]);
});
