import { afterAll, beforeAll, expect, test } from "bun:test";
import { startChain, type TestChain } from "../../../test/support/chain/chain.ts";
import { newPayer, type SignedPayment, signPayment } from "../../../test/support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import { outbound } from "../../../test/support/chain/wallet.ts";
import { createChain } from "../../chain/chain.ts";
import { silentLog } from "../../core/log.ts";
import { lowerHex } from "../../x402/fields.ts";
import type { Authorization } from "../../x402/types.ts";
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

/** A look at these nodes, each of which has worked before. */
async function lookAt(...urls: string[]) {
  const chain = createChain({ urls, outbound, log: silentLog, timeoutMs: 2000 });
  await chain.check();
  return createChainLook(chain, silentLog);
}

/** A funded payment that is good for a minute of the chain's time. */
async function funded(): Promise<SignedPayment> {
  const payer = newPayer();
  await anvil.fundUsdc(payer.address, 1_000n);
  const { timestamp } = await anvil.client.getBlock();
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

/** Moves the chain to this many seconds after the end of the payment. */
async function passTime(payment: SignedPayment, seconds: number): Promise<void> {
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

test("a payment that no node shows is over once they all are a minute past its end, without those that do not answer", async () => {
  const [payment, behind, silent] = [await funded(), await relayed(), await relayed()];
  behind.standStill(await anvil.blockNumber());
  silent.on("eth_call", { kind: "error" });
  const look = await lookAt(anvil.url, silent.url);
  const both = await lookAt(anvil.url, behind.url);
  await passTime(payment, 60);
  expect(await look(known(payment))).toBeNull();
  await passTime(payment, 61);
  expect(await both(known(payment))).toBeNull();
  expect(await look(known(payment))).toMatchObject({ kind: "declined", isFinal: true });
});
