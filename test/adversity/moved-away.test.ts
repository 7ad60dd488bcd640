// A payer who has moved its money away since its last payment: what it had before is nothing that its next payments
// can be taken from, so no more of them are sent than what it has now suffices for.
import { expect, test } from "bun:test";
import { encodeFunctionData, type Hex, parseAbi } from "viem";
import type { TestChain } from "../support/chain/chain.ts";
import type { Facilitator } from "../support/chain/facilitator.ts";
import { useFacilitator } from "../support/chain/facilitator-tests.ts";
import { newPayer, type SignedPayment, signPayment } from "../support/chain/payments.ts";

const VALUE = 10_000n;
const AT_ONCE = 30;
const TRANSFER = parseAbi(["function transfer(address to, uint256 value) returns (bool)"]);

let chain: TestChain;
let facilitator: Facilitator;

useFacilitator((running) => {
  ({ chain, facilitator } = running);
});

async function moveAway(payer: ReturnType<typeof newPayer>, value: bigint): Promise<void> {
  await chain.fundEth(payer.address, 10n ** 18n);
  const data = encodeFunctionData({
    abi: TRANSFER,
    functionName: "transfer",
    args: [newPayer().address, value],
  });
  const request = await chain.client.prepareTransactionRequest({ account: payer, to: chain.token, data });
  const hash = await chain.client.sendRawTransaction({
    serializedTransaction: await payer.signTransaction(request as never),
  });
  const receipt = await chain.receiptOf(hash);
  expect(receipt.status).toBe("success");
}

async function statusesOf(payments: readonly SignedPayment[]): Promise<string[]> {
  const nonces = new Set<unknown>(payments.map(({ authorization }) => authorization.nonce));
  const rows = facilitator.transactions().filter((row) => nonces.has(row["nonce"]));
  return Promise.all(
    rows.map(async ({ hash }) => {
      const receipt = await chain.client.getTransactionReceipt({ hash: hash as Hex }).catch(() => null);
      return receipt?.status ?? "pending";
    }),
  );
}

test("authorizations of a payer who has moved its money away meanwhile don't revert each other", async () => {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE * 100n);
  const to = newPayer().address;
  const first = await signPayment(payer, { to, value: VALUE });
  expect((await facilitator.settle(first.settleRequest)).body).toMatchObject({ success: true });
  await moveAway(payer, VALUE * 98n);
  expect(await chain.usdcOf(payer.address)).toBe(VALUE);

  await chain.pauseMining();
  const payments = await Promise.all(Array.from({ length: AT_ONCE }, () => signPayment(payer, { to, value: VALUE })));
  const answers = payments.map(({ settleRequest }) => facilitator.settle(settleRequest));
  const put = Promise.withResolvers<void>();
  let done = 0;
  for (const answer of answers) void answer.then(() => ++done === AT_ONCE - 1 && put.resolve());
  await Promise.race([put.promise, Bun.sleep(5_000)]);
  await chain.resumeMining();
  await chain.mine();
  await Promise.all(answers);
  expect((await statusesOf(payments)).sort()).toEqual(["success"]);
});
