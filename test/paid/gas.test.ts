// What reverted transactions burn is bounded for each account and day: beyond it the account is refused before anything
// is claimed, and no other account is.

import { expect, setDefaultTimeout, test } from "bun:test";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { until } from "../support/until.ts";

setDefaultTimeout(60_000);

const VALUE = 10_000n;

async function signed(chain: TestChain) {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE);
  return { payer, ...(await signPayment(payer, { to: newPayer().address, value: VALUE })) };
}

/** The payer is shut out of the token between the simulation and the block: the transfer reverts on chain. */
async function revert(chain: TestChain, facilitator: Facilitator) {
  const { payer, settleRequest, authorization } = await signed(chain);
  await chain.pauseMining();
  const answer = facilitator.settle(settleRequest);
  await until(() => facilitator.payment(authorization.nonce)?.["status"] === "sent");
  await chain.blacklist(payer.address);
  await chain.resumeMining();
  await chain.mine();
  expect((await answer).body).toMatchObject({ success: false });
  await until(() => facilitator.payment(authorization.nonce)?.["status"] === "failed");
  expect((await facilitator.settle(settleRequest)).body).toMatchObject({ success: false, transaction: "" });
}

test("an account whose transfers reverted is refused above its gas of the day, and no other", async () => {
  const chain = await startChain();
  await using facilitator = await startFacilitator(chain, { env: { TOLLGATE_DAILY_GAS_WEI: "1000" } });
  const other = await facilitator.addAccount("other");
  await revert(chain, facilitator);
  expect(facilitator.reserved("gateway")).toBe(VALUE);
  const next = await signed(chain);
  expect((await facilitator.settle(next.settleRequest)).status).toBe(429);
  expect(facilitator.payment(next.authorization.nonce)).toBeNull();
  expect((await facilitator.settle(next.settleRequest, other)).body).toMatchObject({ success: true });
  await chain.stop();
});

test("without a bound, the gas that was burned is counted all the same, and stops nobody", async () => {
  const chain = await startChain();
  await using facilitator = await startFacilitator(chain, { env: { TOLLGATE_DAILY_GAS_WEI: "0" } });
  await revert(chain, facilitator);
  const { settleRequest } = await signed(chain);
  expect((await facilitator.settle(settleRequest)).body).toMatchObject({ success: true });
  await chain.stop();
});
