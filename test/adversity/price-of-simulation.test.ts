// A contract wallet whose code looks at the price of gas: it is simulated for the price that its transaction will pay,
// so that it can't take the simulation and refuse the transaction.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { numberToHex } from "viem";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../support/chain/rpc-relay.ts";

setDefaultTimeout(60_000);

const VALUE = 10_000n;
/** 2 GASPRICE > 3 BASEFEE: far above what a transaction pays where tips are small. */
const DEAR = "6003480260023a0211";

let chain: TestChain;
let relay: RpcRelay;
let facilitator: Facilitator;

beforeAll(async () => {
  chain = await startChain({ blockTimeSeconds: 1 });
  relay = await startRpcRelay(chain.url);
  // Base's usual tip.
  relay.on("eth_maxPriorityFeePerGas", { kind: "result", result: numberToHex(1_000_000) });
  facilitator = await startFacilitator(chain, { rpcUrls: [relay.url] });
});
afterAll(async () => {
  await facilitator?.[Symbol.asyncDispose]();
  await relay?.stop();
  await chain?.stop();
});

test("a wallet that takes no price but that of a simulation burns no gas", async () => {
  const from = await chain.contractWalletIf(DEAR);
  await chain.fundUsdc(from, VALUE * 100n);
  for (let n = 0; n < 3; n++) {
    const payment = await signPayment(newPayer(), { from, to: newPayer().address, value: VALUE });
    await chain.setBaseFee(10n ** 8n);
    await chain.mine();
    const { status, body } = await facilitator.settle(payment.settleRequest);
    expect([status, body.success]).toEqual([200, false]);
  }
  const statuses = await Promise.all(
    facilitator.transactions().map(async ({ hash }) => {
      return (await chain.client.getTransactionReceipt({ hash: hash as never })).status;
    }),
  );
  expect(statuses).toEqual([]);
});
