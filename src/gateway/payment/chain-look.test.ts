import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { startChain, type TestChain } from "../../../test/support/chain/chain.ts";
import { newPayer, type SignedPayment, signPayment } from "../../../test/support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import { outbound } from "../../../test/support/chain/wallet.ts";
import { BASE } from "../../../test/support/network.ts";
import { createChain } from "../../chain/chain.ts";
import { silentLog } from "../../core/log.ts";
import type { Authorization } from "../../x402/types.ts";
import { lowerHex } from "../../x402/types.ts";
import { createChainLook } from "./chain-look.ts";

const UNUSED = `0x${"0".repeat(64)}`;

let anvil: TestChain;
const relays: RpcRelay[] = [];
beforeAll(async () => {
  anvil = await startChain();
});
afterAll(async () => {
  await Promise.all(relays.map((relay) => relay.stop()));
  await anvil.stop();
});

async function relayed(): Promise<RpcRelay> {
  const relay = await startRpcRelay(anvil.url);
  relays.push(relay);
  return relay;
}

/** Of the machine, in milliseconds: it goes with the chain's. */
let machineTime = 0;

/** A look at these nodes, each of which has worked before. */
async function lookAt(...urls: string[]) {
  const chain = createChain({ network: BASE, urls, outbound, log: silentLog, timeoutMs: 2000 });
  await chain.check();
  return createChainLook(chain, { earliest: () => machineTime }, silentLog);
}

/** A funded payment that is good for a minute of the chain's time. */
async function funded(): Promise<SignedPayment> {
  const payer = newPayer();
  await anvil.fundUsdc(payer.address, 1_000n);
  const { timestamp } = await anvil.client.getBlock();
  machineTime = Number(timestamp) * 1000;
  const window = { validAfter: 0, validBefore: Number(timestamp) + 60 };
  return signPayment(payer, { to: newPayer().address, value: 7n, ...window });
}

const endOf = ({ authorization }: SignedPayment) => Number(authorization.validBefore);

/** As the gateway knows it. */
function known({ authorization }: SignedPayment): Authorization {
  const { from, to, value, validAfter, validBefore, nonce } = authorization;
  const [payer, payee] = [lowerHex(from), lowerHex(to)];
  const numbers = { value: BigInt(value), validAfter: BigInt(validAfter), validBefore: BigInt(validBefore) };
  return { from: payer, to: payee, nonce, ...numbers };
}

/** Moves the chain to this many seconds after the end of the payment, and the machine's clock to this many others. */
async function passTime(payment: SignedPayment, seconds: number, machineSeconds = seconds): Promise<void> {
  machineTime = (endOf(payment) + machineSeconds) * 1000;
  await anvil.rpc("evm_setNextBlockTimestamp", [endOf(payment) + seconds]);
  await anvil.mine();
}

/** The node's blocks have this time. */
function dated(relay: RpcRelay, seconds: number): void {
  const rewrite = (block: unknown) => ({ ...(block as object), timestamp: `0x${seconds.toString(16)}` });
  relay.on("eth_getBlockByNumber", { kind: "rewrite", rewrite });
}

test.each([0, 1])(
  "a node whose times lie ahead does not end a payment that may still land (node %p of two)",
  async (place) => {
    const [payment, relay] = [await funded(), await relayed()];
    dated(relay, endOf(payment) + 600);
    const look = await lookAt(...(place === 0 ? [relay.url, anvil.url] : [anvil.url, relay.url]));
    expect(await look(known(payment))).toBeNull();
  },
);

test("a node that denies the use of a payment which another one shows does not end it", async () => {
  const [payment, relay] = [await funded(), await relayed()];
  relay.on("eth_call", { kind: "result", result: UNUSED });
  const look = await lookAt(relay.url, anvil.url);
  const transaction = await anvil.collectAsStranger(payment);
  expect(await look(known(payment))).toMatchObject({ kind: "collected", transaction });
  await passTime(payment, 120);
  expect(await look(known(payment))).toMatchObject({ kind: "collected", transaction });
});

test("a node that has come to be one of another chain does not end a payment that the others show", async () => {
  const [payment, relay] = [await funded(), await relayed()];
  const look = await lookAt(relay.url, anvil.url);
  const head = await anvil.rpc("eth_getBlockByNumber", ["latest", false]);
  const timestamp = `0x${(endOf(payment) + 600).toString(16)}`;
  const foreign = { ...(head as object), number: "0x5000", hash: `0x${"77".repeat(32)}`, timestamp };
  relay.on("eth_chainId", { kind: "result", result: "0x1" });
  relay.on("eth_getBlockByNumber", { kind: "result", result: foreign });
  relay.on("eth_call", { kind: "result", result: UNUSED });
  relay.on("eth_getLogs", { kind: "result", result: [] });
  relay.on("eth_getTransactionReceipt", { kind: "result", result: null });
  const transaction = await anvil.collectAsStranger(payment);
  expect(await look(known(payment))).toMatchObject({
    kind: "collected",
    transaction,
  });
});

test("a payment that no node shows is over once they all are a minute past its end, without those that are away", async () => {
  const [payment, behind, silent] = [await funded(), await relayed(), await relayed()];
  behind.standStill(await anvil.blockNumber());
  silent.on("eth_getBlockByNumber", { kind: "error" });
  const look = await lookAt(anvil.url, silent.url);
  const both = await lookAt(anvil.url, behind.url);
  await passTime(payment, 60, 61);
  expect(await look(known(payment))).toBeNull();
  await passTime(payment, 61);
  expect(await both(known(payment))).toBeNull();
  expect(await look(known(payment))).toMatchObject({ kind: "declined", isFinal: true });
});

test("a node that does not tell of a payment, and may know of its use, keeps it open", async () => {
  const [payment, limited] = [await funded(), await relayed()];
  limited.on("eth_call", { kind: "error", code: 429, message: "Too Many Requests" });
  const look = await lookAt(limited.url, anvil.url);
  await passTime(payment, 120);
  expect(await look(known(payment))).toBeNull();
  limited.heal();
  expect(await look(known(payment))).toMatchObject({ kind: "declined", isFinal: true });
});

test("a lone node whose blocks are of a later time than ours does not end a payment that may still land", async () => {
  const payment = await funded();
  const look = await lookAt(anvil.url);
  await passTime(payment, 3_600, 60);
  expect(await look(known(payment))).toBeNull();
  await passTime(payment, 3_700, 61);
  expect(await look(known(payment))).toMatchObject({ kind: "declined", isFinal: true });
});

describe.each([0, 1])("of two nodes one lies (node %p):", (place) => {
  const TOKEN = "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913";
  const USED = "0x98de503528ee59b575ef0c0a2576a82497bfc029a5685b209e9ec333479b10a5";
  const CANCELED = "0x1cdd46ff242716cdaa72d159d339a485b3438398348d68f09d7c8c0a59353d81";
  const TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef";
  const HASH = `0x${"5a".repeat(32)}` as const;
  const word = (hex: string) => `0x${hex.slice(2).padStart(64, "0")}`;

  const withLiar = (relay: RpcRelay) => lookAt(...(place === 0 ? [relay.url, anvil.url] : [anvil.url, relay.url]));

  /** The node shows the events of a use that never was, in a receipt of so many blocks after its newest one. */
  async function forge(relay: RpcRelay, payment: SignedPayment, first: string, blocksAhead = 0): Promise<void> {
    const { from, to, value, nonce } = known(payment);
    const { number, hash } = await anvil.client.getBlock();
    const blockNumber = `0x${(number + BigInt(blocksAhead)).toString(16)}`;
    const at = { blockNumber, blockHash: hash, transactionHash: HASH, transactionIndex: "0x0" };
    const end = { ...at, address: TOKEN, topics: [first, word(from), nonce], data: "0x" };
    const data = word(`0x${value.toString(16)}`);
    const logs = [end, { ...at, address: TOKEN, topics: [TRANSFER, word(from), word(to)], data }];
    relay.on("eth_call", { kind: "result", result: word("0x1") });
    relay.on("eth_getLogs", { kind: "result", result: [end] });
    relay.on("eth_getTransactionReceipt", {
      kind: "choose",
      choose: ([asked]) =>
        asked === HASH ? { kind: "result", result: { ...at, status: "0x1", from, to: TOKEN, logs } } : { kind: "pass" },
    });
  }

  test.each([0, 1, 1_000])("a use that it forges, %p blocks after its newest one, settles nothing", async (ahead) => {
    const [payment, relay] = [await funded(), await relayed()];
    await anvil.mine();
    const look = await withLiar(relay);
    await forge(relay, payment, USED, ahead);
    expect(await look(known(payment))).toBeNull();
    expect(await look(known(payment), HASH)).toBeNull();
    const transaction = await anvil.collectAsStranger(payment);
    expect(await look(known(payment), HASH)).toMatchObject({ kind: "collected", transaction });
  });

  test("a cancellation that it forges ends nothing, and what all show does", async () => {
    const [payment, relay] = [await funded(), await relayed()];
    const look = await withLiar(relay);
    await forge(relay, payment, CANCELED);
    expect(await look(known(payment))).toBeNull();
    const payer = newPayer();
    const mine = await signPayment(payer, { to: newPayer().address, value: 7n, validBefore: endOf(payment) });
    await anvil.cancelAuthorization(payer, mine.authorization.nonce);
    relay.heal();
    expect(await look(known(mine))).toMatchObject({ kind: "declined", isFinal: true });
  });

  test.each([{ logs: [] }, { status: "0x0" }, { status: "0x0", logs: [] }])(
    "its receipt with %p of the transaction that has collected the payment ends nothing",
    async (fields) => {
      const [payment, relay] = [await funded(), await relayed()];
      const look = await withLiar(relay);
      const rewrite = (receipt: unknown) => receipt && { ...(receipt as object), ...fields };
      relay.on("eth_getTransactionReceipt", { kind: "rewrite", rewrite });
      const transaction = await anvil.collectAsStranger(payment);
      expect(await look(known(payment))).toMatchObject({ kind: "collected", transaction });
      expect(await (await lookAt(relay.url))(known(payment))).toBeNull();
    },
  );
});

test("a use hundreds of blocks back is found at a node that searches ten blocks at a time", async () => {
  const [payment, relay] = [await funded(), await relayed()];
  const look = await lookAt(relay.url);
  const error = { kind: "error", code: -32_600, message: "up to a 10 block range" } as const;
  relay.on("eth_getLogs", {
    kind: "choose",
    choose([filter]) {
      const { fromBlock, toBlock } = filter as { fromBlock: string; toBlock: string };
      return Number(toBlock) - Number(fromBlock) < 10 ? { kind: "pass" } : error;
    },
  });
  const transaction = await anvil.collectAsStranger(payment);
  await anvil.mine(420);
  expect(await look(known(payment))).toMatchObject({ kind: "collected", transaction });
});

test("a use is found in time though the first node takes long for each answer", async () => {
  const payment = await funded();
  const slow = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    async fetch(request) {
      const body = await request.text();
      await Bun.sleep(1_800);
      return fetch(anvil.url, { method: "POST", headers: { "content-type": "application/json" }, body });
    },
  });
  const look = await lookAt(slow.url.href, anvil.url);
  const transaction = await anvil.collectAsStranger(payment);
  expect(await look(known(payment))).toMatchObject({ kind: "collected", transaction });
  await slow.stop(true);
});
