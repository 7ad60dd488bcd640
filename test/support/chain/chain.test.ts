// The test support is tested itself: what a test of money stands on has to be Base's token and a real chain.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync } from "node:fs";
import { parseEther } from "viem";
import { startChain, type TestChain } from "./chain.ts";
import { newPayer, signPayment } from "./payments.ts";

const PAYEE = newPayer().address;
const lower = (text: string) => text.toLowerCase();

let chain: TestChain;
beforeAll(async () => {
  chain = await startChain();
});
afterAll(() => chain.stop());

async function richPayer() {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, 1_000n);
  return payer;
}

test("the token is Base's by its address, its domain and its words", async () => {
  const asked = { to: chain.token, data: "0x3644e515" } as const;
  expect((await chain.client.call(asked)).data).toBe(
    "0x02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f",
  );
  expect(await chain.client.getChainId()).toBe(8453);
});

test("a signed payment moves money and leaves both events", async () => {
  const payer = await richPayer();
  const payment = await signPayment(payer, { to: PAYEE, value: 7n });
  expect(await chain.authorizationUsed(payer.address, payment.authorization.nonce)).toBe(false);
  const hash = await chain.collectAsStranger(payment);
  const receipt = await chain.client.getTransactionReceipt({ hash });
  expect(await chain.transfers({ nonce: payment.authorization.nonce })).toEqual([
    {
      from: lower(payer.address),
      to: lower(PAYEE),
      value: 7n,
      nonce: payment.authorization.nonce,
      transaction_hash: hash,
      block_number: Number(receipt.blockNumber),
      block_hash: receipt.blockHash,
    },
  ] as never);
  expect(await chain.usdcOf(payer.address)).toBe(993n);
  expect(await chain.authorizationUsed(payer.address, payment.authorization.nonce)).toBe(true);
  await expect(chain.collectAsStranger(payment)).rejects.toThrow("reverted");
});

test("a payment that is wrong in any part is refused by the token", async () => {
  const payer = await richPayer();
  const now = Math.floor(Date.now() / 1000);
  const wrong = [
    { form: "high-s" },
    { form: "zero" },
    { value: 1_001n },
    { validAfter: now + 60 },
    { validBefore: now - 60 },
    { from: newPayer().address },
    { domain: { name: "USDC" } },
    { domain: { version: "1" } },
    { domain: { chainId: 1 } },
    { domain: { verifyingContract: PAYEE } },
  ] as const;
  for (const part of wrong) {
    const payment = await signPayment(payer, { to: PAYEE, value: 1n, ...part });
    await expect(chain.collectAsStranger(payment)).rejects.toThrow("reverted");
  }
  await chain.collectAsStranger(await signPayment(payer, { to: PAYEE, value: 1_000n }));
});

test("blacklist, pause and cancellation keep money where it is", async () => {
  const payer = await richPayer();
  const payment = await signPayment(payer, { to: PAYEE, value: 1n });
  await chain.blacklist(payer.address);
  await expect(chain.collectAsStranger(payment)).rejects.toThrow("reverted");
  await chain.unblacklist(payer.address);
  await chain.pauseToken();
  await expect(chain.collectAsStranger(payment)).rejects.toThrow("reverted");
  await chain.unpauseToken();
  await chain.cancelAuthorization(payer, payment.authorization.nonce);
  expect(await chain.authorizationUsed(payer.address, payment.authorization.nonce)).toBe(true);
  await expect(chain.collectAsStranger(payment)).rejects.toThrow("reverted");
  expect(await chain.usdcOf(payer.address)).toBe(1_000n);
});

test("a delegated account's plain signature is refused on chain", async () => {
  const payer = await richPayer();
  await chain.delegate(payer);
  expect(await chain.client.getCode({ address: payer.address })).toStartWith("0xef0100");
  const payment = await signPayment(payer, { to: PAYEE, value: 1n });
  await expect(chain.collectAsStranger(payment)).rejects.toThrow("reverted");
});

test("a contract wallet pays by its owner's signature and no other, longer ones too", async () => {
  const owner = newPayer();
  const wallet = await chain.contractWallet(owner.address);
  await chain.fundUsdc(wallet, 10n);
  const payment = await signPayment(owner, { from: wallet, to: PAYEE, value: 4n });
  await chain.collectAsStranger(payment);
  const longer = await signPayment(owner, { from: wallet, to: PAYEE, value: 4n });
  await chain.collectAsStranger({ ...longer, signature: `${longer.signature}beef` });
  expect(await chain.usdcOf(wallet)).toBe(2n);
  const stranger = await signPayment(newPayer(), { from: wallet, to: PAYEE, value: 1n });
  await expect(chain.collectAsStranger(stranger)).rejects.toThrow("reverted");
});

test("paused mining holds everything back, and what the token's admin does comes first in the next block", async () => {
  const payer = await richPayer();
  const before = await chain.blockNumber();
  await chain.pauseMining();
  await chain.collectAsStranger(await signPayment(payer, { to: PAYEE, value: 1n }));
  await chain.fundUsdc(payer.address, 5n);
  expect(await chain.blockNumber()).toBe(before);
  expect(await chain.usdcOf(payer.address)).toBe(1_000n);
  await chain.mine();
  expect(await chain.usdcOf(payer.address)).toBe(1_004n);
  await chain.resumeMining();
  await chain.fundUsdc(payer.address, 5n);
  expect(await chain.usdcOf(payer.address)).toBe(1_009n);
});

test("a reorganisation takes a payment back, or moves it to another block", async () => {
  const payer = await richPayer();
  const payment = await signPayment(payer, { to: PAYEE, value: 1n });
  const { nonce } = payment.authorization;
  const hash = await chain.collectAsStranger(payment);
  await chain.mine(2);
  const [first] = await chain.transfers({ nonce });
  await chain.reorg(3, [hash]);
  const [second] = await chain.transfers({ nonce });
  expect(second).toMatchObject({ transaction_hash: hash, block_number: await chain.blockNumber() });
  expect(second?.block_hash).not.toBe(first?.block_hash);
  await chain.reorg(1);
  expect(await chain.transfers({ nonce })).toEqual([]);
  expect(await chain.authorizationUsed(payer.address, nonce)).toBe(false);
  await chain.collectAsStranger(payment);
});

test("funding moves no recommendation of fees", async () => {
  const fresh = await startChain();
  await fresh.fundUsdc(PAYEE, 1n);
  expect(BigInt((await fresh.rpc("eth_maxPriorityFeePerGas")) as string)).toBeLessThan(2_000_000_000n);
  await fresh.stop();
});

test("balances and the base fee are as they are set", async () => {
  const { address } = newPayer();
  await chain.fundEth(address, parseEther("0.5"));
  expect(await chain.client.getBalance({ address })).toBe(parseEther("0.5"));
  await chain.setBaseFee(123_456_789_000n);
  await chain.mine();
  expect((await chain.client.getBlock()).baseFeePerGas).toBe(123_456_789_000n);
});

test("a chain with a block time makes blocks by itself, and ends with the process that started it", async () => {
  const script = `
    import { startChain } from ${JSON.stringify(`${import.meta.dir}/chain.ts`)};
    const chain = await startChain({ blockTimeSeconds: 1 });
    const start = await chain.blockNumber();
    await new Promise((resolve) => {
      const stop = chain.client.watchBlockNumber({
        pollingInterval: 50,
        onBlockNumber: (number) => { if (Number(number) > start) { stop(); resolve(); } },
      });
    });
    process.stdout.write(chain.url + " " + chain.home);
    process.kill(process.pid, "SIGKILL");
  `;
  const child = Bun.spawn([process.execPath, "-e", script], { stdout: "pipe", stderr: "inherit" });
  const [url, home] = (await child.stdout.text()).split(" ");
  expect(url).toStartWith("http://127.0.0.1:");
  for (const deadline = Date.now() + 5_000; existsSync(home!) && Date.now() < deadline; ) await Bun.sleep(10);
  expect(existsSync(home!)).toBe(false);
  await expect(fetch(url!)).rejects.toThrow();
});
