import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { startChain, type TestChain } from "../../test/support/chain.ts";
import { newPayer } from "../../test/support/payments.ts";
import { newPayment, removeWallets, startWallet, type TestWallet } from "../../test/support/wallet.ts";

let chain: TestChain;
const open: TestWallet[] = [];
const start = async (...args: Parameters<typeof startWallet>) => {
  const wallet = await startWallet(...args);
  open.push(wallet);
  return wallet;
};

beforeAll(async () => {
  chain = await startChain();
});
afterAll(async () => {
  await Promise.all(open.map((each) => each.stop()));
  removeWallets();
  await chain.stop();
});

test("a payment is collected once, and its record names the transaction", async () => {
  const wallet = await start(chain);
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  const ended = await wallet.ended(payment);
  expect(ended).toMatchObject({ status: "settled", reason: null });
  const transfers = await chain.transfers({ nonce: payment.key.nonce });
  expect(transfers).toHaveLength(1);
  expect(transfers[0]).toMatchObject({
    transaction_hash: ended!.transaction_hash!,
    block_number: ended!.block_number!,
    block_hash: ended!.block_hash!,
  });
});

describe("three hundred at once", () => {
  test("one key collects all of them within three blocks of the first", async () => {
    await using slow = Object.assign(await startChain({ blockTimeSeconds: 2 }), {
      async [Symbol.asyncDispose]() {
        await slow.stop();
      },
    });
    const wallet = await start(slow);
    await slow.pauseMining();
    const payer = newPayer();
    await slow.fundUsdc(payer.address, 1_000_000n);
    await slow.mine();
    const payTo = newPayer().address;
    const payments = await Promise.all(
      Array.from({ length: 300 }, () => newPayment(slow, { payer, to: payTo })),
    );
    await slow.resumeMining();
    await Promise.all(payments.map((payment) => wallet.collect(payment)));
    const ended = await Promise.all(payments.map((payment) => wallet.ended(payment, 20_000)));
    expect(ended.filter((each) => each?.status === "settled")).toHaveLength(300);
    const blocks = ended.map((each) => each!.block_number!);
    expect(Math.max(...blocks) - Math.min(...blocks)).toBeLessThan(3);
    expect(await slow.transfers({ to: payTo })).toHaveLength(300);
    expect((await wallet.rows()).map((row) => row.wallet_nonce)).toEqual(payments.map((_, index) => index));
  }, 40_000);
});
