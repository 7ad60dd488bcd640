// A transfer that gets into a block when its payment is over reverts, and has cost gas like any other that does.

import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { join } from "node:path";
import type { TestChain } from "../support/chain/chain.ts";
import type { Facilitator } from "../support/chain/facilitator.ts";
import { useFacilitator } from "../support/chain/facilitator-tests.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import type { RpcRelay } from "../support/chain/rpc-relay.ts";
import { until } from "../support/until.ts";

const VALUE = 10_000n;

let chain: TestChain;
let relay: RpcRelay;
let facilitator: Facilitator;

useFacilitator(
  (running) => {
    ({ chain, relay, facilitator } = running);
  },
  { env: { TOLLGATE_INCLUSION_TIMEOUT_MS: "1000" } },
);

test("a transaction that reverts after its time keeps its reservation, and counts as gas of the day", async () => {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE);
  const validBefore = Math.floor(Date.now() / 1000) + 60;
  const payment = await signPayment(payer, { to: newPayer().address, value: VALUE, validBefore });
  const { nonce } = payment.authorization;
  await chain.pauseMining();
  // Blocks that have no room for it, as long as it is good: the pool that has it is not the builder's.
  relay.on("eth_sendRawTransaction", { kind: "result", result: `0x${"ab".repeat(32)}` });
  expect((await facilitator.settle(payment.settleRequest)).body).toMatchObject({ success: false });
  await chain.rpc("evm_setNextBlockTimestamp", [validBefore + 1]);
  await chain.mine();
  await until(() => facilitator.payment(nonce)?.["status"] === "failed");
  // The next block has it after all, before what takes its place has got about.
  const [first] = facilitator.transactions();
  const hash = (await chain.rpc("eth_sendRawTransaction", [first?.["raw"]])) as `0x${string}`;
  await chain.mine();
  const receipt = await chain.client.getTransactionReceipt({ hash });
  expect(receipt.status).toBe("reverted");
  const burned = receipt.gasUsed * receipt.effectiveGasPrice;
  for (let blocks = 0; blocks < 20; blocks++) {
    await chain.mine();
    await Bun.sleep(100);
  }
  // Twelve blocks on, all of it is known for certain, and closed.
  await until(() => facilitator.transactions().every(({ open }) => open === 0));
  using database = new Database(join(facilitator.dataDir, "tollgate.db"), { readonly: true });
  const days = database.query("select reserved, gas_burned from facilitator_days").all();
  expect(days).toEqual([{ reserved: `${VALUE}`, gas_burned: `${burned}` }]);
});
