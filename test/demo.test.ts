// The demo, from a start on any machine to its end: what it says happened did happen on its chain and in its
// gateway, what it prints works as it stands, and whichever way it ends, nothing of it is left.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { createPublicClient, http, type PublicClient, parseAbi } from "viem";
import { base } from "viem/chains";
import manifest from "../package.json" with { type: "json" };
import { tollgateBinary } from "./support/gateway/binary.ts";
import { type RunningDemo, runDemo } from "./support/gateway/demo.ts";
import { BASE } from "./support/network.ts";

const COLUMNS_MAX = 100;
const BALANCE = parseAbi(["function balanceOf(address account) view returns (uint256)"]);
const AT_WORK = /Ctrl-C here stops everything/;
const all = (text: string, pattern: RegExp) => [...text.matchAll(pattern)].map(([, found = ""]) => found);

describe("the demo", () => {
  let demo: RunningDemo;
  let compiled: RunningDemo;
  let output: string;
  let chain: PublicClient;
  /** What it tells to export. */
  let exported: Record<string, string>;

  beforeAll(async () => {
    demo = runDemo();
    // Both at the same time, and so in a race for the same usual ports.
    compiled = runDemo({ program: [tollgateBinary()] });
    await demo.prints(AT_WORK);
    output = demo.printed();
    const [rpc = ""] = all(output, /chain RPC +(\S+)/g);
    chain = createPublicClient({ chain: base, transport: http(rpc) }) as PublicClient;
    exported = Object.fromEntries(all(output, /^export (.+)$/gm).map((line) => line.split("=", 2)));
  });
  afterAll(async () => {
    for (const each of [demo, compiled]) await each[Symbol.asyncDispose]();
  });

  const usdcOf = (address: string) =>
    chain.readContract({
      address: BASE.token.address,
      abi: BALANCE,
      functionName: "balanceOf",
      args: [address as `0x${string}`],
    });
  const asked = (path: string) =>
    fetch(`${exported["GATEWAY"]}${path}`, { headers: { authorization: `Bearer ${exported["TOKEN"]}` } });

  test("shows transactions that are all on its chain, in that block, and moved that money", async () => {
    const transactions = all(output, /transaction +(0x[0-9a-f]{64})\n/g);
    const blocks = all(output, /block +(\d+)\n/g);
    expect([transactions.length, blocks.length]).toEqual([2, 2]);
    for (const [index, hash] of transactions.entries()) {
      const receipt = await chain.getTransactionReceipt({ hash: hash as `0x${string}` });
      expect(receipt).toMatchObject({ status: "success", to: BASE.token.key });
      expect(receipt.blockNumber).toBe(BigInt(blocks[index] ?? ""));
    }
    const [payer = ""] = all(output, /payer +(0x\S+) +with 9\.965 USDC/g);
    const [payee = ""] = all(output, /to +(0x\S+) +the agent's owner/g);
    expect([await usdcOf(payer), await usdcOf(payee)]).toEqual([9_965_000n, 35_000n]);
    expect(all(output, /payer +(\d+\..+)/g)).toEqual([
      "10.000000  →   9.990000 USDC  (-0.01)",
      "9.990000  →   9.965000 USDC  (-0.025)",
    ]);
    expect(all(output, /payee +(\d+\..+)/g)).toEqual([
      "0.000000  →   0.010000 USDC  (+0.01)",
      "0.010000  →   0.035000 USDC  (+0.025)",
    ]);
  });

  test("shows invocations that are all in the history, paid and settled as it says", async () => {
    const { data } = (await (await asked("/v1/invocations")).json()) as { data: Record<string, unknown>[] };
    const paid = data.filter((invocation) => invocation["payment_amount"] !== null).reverse();
    expect(data.length).toBe(3);
    expect(paid.map(({ id }) => id)).toEqual([...new Set(all(output, /invocation +(inv_\S+)/g))]);
    const hashes = all(output, /transaction +(0x[0-9a-f]{64})\n/g);
    expect(paid).toMatchObject([
      { status: "succeeded", payment_amount: "10000", settlement: { status: "settled", tx_hash: hashes[0] } },
      { status: "succeeded", payment_amount: "25000", settlement: { status: "settled", tx_hash: hashes[1] } },
    ]);
  });

  test("prints more that works: Swagger, the facilitator's ports, the credential that hides its bundle", async () => {
    expect((await fetch(all(output, /Swagger UI +(\S+)/g)[0] ?? "")).status).toBe(200);
    const [open = ""] = all(output, /(http:\S+) +open:/g);
    expect(await (await fetch(`${open}/healthz`)).json()).toEqual({ status: "ok" });
    expect(await (await fetch(`${open}/supported`)).json()).toMatchObject({ kinds: [{ network: "base" }] });
    const [mutual = ""] = all(output, /(https:\S+) +mutual TLS:/g);
    const stranger = fetch(`${mutual}/supported`, { tls: { rejectUnauthorized: false } });
    expect(await stranger.catch(() => "no handshake")).toBe("no handshake");
    const settlement = await (await asked("/v1/settlement/config")).json();
    expect(settlement).toMatchObject({ facilitator_url: mutual });
    expect(output).not.toContain("PRIVATE KEY-----");
  });

  test("asks npm for the client in the versions that the tests use", () => {
    const versions: Record<string, string> = { ...manifest.devDependencies, ...manifest.dependencies };
    const imported = all(output, / from "((?:@\w+\/)?[\w-]+)/g).map((name) => `${name}@${versions[name]}`);
    const installed = all(output, /((?:@\w+\/)?[\w-]+@\d+\.[\w.]+)/g);
    expect([imported.length, installed]).toEqual([3, imported]);
  });

  test("reads well from a file: no colours, no line that is too long but the token's", () => {
    expect(output).not.toMatch(/(?!\n)\p{Cc}/u);
    const long = output.split("\n").filter((line) => line.length > COLUMNS_MAX);
    expect(long).toEqual([`export TOKEN=${exported["TOKEN"]}`]);
  });

  test("ends well with Ctrl-C, and leaves nothing", async () => {
    demo.kill("SIGINT");
    expect(await demo.ended()).toEqual({ code: 0, complaints: "" });
    expect(await demo.leftovers()).toEqual([]);
  });

  test("is carried whole by the binary, which does not stay up without its chain", async () => {
    await compiled.prints(AT_WORK);
    expect(compiled.printed()).toContain("9.990000  →   9.965000 USDC");
    process.kill(compiled.chainPid(), "SIGKILL");
    expect((await compiled.ended()).code).toBe(1);
    expect(compiled.printed()).toEndWith("The demo can't go on: anvil, which runs the chain, has exited\n");
    expect(await compiled.leftovers()).toEqual([]);
  });
});

test("without anvil the demo says how to install it, and starts nothing", async () => {
  await using demo = runDemo({ chain: null });
  const { code, complaints } = await demo.ended();
  expect(code).toBe(2);
  expect(complaints).toMatch(
    /^tollgate demo failed:\n {2}- anvil must be installed \(npm install --no-save @foundry-rs\/anvil-.*\n/,
  );
  expect(complaints).toMatch(/TOLLGATE_ANVIL is not set, and it is neither on the PATH nor in node_modules/);
  expect(demo.printed()).toBe("");
  expect(await demo.leftovers()).toEqual([]);
});

describe("the demo leaves nothing", () => {
  test("when it is stopped while it starts", async () => {
    await using demo = runDemo({ chain: "exec sleep 60" });
    await demo.prints(/tollgate demo/);
    demo.kill("SIGINT");
    expect((await demo.ended()).code).toBe(0);
    expect(await demo.leftovers()).toEqual([]);
  });

  test("when the chain does not start", async () => {
    await using dead = runDemo({ chain: "exit 1" });
    expect((await dead.ended()).code).toBe(1);
    expect(dead.printed()).toMatch(/can't go on: chain: .* ended before it listened\n/);
    expect(await dead.leftovers()).toEqual([]);
  });

  test("when it is killed", async () => {
    await using demo = runDemo();
    await demo.prints(/✓.*catalogue/);
    demo.kill("SIGKILL");
    await demo.ended();
    expect(await demo.leftovers()).toEqual([]);
  });
});
