// What a fault of the relay does to the caller and to the node behind it: most of all, whether the node got the call.
import { afterAll, beforeAll, beforeEach, expect, test } from "bun:test";
import { startChain, type TestChain } from "./chain.ts";
import { newPayer } from "./payments.ts";
import { type RpcRelay, startRpcRelay } from "./rpc-relay.ts";

let chain: TestChain;
let relay: RpcRelay;
beforeAll(async () => {
  chain = await startChain();
  relay = await startRpcRelay(chain.url);
  await chain.mine(5);
});
beforeEach(() => relay.heal());
afterAll(async () => {
  await relay.stop();
  await chain.stop();
});

const post = (body: unknown, signal?: AbortSignal) =>
  fetch(`${relay.url}/v2/key`, { method: "POST", body: JSON.stringify(body), ...(signal && { signal }) });

const request = (method: string, params: unknown[] = []) => ({ jsonrpc: "2.0", id: 7, method, params });

async function call(method: string, params: unknown[] = []) {
  return (await (await post(request(method, params))).json()) as {
    id: number;
    result?: unknown;
    error?: object;
  };
}

test("faults follow each other, and before them and after them calls go through", async () => {
  const block = `0x${(await chain.blockNumber()).toString(16)}`;
  relay.on("eth_blockNumber", { kind: "pass" }, 1);
  relay.on("eth_blockNumber", { kind: "error", code: -32_003, message: "nonce too low" }, 1);
  relay.on("eth_blockNumber", { kind: "result", result: {} }, 1);
  relay.on("eth_blockNumber", { kind: "rewrite", rewrite: (result) => [result] }, 1);
  const answers = [];
  for (let nth = 0; nth < 5; nth++) answers.push(await call("eth_blockNumber"));
  const head = { jsonrpc: "2.0", id: 7 } as const;
  expect(answers).toEqual([
    { ...head, result: block },
    { ...head, error: { code: -32_003, message: "nonce too low" } },
    { ...head, result: {} },
    { ...head, result: [block] },
    { ...head, result: block },
  ] as never);
  expect(relay.count("eth_blockNumber")).toBe(5);
});

test("an error before the node and one after it differ in what the node has got", async () => {
  const before = await chain.blockNumber();
  relay.on("anvil_mine", { kind: "error" }, 1);
  expect((await call("anvil_mine", ["0x1"])).error).toEqual({ code: -32_000, message: "internal error" });
  expect(await chain.blockNumber()).toBe(before);
  relay.on("anvil_mine", { kind: "error", after: true, message: "timeout" }, 1);
  expect((await call("anvil_mine", ["0x2"])).error).toMatchObject({ message: "timeout" });
  expect(await chain.blockNumber()).toBe(before + 2);
  expect(relay.params("anvil_mine")).toEqual([["0x1"], ["0x2"]]);
});

test("a connection breaks without an answer, before the node or after", async () => {
  const before = await chain.blockNumber();
  relay.on("evm_mine", { kind: "break" }, 1);
  relay.on("evm_mine", { kind: "break", after: true }, 1);
  await expect(post(request("evm_mine"))).rejects.toThrow();
  expect(await chain.blockNumber()).toBe(before);
  await expect(post(request("evm_mine"))).rejects.toThrow();
  expect(await chain.blockNumber()).toBe(before + 1);
});

test("silence lasts until the caller goes, and the node may have the call", async () => {
  const before = await chain.blockNumber();
  relay.on("hardhat_mine", { kind: "hang", after: true }, 1);
  const patience = new AbortController();
  const silent = post(request("hardhat_mine", ["0x1"]), patience.signal);
  await relay.passed("hardhat_mine");
  expect(await chain.blockNumber()).toBe(before + 1);
  patience.abort();
  await expect(silent).rejects.toThrow();
});

test("pages and garbage take the place of the answer", async () => {
  relay.on("*", { kind: "page", status: 502 }, 1);
  relay.on("*", { kind: "garbage", text: "{" }, 1);
  const page = await post(request("eth_chainId"));
  expect([page.status, await page.text()]).toEqual([502, "<html><body><h1>502</h1></body></html>"]);
  expect(await (await post(request("eth_chainId"))).text()).toBe("{");
  expect((await call("eth_chainId")).result).toBe("0x2105");
});

test("a batch is answered call by call", async () => {
  relay.on("net_version", { kind: "error", message: "no" }, 1);
  const batch = [{ ...request("eth_chainId"), id: 1 }, request("net_version"), { ...request("net_version"), id: 3 }];
  expect(await (await post(batch)).json()).toMatchObject([
    { id: 1, result: "0x2105" },
    { id: 7, error: { message: "no" } },
    { id: 3, result: "8453" },
  ]);
});

test("a node that lies behind knows nothing of the newest blocks", async () => {
  const { address } = newPayer();
  await chain.fundUsdc(address, 5n);
  const [minted] = await chain.transfers({ to: address });
  const ask = async (method: string, ...params: unknown[]) => (await call(method, params)).result;
  const hex = (block: number) => `0x${block.toString(16)}`;
  const newest = minted!.block_number;
  const seen = async () => ({
    block: await ask("eth_blockNumber"),
    latest: await ask("eth_getBlockByNumber", "latest", false),
    named: await ask("eth_getBlockByNumber", hex(newest), false),
    receipt: await ask("eth_getTransactionReceipt", minted!.transaction_hash),
    logged: JSON.stringify(await ask("eth_getLogs", { fromBlock: "earliest", toBlock: "latest" })).includes(
      minted!.transaction_hash,
    ),
  });
  const uptodate = {
    block: hex(newest),
    latest: { number: hex(newest) },
    named: { number: hex(newest) },
    receipt: { blockNumber: hex(newest) },
    logged: true,
  };
  expect(await seen()).toMatchObject(uptodate);
  relay.behind(1);
  const older = hex(newest - 1);
  expect(await seen()).toMatchObject({
    block: older,
    latest: { number: older },
    named: null,
    receipt: null,
    logged: false,
  });
  await chain.mine();
  expect(await seen()).toMatchObject(uptodate);
});

test("a relay that refuses can come back, and stopping it ends what hangs", async () => {
  await relay.refuse();
  await expect(post(request("eth_chainId"))).rejects.toThrow();
  await relay.restore();
  expect((await call("eth_chainId")).result).toBe("0x2105");
  const other = await startRpcRelay(chain.url);
  other.on("*", { kind: "hang" });
  const silent = fetch(other.url, { method: "POST", body: JSON.stringify(request("eth_chainId")) });
  await other.called("eth_chainId");
  await other.stop();
  await expect(silent).rejects.toThrow();
});
