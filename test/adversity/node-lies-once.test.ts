// A node that says one wrong thing once: the wallet moves on all the same, and so do the payments of everybody else.
import { afterAll, afterEach, beforeAll, beforeEach, expect, setDefaultTimeout, test } from "bun:test";
import { numberToHex } from "viem";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../support/chain/rpc-relay.ts";

setDefaultTimeout(120_000);

const VALUE = 10_000n;

let chain: TestChain;
let relay: RpcRelay;
let facilitator: Facilitator;

beforeAll(async () => {
  chain = await startChain({ blockTimeSeconds: 1 });
});
beforeEach(async () => {
  relay = await startRpcRelay(chain.url);
  facilitator = await startFacilitator(chain, {
    rpcUrls: [relay.url],
    env: { TOLLGATE_INCLUSION_TIMEOUT_MS: "8000" },
  });
});
afterEach(async () => {
  await facilitator?.[Symbol.asyncDispose]();
  await relay?.stop();
});
afterAll(() => chain?.stop());

async function payment() {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE);
  return signPayment(payer, { to: newPayer().address, value: VALUE });
}

test("an estimate of gas that no block has room for does not stop the wallet", async () => {
  relay.on("eth_estimateGas", { kind: "result", result: numberToHex(1_000_000_000) }, 1);
  await facilitator.settle((await payment()).settleRequest);
  const other = await facilitator.settle((await payment()).settleRequest);
  expect(other.body).toMatchObject({ success: true });
});

test("an estimate of gas that no transfer gets by with does not have a good payment declined", async () => {
  relay.on("eth_estimateGas", { kind: "result", result: numberToHex(21_000) }, 1);
  const paid = await payment();
  expect((await facilitator.settle(paid.settleRequest)).body).toMatchObject({ success: true });
});

test("a block number far ahead does not stop a transaction from being replaced", async () => {
  // The money of both is in a block that is known before the lie.
  const stuck = await payment();
  await facilitator.settle((await payment()).settleRequest);
  let lie = true;
  relay.on("eth_getBlockByNumber", {
    kind: "rewrite",
    rewrite: (block, params) =>
      lie && params[0] === "latest" ? { ...(block as object), number: "0x3b9aca00" } : block,
  });
  // The first transaction is lost on its way again and again, so that only another one can take its place.
  const first: unknown[] = [];
  relay.on("eth_sendRawTransaction", {
    kind: "choose",
    choose([raw]) {
      if (first.length === 0) first.push(raw);
      return raw === first[0] ? { kind: "error", message: "txpool is full" } : { kind: "pass" };
    },
  });
  const told = facilitator.settle(stuck.settleRequest);
  await relay.called("eth_sendRawTransaction", 2);
  lie = false;
  await told;
  const end = performance.now() + 90_000;
  let status: unknown = "";
  while (performance.now() < end && status !== "settled") {
    await Bun.sleep(500);
    status = facilitator.payment(stuck.authorization.nonce)?.["status"];
  }
  expect(status).toBe("settled");
});
