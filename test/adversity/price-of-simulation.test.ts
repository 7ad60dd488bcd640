// A contract wallet whose code looks at the price of gas: it is simulated for the price that its transaction will pay,
// so that it can't take the simulation and refuse the transaction.
import { expect, test } from "bun:test";
import { numberToHex } from "viem";
import type { TestChain } from "../support/chain/chain.ts";
import type { Facilitator } from "../support/chain/facilitator.ts";
import { useFacilitator } from "../support/chain/facilitator-tests.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";

const VALUE = 10_000n;
/** 2 GASPRICE > 3 BASEFEE: far above what a transaction pays where tips are small. */
const DEAR = "6003480260023a0211";

let chain: TestChain;
let facilitator: Facilitator;

useFacilitator(
  (running) => {
    ({ chain, facilitator } = running);
  },
  {
    blockTimeSeconds: 1,
    // Base's usual tip.
    prepare: (relay) => relay.on("eth_maxPriorityFeePerGas", { kind: "result", result: numberToHex(1_000_000) }),
  },
);

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
