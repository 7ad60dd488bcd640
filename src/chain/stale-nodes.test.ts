// Nodes that answer, and know less than others or another chain: stand-ins that freeze or rewrite what a real node says.

import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, spyOn, test } from "bun:test";
import { startChain, type TestChain } from "../../test/support/chain/chain.ts";
import { newPayer, signPayment } from "../../test/support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../../test/support/chain/rpc-relay.ts";
import { newPayment, outbound } from "../../test/support/chain/wallet.ts";
import { BASE } from "../../test/support/network.ts";
import { until } from "../../test/support/until.ts";
import type { LogFields } from "../core/log.ts";
import { type Chain, createChain } from "./chain.ts";

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
  const chain = createChain({ network: BASE, urls, outbound, log, clock, timeoutMs: 2000 });
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

/** The stand-in's newest block is so many blocks and seconds ahead of the real one, or behind it. */
function tellAhead(relay: RpcRelay, { blocks = 0, seconds = 0 }: { blocks?: number; seconds?: number }): void {
  const rewrite = (block: unknown, [named]: readonly unknown[]) => {
    const { number, timestamp, hash } = block as { number: string; timestamp: string; hash: string };
    if (named !== "latest") return block;
    const added = (to: string, more: number) => `0x${(Number(to) + more).toString(16)}`;
    const ahead = { number: added(number, blocks), timestamp: added(timestamp, seconds) };
    return { ...(block as object), ...ahead, hash: `0xbad${hash.slice(5)}` };
  };
  relay.on("eth_getBlockByNumber", { kind: "rewrite", rewrite });
}

const failures = (lines: [string, LogFields][]) =>
  lines
    .filter(([event]) => event.startsWith("rpc_endpoint"))
    .map(([event, { endpoint, error }]) => `${event} ${endpoint}${error === undefined ? "" : ` ${error}`}`);

const AHEAD = [
  [{ blocks: 5_000 }, "before"],
  [{ blocks: 5_000 }, "after"],
  [{ seconds: 90 }, "before"],
  [{ seconds: 90 }, "after"],
  [{ blocks: 500, seconds: 600 }, "after"],
] as const;

describe("among nodes of which one is wrong", () => {
  let real: TestChain;
  let relays: RpcRelay[];
  beforeEach(async () => {
    real = await startChain();
    relays = await Promise.all([startRpcRelay(real.url), startRpcRelay(real.url)]);
  });
  afterEach(async () => {
    for (const relay of relays) await relay.stop();
    await real.stop();
  });
  /** Each of three looks finds a new block of the real node. */
  async function expectReal(chain: Chain) {
    for (let looks = 0; looks < 3; looks++) {
      await real.mine();
      expect((await chain.newest()).number).toBe(await real.blockNumber());
    }
  }

  test.each(AHEAD)(
    "one that is ahead by %p from %s the first look on is put aside, and no honest one",
    async (by, when) => {
      const [bad] = relays as [RpcRelay];
      const { chain, lines } = connect(bad.url, real.url);
      if (when === "after") await expectReal(chain);
      tellAhead(bad, by);
      await expectReal(chain);
      expect(failures(lines)).toEqual(["rpc_endpoint_failed 0 ahead of the others"]);
      bad.heal();
      await until(async () => {
        await chain.newest();
        return failures(lines).includes("rpc_endpoint_recovered 0");
      });
      await expectReal(chain);
      expect(failures(lines)).toHaveLength(2);
    },
  );

  test.each([3, 100])(
    "one that tells a newest block %p blocks ahead, of which it knows no more itself, is put aside until it does, and its block is forgotten",
    async (blocks) => {
      const [bad] = relays as [RpcRelay];
      const { chain, lines } = connect(bad.url, real.url);
      const { authorization } = await newPayment(real);
      const isUsed = async () => chain.isUsed(authorization, await chain.newest()).catch(() => null);
      expect(await isUsed()).toBe(false);
      tellAhead(bad, { blocks });
      await until(async () => (await isUsed()) === false);
      const asked = bad.count("eth_chainId");
      // Tested again, and put aside for longer.
      await until(async () => {
        expect(await isUsed()).toBe(false);
        return bad.count("eth_chainId") >= asked + 2;
      });
      await expectReal(chain);
      expect(failures(lines)).toEqual(["rpc_endpoint_failed 0 a newest block that it does not know"]);
      bad.heal();
      await until(async () => {
        await chain.newest();
        return failures(lines).includes("rpc_endpoint_recovered 0");
      });
      await expectReal(chain);
    },
  );

  test.each([
    [100, "before"],
    [100, "after"],
    [5_000, "before"],
    [5_000, "after"],
  ])("one that tells times %p s early at the right height from %s the first look on is put aside", async (by, when) => {
    const [bad] = relays as [RpcRelay];
    const { chain, lines } = connect(bad.url, real.url);
    if (when === "after") await expectReal(chain);
    tellAhead(bad, { seconds: -by });
    for (let looks = 0; looks < 3; looks++) {
      await expectReal(chain);
      expect(Date.now() / 1000 - (await chain.newest()).timestamp).toBeLessThan(30);
    }
    expect(failures(lines)).toEqual(["rpc_endpoint_failed 0 earlier than the others"]);
    bad.heal();
    await until(async () => {
      await chain.newest();
      return failures(lines).includes("rpc_endpoint_recovered 0");
    });
    await expectReal(chain);
  });

  test("one that tells a time of now and a number far below is not believed against the others", async () => {
    const [bad, other] = relays as [RpcRelay, RpcRelay];
    await real.mine(500);
    await real.rpc("evm_setTime", [Math.floor(Date.now() / 1000)]);
    tellAhead(bad, { blocks: -400 });
    const { chain, lines } = connect(bad.url, other.url, real.url);
    await expectReal(chain);
    expect(failures(lines)).not.toContain("rpc_endpoint_failed 1 ahead of the others");
    expect(failures(lines)).not.toContain("rpc_endpoint_failed 2 ahead of the others");
  });

  test("one that was moved to another chain with higher blocks is excluded for good, and its head is forgotten", async () => {
    const [bad] = relays as [RpcRelay];
    const { chain, lines } = connect(bad.url, real.url);
    await expectReal(chain);
    bad.on("eth_chainId", { kind: "result", result: "0x14a34" });
    tellAhead(bad, { blocks: 500 });
    await expectReal(chain);
    expect(failures(lines)).toEqual(["rpc_endpoint_wrong_chain 0"]);
    bad.heal();
    const asked = bad.count("eth_getBlockByNumber");
    await expectReal(chain);
    expect(bad.count("eth_getBlockByNumber")).toBe(asked);
  });
});

test("nodes that are all ahead of the machine's clock, or have all leapt, are believed", async () => {
  const real = await startChain();
  const relays = await Promise.all([startRpcRelay(real.url), startRpcRelay(real.url)]);
  const { chain, lines } = connect(...relays.map(({ url }) => url));
  const before = await chain.newest();
  for (const relay of relays) tellAhead(relay, { seconds: 600 });
  await real.mine();
  expect((await chain.newest()).number).toBe(before.number + 1);
  for (const relay of relays) relay.heal();
  for (const relay of relays) tellAhead(relay, { blocks: 5_000, seconds: 600 });
  await real.mine();
  expect((await chain.newest()).number).toBe(before.number + 5_002);
  expect(failures(lines)).toEqual([]);
  for (const relay of relays) await relay.stop();
  await real.stop();
});

test("nothing is refused at a newest block that stands still, of which the payer's money may be later", async () => {
  const real = await startChain();
  const relay = await startRpcRelay(real.url);
  const { chain, setClockAhead } = connect(relay.url);
  await chain.newest();
  relay.standStill(await real.blockNumber());
  const { authorization, signature } = await newPayment(real);
  const simulated = () => chain.simulate(authorization, signature, authorization.to);
  expect(await simulated()).toMatchObject({ ok: false });
  const now = performance.now.bind(performance);
  const later = spyOn(performance, "now").mockImplementation(() => now() + 10_000);
  // Blocks are rare on some chains: a new one may have been made only now.
  setClockAhead(5_000);
  expect(await simulated()).toMatchObject({ ok: false });
  setClockAhead(11_000);
  await expect(simulated()).rejects.toMatchObject({ kind: "unavailable", retryAfterSeconds: 2 });
  relay.heal();
  expect(await simulated()).toMatchObject({ ok: true });
  later.mockRestore();
  await relay.stop();
  await real.stop();
});
