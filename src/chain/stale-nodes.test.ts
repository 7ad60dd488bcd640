// Nodes that answer, and know less than others: stand-ins that freeze what a real node says.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { startChain, type TestChain } from "../../test/support/chain/chain.ts";
import { newPayer, signPayment } from "../../test/support/chain/payments.ts";
import { startRpcRelay } from "../../test/support/chain/rpc-relay.ts";
import { newPayment, outbound } from "../../test/support/chain/wallet.ts";
import { until } from "../../test/support/until.ts";
import type { LogFields } from "../core/log.ts";
import { createChain } from "./chain.ts";

let anvil: TestChain;
beforeAll(async () => {
  anvil = await startChain();
});
afterAll(() => anvil.stop());

/** A chain whose monotonic clock and machine's clock are set by the test, with all that it logged. */
function connect(...urls: string[]) {
  const lines: [string, LogFields][] = [];
  const write = (event: string, fields: LogFields = {}) => void lines.push([event, fields]);
  const log = { debug() {}, info: write, warn: write, error: write };
  let aheadMs = 0;
  const clock = { now: () => Date.now() + aheadMs };
  const chain = createChain({ urls, outbound, log, clock, timeoutMs: 2000 });
  return {
    chain,
    lines,
    setClockAhead: (ms: number) => {
      aheadMs = ms;
    },
  };
}

/** Freezes the newest block that a stand-in for a node tells. */
async function frozenNode() {
  const relay = await startRpcRelay(anvil.url);
  const newest = await anvil.client.request({ method: "eth_getBlockByNumber", params: ["latest", false] });
  relay.on("eth_getBlockByNumber", { kind: "result", result: newest });
  return relay;
}

test("a stand-in that stands still is put aside for the node with newer blocks, once in the log, until it has caught up", async () => {
  const relay = await frozenNode();
  const { chain, lines, setClockAhead } = connect(relay.url, anvil.url);
  const before = await chain.newest();
  await anvil.rpc("evm_setNextBlockTimestamp", [before.timestamp + 60]);
  await anvil.mine();
  setClockAhead(60_000);
  await until(async () => (await chain.newest()).number === before.number + 1);
  expect(lines.filter(([event]) => event === "rpc_endpoint_failed")).toEqual([
    ["rpc_endpoint_failed", { endpoint: 0, method: "eth_getBlockByNumber", error: "behind the others" }],
  ]);
  const asked = relay.count("eth_gasPrice");
  await chain.tip();
  expect(relay.count("eth_gasPrice")).toBe(asked);
  await relay.stop();
});

test("a receipt that a stand-in lacks is asked of the other nodes before it counts as absent", async () => {
  const relay = await startRpcRelay(anvil.url);
  relay.on("eth_getTransactionReceipt", { kind: "result", result: null });
  const payer = newPayer();
  await anvil.fundUsdc(payer.address, 1_000n);
  const hash = await anvil.collectAsStranger(await signPayment(payer, { to: newPayer().address, value: 7n }));
  const { chain } = connect(relay.url, anvil.url);
  await chain.newest();
  await chain.check();
  expect(await chain.receipt(hash)).toMatchObject({ hash });
  expect(await connect(relay.url).chain.receipt(hash)).toBeNull();
  await relay.stop();
});

test("a contract wallet that a stand-in does not know yet is asked of the other nodes before a signature counts as wrong", async () => {
  const relay = await startRpcRelay(anvil.url);
  relay.on("eth_call", { kind: "result", result: "0x" });
  const owner = newPayer();
  const from = await anvil.contractWallet(owner.address);
  const { authorization, signature } = await newPayment(anvil, { payer: owner, from });
  const { chain } = connect(relay.url, anvil.url);
  await chain.check();
  expect(await chain.isSignedByContract(authorization, signature)).toBe(true);
  expect(await connect(relay.url).chain.isSignedByContract(authorization, signature)).toBe(false);
  await relay.stop();
});

test("the nodes are compared at once when one contradicts a stand-in that stands still, so the newest block is that of the one that knows more", async () => {
  const relay = await startRpcRelay(anvil.url);
  relay.standStill(await anvil.blockNumber());
  const { chain } = connect(relay.url, anvil.url);
  await chain.check();
  const before = await chain.newest();
  const { authorization, signature } = await newPayment(anvil);
  expect((await chain.newest()).number).toBe(before.number);
  const wallet = authorization.to;
  expect(await chain.simulate(authorization, signature, wallet)).toMatchObject({ ok: true });
  expect((await chain.newest()).number).toBe(before.number + 1);
  await relay.stop();
});
