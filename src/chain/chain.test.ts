import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { createWalletClient, type Hex, http } from "viem";
import { base } from "viem/chains";
import { startChain, type TestChain } from "../../test/support/chain/chain.ts";
import { newPayer } from "../../test/support/chain/payments.ts";
import { startRpcRelay } from "../../test/support/chain/rpc-relay.ts";
import { newPayment, outbound } from "../../test/support/chain/wallet.ts";
import { BASE } from "../../test/support/network.ts";
import { silentLog } from "../core/log.ts";
import { createChain } from "./chain.ts";
import { transferData } from "./token.ts";

/** It has nothing, which a simulation does not mind. */
const WALLET = newPayer().address;
let anvil: TestChain;
const connect = (...urls: string[]) => createChain({ network: BASE, urls, outbound, log: silentLog, timeoutMs: 2000 });
const simulate = ({ authorization, signature }: Awaited<ReturnType<typeof newPayment>>) =>
  connect(anvil.url).simulate(authorization, signature, WALLET);

beforeAll(async () => {
  anvil = await startChain();
});
afterAll(() => anvil.stop());

describe("a simulation on the chain", () => {
  test("tells the gas of a plain payment, with room for a payee that has just spent all it had", async () => {
    const payment = await newPayment(anvil);
    const simulation = await simulate(payment);
    if (!simulation.ok) throw new Error(simulation.reason);
    const sender = newPayer();
    await anvil.fundEth(sender.address, 10n ** 18n);
    const client = createWalletClient({ account: sender, chain: base, transport: http(anvil.url) });
    const data = transferData(payment.authorization, payment.signature);
    const hash = await client.sendTransaction({ to: anvil.token, data, gas: simulation.gas });
    const { gasUsed, status } = await anvil.receiptOf(hash);
    expect(status).toBe("success");
    expect(simulation.gas - gasUsed).toBeGreaterThan(17_100n);
    expect(simulation.gas).toBeLessThan(200_000n);
    expect(await simulate(payment)).toEqual({
      ok: false,
      reason: "FiatTokenV2: authorization is used or canceled",
    });
  });

  test("refuses a high s", async () => {
    expect(await simulate(await newPayment(anvil, { form: "high-s" }))).toMatchObject({ ok: false });
  });

  test("takes a contract wallet's signatures, short and long", async () => {
    const owner = newPayer();
    const from = await anvil.contractWallet(owner.address);
    const payment = await newPayment(anvil, { payer: owner, from, value: 0n });
    expect((await simulate(payment)).ok).toBe(true);
    expect((await simulate({ ...payment, signature: `${payment.signature}00aa` })).ok).toBe(true);
    const stranger = await newPayment(anvil, { payer: newPayer(), from, value: 0n });
    expect(await simulate(stranger)).toMatchObject({
      ok: false,
      reason: expect.stringContaining("signature"),
    });
  });

  test("refuses the plain signature of a plain account that was delegated (EIP-7702)", async () => {
    const payment = await newPayment(anvil);
    expect((await simulate(payment)).ok).toBe(true);
    await anvil.delegate(payment.payer);
    expect((await simulate(payment)).ok).toBe(false);
  });

  test("refuses in the token's own words: no money, blacklisted, paused, over", async () => {
    const poor = await newPayment(anvil, { payer: newPayer() });
    expect(await simulate(poor)).toMatchObject({
      ok: false,
      reason: expect.stringContaining("exceeds balance"),
    });
    const listed = await newPayment(anvil);
    await anvil.blacklist(listed.payer.address);
    expect(await simulate(listed)).toMatchObject({
      ok: false,
      reason: expect.stringContaining("blacklisted"),
    });
    const { timestamp } = await anvil.client.getBlock();
    const old = await newPayment(anvil, { payer: newPayer(), value: 0n, validBefore: timestamp });
    expect(await simulate(old)).toMatchObject({ ok: false, reason: expect.stringContaining("expired") });
    await anvil.pauseToken();
    expect(await simulate(await newPayment(anvil, { payer: newPayer(), value: 0n }))).toMatchObject({
      ok: false,
      reason: expect.stringContaining("paused"),
    });
    await anvil.unpauseToken();
  });

  test("takes a window that opened after the newest block as open", async () => {
    const { timestamp } = await anvil.client.getBlock();
    const payment = await newPayment(anvil, { payer: newPayer(), value: 0n, validAfter: timestamp });
    await anvil.rpc("evm_increaseTime", [60]);
    expect((await simulate(payment)).ok).toBe(true);
  });
});

describe("a node that lies behind, where the payer has no money yet,", () => {
  test("is not believed: the next node is asked, and without one there is no answer", async () => {
    const relay = await startRpcRelay(anvil.url);
    const payment = await newPayment(anvil);
    const { authorization, signature } = payment;
    const [both, alone] = [connect(relay.url, anvil.url), connect(relay.url)];
    for (const chain of [both, alone]) await chain.newest();
    relay.behind(3);
    expect((await both.simulate(authorization, signature, WALLET)).ok).toBe(true);
    await expect(alone.simulate(authorization, signature, WALLET)).rejects.toMatchObject({
      kind: "unavailable",
    });
    await anvil.mine(3);
    expect((await alone.simulate(authorization, signature, WALLET)).ok).toBe(true);
    await relay.stop();
  });
});

describe("that something is not on the chain", () => {
  test("is not answered by a node that does not know the block, and the next one is asked", async () => {
    const relay = await startRpcRelay(anvil.url);
    const payment = await newPayment(anvil);
    const unknown = { kind: "error", code: -32_001, message: "Resource not found" } as const;
    relay.on("eth_call", unknown);
    relay.on("eth_getTransactionCount", unknown);
    const both = connect(relay.url, anvil.url);
    const before = await both.newest();
    expect(await both.isUsed(payment.authorization, before)).toBe(false);
    expect(await both.transactionCount(payment.authorization.from, before)).toBe(0);
    const alone = connect(relay.url);
    await expect(alone.isUsed(payment.authorization, before)).rejects.toMatchObject({ kind: "unavailable" });
    await anvil.cancelAuthorization(payment.payer, payment.key.nonce);
    const after = await both.newest();
    expect(await both.isUsed(payment.authorization, before)).toBe(false);
    expect(await both.isUsed(payment.authorization, after)).toBe(true);
    expect(await both.findUse(payment.authorization, 0, after.number)).toMatchObject({ cancelled: true });
    expect(await both.findUse(payment.authorization, 0, after.number - 1)).toBeNull();
    await relay.stop();
  });

  test("is read at a newest block that never goes back: the next node is asked when the first lies behind", async () => {
    const relay = await startRpcRelay(anvil.url);
    const chain = connect(relay.url);
    const both = connect(relay.url, anvil.url);
    await anvil.mine(3);
    const seen = await chain.newest();
    await both.newest();
    relay.behind(2);
    expect(await chain.newest()).toEqual(seen);
    await anvil.mine();
    expect((await both.newest()).number).toBe(seen.number + 1);
    expect((await chain.newest()).number).toBe(seen.number);
    relay.heal();
    expect((await chain.newest()).number).toBe(seen.number + 1);
    await relay.stop();
  });
});

test.each([
  ["already known", "accepted"],
  ["transaction already imported", "accepted"],
  ["ALREADY_EXISTS: already known", "accepted"],
  ["AlreadyKnown", "accepted"],
  ["nonce too low: next nonce 5, tx nonce 4", "nonce used"],
  ["OldNonce", "nonce used"],
  ["replacement transaction underpriced", "underpriced"],
  ["transaction underpriced", "underpriced"],
  ["max fee per gas less than block base fee: address 0x…", "underpriced"],
  ["insufficient funds for gas * price + value", "unknown"],
  ["txpool is full", "unknown"],
  ["internal error", "unknown"],
])("a node that says %p of a transaction: %s", async (message, reception) => {
  const relay = await startRpcRelay(anvil.url);
  relay.on("eth_sendRawTransaction", { kind: "error", message });
  expect(await connect(relay.url).broadcast("0x02", false)).toBe(reception as "accepted");
  expect(await connect(relay.url).broadcast("0x02", true)).toBe(reception as "accepted");
  await relay.stop();
});

test("a receipt of another transaction is no receipt", async () => {
  const relay = await startRpcRelay(anvil.url);
  const block = await anvil.client.getBlock();
  const hash = block.transactions[0] ?? (await anvil.transfers())[0]!.transaction_hash;
  const chain = connect(relay.url);
  expect((await chain.receipt(hash))?.hash).toBe(hash);
  relay.on("eth_getTransactionReceipt", {
    kind: "rewrite",
    rewrite: (result) => ({ ...(result as object), transactionHash: block.hash }),
  });
  await expect(chain.receipt(hash)).rejects.toMatchObject({ kind: "unavailable" });
  await relay.stop();
});

describe("what a payer has", () => {
  test("is that of the newest block, told with its height", async () => {
    const chain = connect(anvil.url);
    const { address } = newPayer();
    const payer: Hex = `0x${address.slice(2).toLowerCase()}`;
    await anvil.fundUsdc(address, 5n);
    await anvil.fundUsdc(address, 2n);
    expect(await chain.balanceOf(payer)).toMatchObject({ amount: 7n, block: await anvil.blockNumber() });
    expect(await chain.balanceOf(`0x${"12".repeat(20)}`)).toMatchObject({ amount: 0n });
  });

  test("is that of the block before, from a node that does not know the newest one yet", async () => {
    const relay = await startRpcRelay(anvil.url);
    const { address } = newPayer();
    const payer: Hex = `0x${address.slice(2).toLowerCase()}`;
    await anvil.fundUsdc(address, 5n);
    await anvil.fundUsdc(address, 2n);
    const block = (await anvil.blockNumber()) - 1;
    relay.on("eth_call", { kind: "error", code: -32_000, message: "header not found" }, 1);
    expect(await connect(relay.url).balanceOf(payer)).toMatchObject({ amount: 5n, block });
    relay.on("eth_call", { kind: "error", code: -32_000, message: "header not found" });
    await expect(connect(relay.url).balanceOf(payer)).rejects.toMatchObject({ kind: "unavailable" });
    await relay.stop();
  });
});

test("a contract wallet says which signatures it takes; one without code takes none", async () => {
  const chain = connect(anvil.url);
  const owner = newPayer();
  const from = await anvil.contractWallet(owner.address);
  const own = await newPayment(anvil, { payer: owner, from });
  const strangers = await newPayment(anvil, { payer: newPayer(), from });
  const plain = await newPayment(anvil);
  const asked = [own, { ...own, signature: `${own.signature}00aa` as const }, strangers, plain];
  const answers = asked.map((each) => chain.isSignedByContract(each.authorization, each.signature));
  expect(await Promise.all(answers)).toEqual([true, true, false, false]);
});

test("what a rollup takes for its data is asked of its oracle, and is nothing where there is none", async () => {
  const asked = connect(anvil.url);
  expect(await asked.feeBelow(700)).toBe(0n);
  // It answers with what it was asked for, the number of bytes.
  await anvil.rpc("anvil_setCode", ["0x420000000000000000000000000000000000000f", "0x60043560005260206000f3"]);
  expect(await asked.feeBelow(705.5)).toBe(706n);
  await anvil.rpc("anvil_setCode", ["0x420000000000000000000000000000000000000f", "0x"]);
});
