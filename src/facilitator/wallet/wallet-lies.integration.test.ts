// Nodes that say what is not so: in one answer, in one field, for a while. A payment that was collected is never
// recorded as failed for it, and what the lies held up goes on when they end.

import { describe, expect, test } from "bun:test";
import { numberToHex } from "viem";
import type { TestChain } from "../../../test/support/chain/chain.ts";
import { type RpcFault, type RpcRelay, startRpcRelay } from "../../../test/support/chain/rpc-relay.ts";
import { newPayment, type TestWallet } from "../../../test/support/chain/wallet.ts";
import { type Payment, useChain } from "../../../test/support/chain/wallet-tests.ts";
import { until } from "../../../test/support/until.ts";

const USED = "0x98de503528ee59b575ef0c0a2576a82497bfc029a5685b209e9ec333479b10a5";
const WORD = `0x${"77".repeat(32)}`;

let chain: TestChain;
let relay: RpcRelay;
const { startBehind: start, transfersOf } = useChain((nodes) => {
  ({ chain, relay } = nodes);
});

/** What whoever has seen the payment may broadcast. */
function leaked({ authorization, signature }: Awaited<ReturnType<typeof newPayment>>) {
  const { value, validAfter, validBefore } = authorization;
  const words = { value: `${value}`, validAfter: `${validAfter}`, validBefore: `${validBefore}` };
  return { authorization: { ...authorization, ...words }, signature };
}

/** The chain is looked at with each block, and without one only every second. */
function mineUntil(what: () => Promise<boolean>): Promise<void> {
  return until(async () => {
    await chain.mine();
    await Bun.sleep(150);
    return what();
  });
}

const none: RpcFault = { kind: "result", result: null };
const inReceipts = (fields: object): RpcFault => ({
  kind: "rewrite",
  rewrite: (result) => (result === null ? null : { ...(result as object), ...fields }),
});
/** Of somebody else's authorization, as a node gives it that does not filter. */
const foreignLog = {
  address: "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913",
  topics: [USED, `0x${"00".repeat(12)}${"55".repeat(20)}`, WORD],
  data: "0x",
  transactionHash: WORD,
};

describe("a collected payment", () => {
  test.each<[string, Record<string, RpcFault>]>([
    [
      "has no receipt, and does not filter events",
      {
        eth_getTransactionReceipt: none,
        eth_getLogs: { kind: "rewrite", rewrite: (logs) => [foreignLog, ...(logs as object[])] },
      },
    ],
    ["says that the transaction reverted", { eth_getTransactionReceipt: inReceipts({ status: "0x0" }) }],
    ["has receipts without events", { eth_getTransactionReceipt: inReceipts({ logs: [] }) }],
    [
      "has receipts of a revert and no events at all",
      {
        eth_getTransactionReceipt: inReceipts({ logs: [] }),
        eth_getLogs: { kind: "result", result: [] },
      },
    ],
    [
      "has no receipt, and tells the state before the block",
      {
        eth_getTransactionReceipt: none,
        eth_call: { kind: "result", result: `0x${"00".repeat(32)}` },
      },
    ],
  ])("is settled in the end, although the node for a while %s", async (_, faults) => {
    const wallet = await start();
    const payment = await newPayment(chain);
    const calls = Object.keys(faults)[0] ?? "";
    for (const [method, fault] of Object.entries(faults)) relay.on(method, fault);
    const before = relay.count(calls);
    await wallet.collect(payment);
    await mineUntil(async () => {
      return relay.count(calls) >= before + 7 || (await wallet.payment(payment))?.status !== "sent";
    });
    expect((await wallet.payment(payment))?.status).toBe("sent");
    relay.heal();
    expect(await wallet.ended(payment)).toMatchObject({ status: "settled", reason: null });
    expect(await transfersOf(payment)).toHaveLength(1);
  });
});

test.each<[string, Record<string, RpcFault>]>([
  ["receipts of a revert without events", { eth_getTransactionReceipt: inReceipts({ status: "0x0", logs: [] }) }],
  ["receipts without events", { eth_getTransactionReceipt: inReceipts({ logs: [] }) }],
  ["no transaction of the wallet", { eth_getTransactionCount: { kind: "result", result: "0x0" } }],
])("a payment is settled by what the second node shows while the first one shows %s", async (_, faults) => {
  const wallet = await start({}, [chain.url]);
  const before = await newPayment(chain);
  await wallet.collect(before);
  expect((await wallet.ended(before))?.status).toBe("settled");
  for (const [method, fault] of Object.entries(faults)) relay.on(method, fault);
  const payment = await newPayment(chain);
  await wallet.collect(payment);
  await mineUntil(async () => (await wallet.payment(payment))?.status !== "sent");
  expect((await wallet.payment(payment))?.status).toBe("settled");
});

test("a collected payment is not failed by a first node that denies its transaction and its use, while another one knows of the use", async () => {
  const other = await startRpcRelay(chain.url);
  const wallet = await start({}, [other.url]);
  const payment = await newPayment(chain);
  relay.on("eth_getTransactionReceipt", inReceipts({ status: "0x0", logs: [] }));
  relay.on("eth_call", { kind: "result", result: `0x${"00".repeat(32)}` });
  other.on("eth_getTransactionReceipt", none);
  const message = "execution reverted: FiatTokenV2: authorization is expired";
  relay.on("eth_estimateGas", { kind: "error", code: 3, message });
  await wallet.claim(payment);
  await wallet.send(payment);
  const asked = relay.count("eth_call");
  await mineUntil(async () => {
    return relay.count("eth_call") >= asked + 7 || (await wallet.payment(payment))?.status !== "sent";
  });
  expect((await wallet.payment(payment))?.status).toBe("sent");
  relay.heal();
  expect(await wallet.ended(payment)).toMatchObject({ status: "settled", reason: null });
  await other.stop();
});

test("a block of a time far ahead ends no payment that the token would still take", async () => {
  const wallet = await start();
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  const looks = relay.count("eth_call");
  const ahead = numberToHex(payment.authorization.validBefore + 1n);
  const later = (block: unknown) => ({ ...(block as object), timestamp: ahead });
  // A transaction that no block has room for.
  await chain.rpc("evm_setBlockGasLimit", [numberToHex(30_000)]);
  relay.on("eth_getBlockByNumber", { kind: "rewrite", rewrite: later });
  await mineUntil(async () => relay.count("eth_call") >= looks + 2);
  expect((await wallet.payment(payment))?.status).toBe("sent");
  relay.heal();
  await chain.rpc("evm_setBlockGasLimit", [numberToHex(200_000_000)]);
  await mineUntil(async () => (await wallet.payment(payment))?.status !== "sent");
  expect((await wallet.payment(payment))?.status).toBe("settled");
  expect(await transfersOf(payment)).toHaveLength(1);
});

test("a payment whose transactions are all closed is not given up while the node finds no event", async () => {
  const dying = await start({ wrap: (real) => ({ ...real, broadcast: async () => "unknown" }) });
  const payment = await newPayment(chain);
  await dying.collect(payment);
  await dying.wallet.stop();
  const [row] = await dying.rows();
  await chain.rpc("eth_sendRawTransaction", [row!.raw]);
  const t = dying.store.read.tables.facilitatorTransactions;
  await dying.store.write((tx) => tx.db.update(t).set({ open: false }));
  relay.on("eth_getLogs", { kind: "result", result: [] }, 7);
  const wallet = await start({ store: dying.store });
  await mineUntil(async () => relay.count("eth_getLogs") > 7);
  expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
});

describe("a node that takes no block hash in place of a number", () => {
  const byHash = (params: readonly unknown[]) => typeof params[1] === "object";
  const invalid = {
    kind: "error",
    code: -32_602,
    message: "invalid argument 1: hex string expected",
  } as const;
  const refuseHashes = () => {
    for (const method of ["eth_call", "eth_getTransactionCount"]) {
      relay.on(method, { kind: "choose", choose: (params) => (byHash(params) ? invalid : { kind: "pass" }) });
    }
  };

  test("is asked by number: payments settle, fail and expire as anywhere", async () => {
    refuseHashes();
    const wallet = await start();
    const [paid, cancelled] = [await newPayment(chain), await newPayment(chain)];
    await wallet.collect(paid);
    expect((await wallet.ended(paid))?.status).toBe("settled");
    const before = await chain.blockNumber();
    await chain.pauseMining();
    const sent = relay.passed("eth_sendRawTransaction", relay.count("eth_sendRawTransaction") + 1);
    await wallet.collect(cancelled);
    await sent;
    await chain.cancelAuthorization(cancelled.payer, cancelled.key.nonce);
    await chain.mine();
    expect((await wallet.ended(cancelled))?.reason).toBe("the authorization was cancelled");
    const params = [...relay.params("eth_call"), ...relay.params("eth_getTransactionCount")];
    expect(params.filter(byHash)).toHaveLength(1);
    expect(relay.params("eth_call")).toContainEqual([expect.anything(), numberToHex(before + 1)]);
  });

  test("says nothing of a block that is not the one at its height", async () => {
    refuseHashes();
    const wallet = await start();
    const payment = await newPayment(chain);
    const at = await wallet.chain.newest();
    const elsewhere = { ...at, hash: `0x${"77".repeat(32)}` } as const;
    await expect(wallet.chain.isUsed(payment.authorization, elsewhere)).rejects.toThrow("another block");
    expect(await wallet.chain.isUsed(payment.authorization, at)).toBe(false);
    const later = { ...at, number: at.number + 5 };
    await expect(wallet.chain.isUsed(payment.authorization, later)).rejects.toThrow();
  });
});

test("an authorization used by somebody else is told from ours, although no node searches events", async () => {
  const wallet = await start();
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  await chain.collectAsStranger(leaked(payment));
  relay.on("eth_getLogs", { kind: "error", code: -32_601, message: "method not supported" });
  await mineUntil(async () => (await wallet.payment(payment))?.status !== "sent");
  expect(await wallet.payment(payment)).toMatchObject({
    status: "failed",
    reason: "the authorization was used elsewhere",
    foreign_transaction: null,
  });
});

test("a node that searches few blocks at a time is asked in small pieces", async () => {
  const wallet = await start();
  const payment = await newPayment(chain);
  await chain.pauseMining();
  await wallet.collect(payment);
  const foreign = await chain.collectAsStranger(leaked(payment));
  relay.on("eth_getLogs", {
    kind: "rewrite",
    rewrite: (logs, [filter]) => {
      const { fromBlock, toBlock } = filter as { fromBlock: string; toBlock: string };
      return Number(toBlock) - Number(fromBlock) < 10 ? logs : "up to a 10 block range";
    },
  });
  await chain.mine(12);
  expect(await wallet.ended(payment)).toMatchObject({
    status: "failed",
    foreign_transaction: foreign,
  });
});

test("nonces far beyond any, that a node once told, hold up no payment when the node counts right again", async () => {
  const wallet = await start();
  const far = numberToHex(1_000_000);
  relay.on("eth_getTransactionCount", { kind: "result", result: far });
  await wallet.collect(await newPayment(chain));
  expect((await wallet.rows()).map((row) => row.wallet_nonce)).toEqual([1_000_000]);
  relay.heal();
  const isNear = async () => (await wallet.rows()).some((row) => row.wallet_nonce === 0);
  await until(async () => {
    await wallet.collect(await newPayment(chain));
    return isNear();
  });
  const payments = [await newPayment(chain), await newPayment(chain)];
  for (const payment of payments) await wallet.collect(payment);
  for (const payment of payments) expect((await wallet.ended(payment))?.status).toBe("settled");
  const looks = relay.count("eth_getBlockByNumber");
  await chain.mine(8);
  await relay.called("eth_getBlockByNumber", looks + 4);
  // The way to the others, which is long, is not paved with transactions that do nothing.
  expect((await wallet.rows()).filter((row) => row.payer === null)).toEqual([]);
});

/** Blocks that have no room for ours, until the watcher has looked so often. */
async function mineFull(looks: number): Promise<void> {
  await chain.rpc("evm_setBlockGasLimit", [numberToHex(30_000)]);
  const before = relay.count("eth_getTransactionCount");
  await mineUntil(async () => relay.count("eth_getTransactionCount") >= before + looks);
}

async function expectAllSettle(wallet: TestWallet, payments: readonly Payment[]): Promise<void> {
  await chain.rpc("evm_setBlockGasLimit", [numberToHex(200_000_000)]);
  const statuses = () => Promise.all(payments.map(async (payment) => (await wallet.payment(payment))?.status));
  await mineUntil(async () => !(await statuses()).includes("sent"));
  expect(await statuses()).toEqual(payments.map(() => "settled"));
  for (const payment of payments) expect(await transfersOf(payment)).toHaveLength(1);
}

describe("a node that counts transactions which the wallet has not made", () => {
  const counts = ["0xffffffff", "0x1388", "0x40", "0x4"] as const;

  test.each(counts)("is not believed against the second one when it counts %s", async (count) => {
    const wallet = await start({}, [chain.url]);
    const warm = await newPayment(chain);
    await wallet.collect(warm);
    expect((await wallet.ended(warm))?.status).toBe("settled");
    const payments = [await newPayment(chain), await newPayment(chain), await newPayment(chain)];
    await chain.pauseMining();
    relay.on("eth_getTransactionCount", { kind: "result", result: count });
    await Promise.all(payments.map((payment) => wallet.collect(payment)));
    await mineFull(6);
    expect((await wallet.rows()).filter((row) => row.replacement === 0).map((row) => row.wallet_nonce)).toEqual([
      0, 1, 2, 3,
    ]);
    await expectAllSettle(wallet, payments);
  });

  test.each(counts)(
    "leaves no payment unsettled when it is the only one, counts %s for long, and counts right again",
    async (count) => {
      const wallet = await start();
      const warm = await newPayment(chain);
      await wallet.collect(warm);
      expect((await wallet.ended(warm))?.status).toBe("settled");
      const payments = [await newPayment(chain), await newPayment(chain), await newPayment(chain)];
      await chain.pauseMining();
      await Promise.all(payments.slice(1).map((payment) => wallet.collect(payment)));
      relay.on("eth_getTransactionCount", { kind: "result", result: count });
      await wallet.collect(payments[0]!);
      await mineFull(12);
      relay.heal();
      await expectAllSettle(wallet, payments);
    },
  );
});

test.each([1_000_000_000, 500_001, 21_000])(
  "an estimate of %i gas, which no transfer costs, is asked for again",
  async (gas) => {
    relay.on("eth_estimateGas", { kind: "result", result: numberToHex(gas) }, 1);
    const wallet = await start();
    const payment = await newPayment(chain);
    await wallet.collect(payment);
    await mineUntil(async () => (await wallet.payment(payment))?.status === "settled");
    const [row] = await wallet.rows();
    expect(Number(row?.gas)).toBeWithin(50_000, 500_001);
  },
);

test("a payment is never sent with more gas than a block has room for, whatever was estimated", async () => {
  const wallet = await start();
  const payment = await newPayment(chain);
  await wallet.claim(payment);
  await wallet.wallet.send(payment, { limit: 1_000_000_000n, from: wallet.address, mayShare: false });
  await mineUntil(async () => (await wallet.payment(payment))?.status === "settled");
  expect((await wallet.rows()).map(({ gas }) => gas)).toEqual(["500000"]);
});

describe("a newest block far ahead", () => {
  const ahead = (fields: object): RpcFault => ({
    kind: "choose",
    choose: ([number]) =>
      number === "latest"
        ? { kind: "rewrite", rewrite: (block) => ({ ...(block as object), ...fields }) }
        : { kind: "pass" },
  });

  test.each([
    ["number", { number: "0x3b9aca00" }],
    ["time", { timestamp: "0xffffffff" }],
  ])("is not believed at once by its %s", async (_field, fields) => {
    const wallet = await start();
    const before = await wallet.chain.newest();
    relay.on("eth_getBlockByNumber", ahead(fields), 1);
    expect(await wallet.chain.newest()).toEqual(before);
    await chain.mine();
    expect((await wallet.chain.newest()).number).toBe(before.number + 1);
  });

  test("does not keep a transaction from being replaced that was stored by it", async () => {
    relay.on("eth_getBlockByNumber", ahead({ number: "0x3b9aca00" }));
    const first: unknown[] = [];
    relay.on("eth_sendRawTransaction", {
      kind: "choose",
      choose([raw]) {
        if (first.length === 0) first.push(raw);
        return raw === first[0] ? { kind: "error", message: "txpool is full" } : { kind: "pass" };
      },
    });
    const wallet = await start();
    const payment = await newPayment(chain);
    await wallet.claim(payment);
    await wallet.send(payment);
    await relay.called("eth_sendRawTransaction", 1);
    expect((await wallet.rows())[0]?.stored_at_block).toBe(1_000_000_000);
    await wallet.wallet.stop();
    relay.heal("eth_getBlockByNumber");
    const next = await start({ store: wallet.store, signers: wallet.signers });
    await mineUntil(async () => (await next.payment(payment))?.status === "settled");
    expect(await next.rows()).toHaveLength(2);
  });
});
