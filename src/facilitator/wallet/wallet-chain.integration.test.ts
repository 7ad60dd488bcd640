// What the chain and others on it do to payments under way: the right end each time, and at most one transfer.

import { expect, test } from "bun:test";
import { createWalletClient, http, keccak256, numberToHex, parseTransaction } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { base } from "viem/chains";
import type { TestChain } from "../../../test/support/chain/chain.ts";
import { newPayer } from "../../../test/support/chain/payments.ts";
import type { RpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import { newPayment, type WalletOptions } from "../../../test/support/chain/wallet.ts";
import { useChain } from "../../../test/support/chain/wallet-tests.ts";
import { BASE } from "../../../test/support/network.ts";
import { until } from "../../../test/support/until.ts";
import { transferData } from "../../chain/token.ts";
import { silentLog } from "../../core/log.ts";
import { createLocalSigner } from "./signer.ts";

const ETHER = 10n ** 18n;
const GWEI = 10n ** 9n;

let chain: TestChain;
let relay: RpcRelay;
// Each test bends its chain in ways that the next one must not feel.
const { start, untilPending, transfersOf } = useChain(
  (nodes) => {
    ({ chain, relay } = nodes);
  },
  (fresh) => fresh.setBaseFee(GWEI),
);

/** A payment of which the transaction waits in the pool of a chain that makes no blocks. */
async function sentUnmined(options: WalletOptions = {}) {
  const wallet = await start(options);
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  await untilPending(1);
  return { wallet, payment };
}

/** Somebody who sends transactions of their own. */
async function stranger(key = generatePrivateKey()) {
  const account = privateKeyToAccount(key);
  await chain.fundEth(account.address, 10n * ETHER);
  return createWalletClient({ account, chain: base, transport: http(chain.url) });
}

test("a payment is settled with the hash of the first broadcast when mining stops and resumes", async () => {
  const wallet = await start();
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  const sent = await wallet.ended(payment, 700);
  expect(sent?.status).toBe("sent");
  await chain.mine();
  const ended = await wallet.ended(payment);
  expect(ended).toMatchObject({ status: "settled", transaction_hash: sent!.transaction_hash! });
  expect(await wallet.rows()).toHaveLength(1);
});

test("a payer who cancels in time is not charged, and the record names the transaction", async () => {
  const { wallet, payment } = await sentUnmined();
  await chain.cancelAuthorization(payment.payer, payment.key.nonce);
  await chain.mine();
  expect(await wallet.ended(payment)).toMatchObject({
    status: "failed",
    reason: "the authorization was cancelled",
    foreign_transaction: expect.stringMatching(/^0x[0-9a-f]{64}$/),
  });
  expect(await transfersOf(payment)).toHaveLength(0);
});

test("an authorization that somebody else broadcast is not our collection", async () => {
  const thief = await stranger();
  const { wallet, payment } = await sentUnmined();
  const foreign = await thief.sendTransaction({
    to: chain.token,
    data: transferData(payment.authorization, payment.signature),
    gas: 200_000n,
    maxFeePerGas: 1000n * GWEI,
    maxPriorityFeePerGas: 1000n * GWEI,
  });
  await chain.mine();
  expect(await wallet.ended(payment)).toMatchObject({
    status: "failed",
    reason: "the authorization was used elsewhere",
    foreign_transaction: foreign,
  });
  expect(await transfersOf(payment)).toHaveLength(1);
});

test.each([
  ["emptied", async (payer: ReturnType<typeof newPayer>) => drain(payer), /exceeds balance/],
  ["blacklisted", (payer: ReturnType<typeof newPayer>) => chain.blacklist(payer.address), /blacklisted/i],
  ["paused", () => chain.pauseToken(), /paused/i],
])(
  "a payment whose account is %s between broadcast and block fails, with the exact reason and the gas that is lost",
  async (_, act, reason) => {
    const failures: unknown[] = [];
    const warn = (event: string, fields?: object) => {
      if (event === "payment_failed") failures.push(fields);
    };
    const wallet = await start({ log: { ...silentLog, warn } });
    const before = await chain.client.getBalance({ address: wallet.address });
    const payment = await newPayment(chain);
    await chain.fundEth(payment.payer.address, ETHER);
    await chain.pauseMining();
    await wallet.collect(payment);
    await untilPending(1);
    await act(payment.payer);
    await chain.mine();
    const ended = await wallet.ended(payment);
    await chain.resumeMining();
    if (_ === "paused") await chain.unpauseToken();
    expect(ended).toMatchObject({ status: "failed", reason: expect.stringMatching(reason) });
    const lost = before - (await chain.client.getBalance({ address: wallet.address }));
    expect(failures).toMatchObject([{ gas_burned: lost }]);
    expect(await transfersOf(payment)).toHaveLength(0);
  },
);

/** All that the account has goes elsewhere, in the next block. */
async function drain(payer: ReturnType<typeof newPayer>) {
  const wallet = createWalletClient({ account: payer, chain: base, transport: http(chain.url) });
  const balance = numberToHex(await chain.usdcOf(payer.address), { size: 32 }).slice(2);
  await wallet.sendTransaction({
    to: chain.token,
    data: `0xa9059cbb${newPayer().address.slice(2).padStart(64, "0")}${balance}`,
    gas: 200_000n,
    maxFeePerGas: 1000n * GWEI,
    maxPriorityFeePerGas: 1000n * GWEI,
  });
}

test("a payment goes to the next wallet nonce when somebody else used its own, and is collected once", async () => {
  const key = generatePrivateKey();
  const other = await stranger(key);
  const wallet = await start({ signers: [createLocalSigner(BASE, key)] });
  const first = await newPayment(chain);
  await wallet.collect(first);
  expect((await wallet.ended(first))?.status).toBe("settled");
  await chain.pauseMining();
  const payment = await newPayment(chain, { payer: first.payer, value: 0n });
  await wallet.collect(payment);
  await untilPending(1);
  // Anvil takes it instead of ours.
  await other.sendTransaction({
    to: other.account.address,
    nonce: 1,
    gas: 21_000n,
    maxFeePerGas: 1000n * GWEI,
    maxPriorityFeePerGas: 1000n * GWEI,
  });
  await chain.mine();
  await chain.resumeMining();
  const ended = await wallet.ended(payment);
  expect(ended?.status).toBe("settled");
  const rows = await wallet.rows();
  expect(rows.map((row) => row.wallet_nonce)).toEqual([0, 1, 2]);
  expect(ended?.transaction_hash).toBe(rows[2]!.hash);
  expect(await transfersOf(payment)).toHaveLength(1);
});

test("a payment that got into no block before its end has failed, and frees its nonce for the next", async () => {
  const wallet = await start();
  const block = await chain.client.getBlock();
  const payment = await newPayment(chain, { validBefore: Number(block.timestamp) + 60 });
  await chain.pauseMining();
  // The base fee leaps above what it pays, and above the cap.
  await wallet.collect(payment);
  await untilPending(1);
  await chain.setBaseFee(60n * GWEI);
  await chain.rpc("evm_setNextBlockTimestamp", [Number(payment.authorization.validBefore) - 1]);
  await chain.mine();
  expect((await wallet.ended(payment, 500))?.status).toBe("sent");
  await chain.setBaseFee(60n * GWEI);
  await chain.rpc("evm_setNextBlockTimestamp", [Number(payment.authorization.validBefore)]);
  await chain.mine();
  expect(await wallet.ended(payment)).toMatchObject({ status: "failed", reason: "expired" });
  await chain.setBaseFee(GWEI);
  await chain.resumeMining();
  await chain.mine();
  await Bun.sleep(1100);
  const next = await newPayment(chain);
  await wallet.collect(next);
  expect((await wallet.ended(next))?.status).toBe("settled");
  expect(await transfersOf(payment)).toHaveLength(0);
});

test("a transaction that offers less than the base fee is replaced at the same nonce, and its payment collected once", async () => {
  const { wallet, payment } = await sentUnmined();
  await chain.setBaseFee(20n * GWEI);
  await chain.mine();
  await until(async () => (await wallet.rows()).length === 2);
  await until(
    async () => (await chain.client.getTransactionCount({ address: wallet.address, blockTag: "pending" })) === 1,
  );
  const [first, second] = await wallet.rows();
  expect(second).toMatchObject({
    wallet_nonce: first!.wallet_nonce,
    replacement: 1,
    payer: payment.key.payer,
  });
  expect(BigInt(second!.max_fee)).toBeGreaterThan(20n * GWEI);
  await chain.mine();
  expect(await wallet.ended(payment)).toMatchObject({ status: "settled", transaction_hash: second!.hash });
  expect(await transfersOf(payment)).toHaveLength(1);
});

test("a payment waits, stored, while the base fee is above the cap, and lands when the fee has come down", async () => {
  const { wallet, payment } = await sentUnmined({ limits: { maxFee: 5n * 10n ** 9n } });
  await chain.setBaseFee(20n * GWEI);
  await chain.mine();
  const late = await newPayment(chain, { payer: payment.payer, value: 0n });
  await Bun.sleep(1100);
  await expect(wallet.collect(late)).rejects.toMatchObject({ kind: "unavailable" });
  expect((await wallet.payment(late))?.status).toBe("claimed");
  await chain.setBaseFee(GWEI);
  await until(async () => {
    await chain.mine();
    return (await wallet.ended(payment, 200))?.status === "settled";
  });
  expect(await transfersOf(payment)).toHaveLength(1);
});

test("a transaction that three blocks leave out is replaced, and the wallet's other transactions stay as they are", async () => {
  const wallet = await start({ urls: [relay.url] });
  // The look of the start is at a block before those that the payers' money makes: so another look follows.
  await until(() => relay.params("eth_getBlockByNumber").length > 0);
  await wallet.chain.newest();
  const payments = [await newPayment(chain), await newPayment(chain), await newPayment(chain)];
  await chain.pauseMining();
  for (const payment of payments) await wallet.collect(payment);
  const [head] = await wallet.rows();
  await untilPending(3);
  // The watcher's first look, at a block; from then on it counts blocks.
  await until(() => relay.params("eth_getTransactionCount").some(([, at]) => at !== "pending"));
  // Blocks that have no room for ours.
  await chain.rpc("evm_setBlockGasLimit", [numberToHex(30_000)]);
  for (let block = 1; block <= 2; block++) await chain.mine();
  await Bun.sleep(400);
  expect(await wallet.rows()).toHaveLength(3);
  await chain.mine();
  await until(async () => (await wallet.rows()).length === 4);
  expect((await wallet.rows()).map((row) => [row.wallet_nonce, row.replacement])).toEqual([
    [head!.wallet_nonce, 0],
    [head!.wallet_nonce, 1],
    [head!.wallet_nonce + 1, 0],
    [head!.wallet_nonce + 2, 0],
  ]);
  await chain.rpc("evm_setBlockGasLimit", [numberToHex(200_000_000)]);
  await chain.mine();
  for (const payment of payments) {
    expect((await wallet.ended(payment))?.status).toBe("settled");
    expect(await transfersOf(payment)).toHaveLength(1);
  }
});

test("a block that is reorganised away is noticed, and its payment lands again", async () => {
  const wallet = await start();
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  const before = await wallet.ended(payment);
  expect(before?.status).toBe("settled");
  await chain.pauseMining();
  await chain.reorg(1);
  await chain.mine();
  await until(async () => (await wallet.payment(payment))?.block_hash !== before!.block_hash);
  await until(async () => {
    await chain.mine();
    return (await wallet.ended(payment, 200))?.status === "settled";
  });
  const after = await wallet.payment(payment);
  expect(after?.transaction_hash).toBe(before!.transaction_hash!);
  expect(await transfersOf(payment)).toMatchObject([{ block_hash: after!.block_hash! }]);
});

test("a payment that failed does not land when the block that failed it is reorganised away", async () => {
  const { wallet, payment } = await sentUnmined();
  await chain.blacklist(payment.payer.address);
  await chain.mine();
  expect((await wallet.ended(payment))?.status).toBe("failed");
  await chain.reorg(1);
  await chain.unblacklist(payment.payer.address);
  await chain.mine();
  await until(async () => (await wallet.rows()).length === 2);
  await untilPending(1);
  await chain.mine();
  expect(await transfersOf(payment)).toHaveLength(0);
  expect((await wallet.rows()).map((row) => row.payer)).toEqual([payment.key.payer, null]);
  const next = await newPayment(chain, { payer: newPayer(), value: 0n });
  await wallet.collect(next);
  await untilPending(1);
  await chain.mine();
  expect((await wallet.ended(next))?.status).toBe("settled");
});

test("after twelve blocks nothing is open any more", async () => {
  const wallet = await start();
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  await wallet.ended(payment);
  expect((await wallet.rows()).map((row) => row.open)).toEqual([true]);
  await chain.mine(12);
  await until(async () => (await wallet.rows()).every((row) => !row.open));
});

test("a transaction is broadcast as it is stored, and its record names payer and nonce", async () => {
  const wallet = await start();
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  const [row] = await wallet.rows();
  expect(keccak256(row!.raw)).toBe(row!.hash);
  const parsed = parseTransaction(row!.raw);
  expect(parsed).toMatchObject({ nonce: row!.wallet_nonce, chainId: 8453, gas: BigInt(row!.gas) });
  expect(row).toMatchObject({ payer: payment.key.payer, nonce: payment.key.nonce });
});
