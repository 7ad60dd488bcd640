// What reverted transactions burn is bounded for each account and day: beyond it the account is refused before anything
// is claimed, and no other account is.

import { expect, test } from "bun:test";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { until } from "../support/until.ts";

const VALUE = 10_000n;

async function signed(chain: TestChain, payer = newPayer()) {
  await chain.fundUsdc(payer.address, VALUE);
  return { payer, ...(await signPayment(payer, { to: newPayer().address, value: VALUE })) };
}

const FAR = { TOLLGATE_DAILY_GAS_WEI: `${10n ** 18n}` };

/** The payer is shut out of the token between the simulation and the block: the transfer reverts on chain. */
async function revert(chain: TestChain, facilitator: Facilitator, by = newPayer()) {
  const { payer, settleRequest, authorization } = await signed(chain, by);
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
  expect(await facilitator.settle(next.settleRequest)).toMatchObject({ status: 429, retryAfter: "3600" });
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

test("a payment to the payer itself, or of less than the least value, is refused for good and claims nothing", async () => {
  const chain = await startChain();
  await using facilitator = await startFacilitator(chain);
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE);
  const ask = async (to: `0x${string}`, value: bigint) => {
    const { settleRequest, authorization } = await signPayment(payer, { to, value });
    const { status, retryAfter } = await facilitator.settle(settleRequest);
    return { status, retryAfter, isClaimed: facilitator.payment(authorization.nonce) !== null };
  };
  const refused = { status: 429, retryAfter: null, isClaimed: false };
  expect(await ask(payer.address, VALUE)).toEqual(refused);
  expect(await ask(newPayer().address, 99n)).toEqual(refused);
  expect(await ask(newPayer().address, 100n)).toEqual({ status: 200, retryAfter: null, isClaimed: true });
  await chain.stop();
});

test("what all transactions of an account cost has a bound, also for what comes at once", async () => {
  const chain = await startChain();
  const bound = 5n * 10n ** 14n;
  await using facilitator = await startFacilitator(chain, { env: { TOLLGATE_DAILY_GAS_ALL_WEI: `${bound}` } });
  await chain.setBaseFee(10n ** 9n);
  await chain.mine();
  const spent = () => facilitator.signers.map((address) => chain.client.getBalance({ address }));
  const before = await Promise.all(spent());
  const payments = await Promise.all(Array.from({ length: 12 }, () => signed(chain)));
  const answers = await Promise.all(payments.map(({ settleRequest }) => facilitator.settle(settleRequest)));
  const settled = answers.filter(({ body }) => body.success === true).length;
  const refused = answers.filter(({ status, retryAfter }) => status === 429 && retryAfter !== null);
  expect(settled).toBeGreaterThan(0);
  expect(settled + refused.length).toBe(12);
  const isRefused = async () => {
    const { settleRequest } = await signed(chain);
    await chain.setBaseFee(10n ** 9n);
    return (await facilitator.settle(settleRequest)).status === 429;
  };
  // What was held beside the cost is free again, and so a few more get in, until the bound is reached.
  let more = 0;
  while (!(await isRefused())) more++;
  expect(more).toBeLessThan(5);
  const cost =
    before.reduce((sum, wei) => sum + wei, 0n) - (await Promise.all(spent())).reduce((sum, wei) => sum + wei);
  expect(cost).toBeGreaterThan(bound / 4n);
  expect(cost).toBeLessThanOrEqual(bound);
  const other = await facilitator.addAccount("other");
  const { settleRequest } = await signed(chain);
  expect((await facilitator.settle(settleRequest, other)).body).toMatchObject({ success: true });
  await chain.stop();
});

test("whoever reverts shuts out itself until the chain's next day, with code after two, and no other payer", async () => {
  const chain = await startChain();
  await using facilitator = await startFacilitator(chain, { env: FAR });
  const payer = newPayer();
  const isRefused = async (by = payer) => {
    const { settleRequest, authorization } = await signed(chain, by);
    const { status, retryAfter } = await facilitator.settle(settleRequest);
    expect(facilitator.payment(authorization.nonce) === null).toBe(status === 429);
    return status === 429 && retryAfter !== null;
  };
  for (let reverts = 0; reverts < 5; reverts++) {
    await revert(chain, facilitator, payer);
    await chain.unblacklist(payer.address);
    if (reverts === 1) {
      await chain.rpc("anvil_setCode", [payer.address, "0x00"]);
      expect(await isRefused()).toBe(true);
      await chain.rpc("anvil_setCode", [payer.address, "0x"]);
      expect(await isRefused()).toBe(false);
    }
  }
  expect(await isRefused()).toBe(true);
  expect(await isRefused(newPayer())).toBe(false);
  await chain.rpc("evm_increaseTime", [86_400]);
  await chain.mine();
  const tomorrow = Math.floor(Date.now() / 1000) + 86_400;
  const { settleRequest } = await signPayment(payer, {
    to: newPayer().address,
    value: VALUE,
    validBefore: tomorrow + 600,
  });
  await until(async () => (await facilitator.settle(settleRequest)).body?.success === true);
  await chain.stop();
});
