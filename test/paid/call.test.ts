// `tollgate call` pays: both services as they are deployed, a real chain and the real token. What it says of a payment is held
// against the transfers on the chain.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { openPayingTenant, type PayingTenant } from "../support/chain/paying.ts";
import { newPayer } from "../support/chain/payments.ts";
import { tollgateBinary } from "../support/gateway/binary.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { runCommand } from "../support/gateway/process.ts";
import { type Relay, startRelay } from "../support/http/relay.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";
import { type McpServer, startMcpServer } from "../support/mcp/mcp-servers.ts";

const PRICE = 10_000n;
const DEAR = 25_000n;
const FUNDS = 100_000n;

const home = mkdtempSync(join(tmpdir(), "paid-call-"));
let chain: TestChain;
let facilitator: Facilitator;
/** The way to the facilitator. */
let door: Relay;
let gateway: Gateway;
let tenant: PayingTenant;
let upstream: Upstream;
let mcp: McpServer;
let count = 0;

beforeAll(async () => {
  chain = await startChain();
  upstream = startUpstream(async (request) => {
    count += 1;
    const { pathname } = new URL(request.url);
    return pathname === "/fails" ? new Response("no", { status: 500 }) : new Response(await request.bytes());
  });
  [facilitator, gateway, mcp] = await Promise.all([
    startFacilitator(chain),
    startGateway({ env: { TOLLGATE_SETTLE_WAIT_MS: "3000" } }),
    startMcpServer("everything"),
  ]);
  door = startRelay(Number(new URL(facilitator.url).port));
  tenant = await openPayingTenant(gateway, { ...facilitator, url: `https://127.0.0.1:${door.port}` });
});
afterAll(async () => {
  await gateway?.[Symbol.asyncDispose]();
  await facilitator?.[Symbol.asyncDispose]();
  door?.stop();
  await Promise.all([upstream?.stop(), mcp?.stop(), chain?.stop()]);
  rmSync(home, { recursive: true });
});

/** A payer with money, and its key in a file. */
async function payerFile(funds = FUNDS) {
  const key = generatePrivateKey();
  const { address } = privateKeyToAccount(key);
  const file = join(home, address);
  writeFileSync(file, key, { mode: 0o600 });
  if (funds > 0n) await chain.fundUsdc(address, funds);
  return { address, file };
}

/** An agent whose calls cost PRICE, and some of its tools DEAR. */
async function pricedAgent(fields: object = { upstream_url: upstream.url }, tools?: object) {
  const payee = newPayer().address;
  const price = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to: payee, ...(tools && { tools }) };
  return { id: await tenant.agent({ ...fields, pricing: price }), payee };
}

async function run(...args: readonly string[]) {
  const env = { PATH: "/usr/bin:/bin", TOLLGATE_TOKEN: tenant.headers["authorization"]?.slice("Bearer ".length) ?? "" };
  const program = [tollgateBinary(), "call", "--url", gateway.url];
  return runCommand(args, { cwd: home, env, program });
}

const paying = (file: string, price = "0.05") => ["--payer-key-file", file, "--max-price", price];

async function expectOneTransfer(from: `0x${string}`, to: string, value: bigint): Promise<void> {
  expect(await chain.transfers({ from })).toEqual([expect.objectContaining({ to: to.toLowerCase(), value })]);
  expect(await chain.usdcOf(from)).toBe(FUNDS - value);
}

describe("a call of a priced agent is paid once, and its response printed:", () => {
  for (const flags of [[], ["--stream"]]) {
    test(flags.length === 0 ? "polled" : "streamed", async () => {
      const [payer, agent, before] = [await payerFile(), await pricedAgent(), count];
      const done = await run(agent.id, "--data", "Wien", ...flags, ...paying(payer.file, "0.01"));
      expect(done).toEqual({ code: 0, stdout: "Wien", stderr: "" });
      await expectOneTransfer(payer.address, agent.payee, PRICE);
      expect(count - before).toBe(1);
    });

    test(`a tool at its own price, ${flags.length === 0 ? "polled" : "streamed"}`, async () => {
      const protocol = { protocol: "mcp", mcp_transport: "streamable_http", upstream_url: mcp.url };
      const [payer, agent] = [await payerFile(), await pricedAgent(protocol, { echo: `${DEAR}` })];
      const params = { name: "echo", arguments: { message: "Wien" } };
      const data = JSON.stringify({ jsonrpc: "2.0", id: 1, method: "tools/call", params });
      const { stdout, ...rest } = await run(agent.id, "--data", data, ...flags, ...paying(payer.file));
      expect(rest).toEqual({ code: 0, stderr: "" });
      expect(stdout).toContain("Wien");
      await expectOneTransfer(payer.address, agent.payee, DEAR);
    });
  }

  test("with --json the record names the transaction", async () => {
    const [payer, agent] = [await payerFile(), await pricedAgent()];
    const { code, stdout } = await run(agent.id, "--json", ...paying(payer.file));
    const [transfer] = await chain.transfers({ from: payer.address });
    expect([code, JSON.parse(stdout).settlement]).toMatchObject([
      0,
      { status: "settled", tx_hash: transfer?.transaction_hash, settled_amount: `${PRICE}` },
    ]);
  });
});

describe("no money moves", () => {
  test("without a key, and above the price that is allowed", async () => {
    const [payer, agent, before] = [await payerFile(), await pricedAgent(), count];
    const costs = `the call costs 0.01 USDC on Base to ${agent.payee.toLowerCase()}`;
    for (const flags of [[], ["--payer-key-file", payer.file], paying(payer.file, "0.009999")]) {
      const { code, stdout, stderr } = await run(agent.id, ...flags);
      expect({ code, stdout }).toEqual({ code: 3, stdout: "" });
      expect(stderr).toContain(costs);
      expect(stderr).toContain("nothing was paid");
    }
    expect([await chain.transfers({ from: payer.address }), count - before]).toEqual([[], 0]);
  });

  test("from a payer who has none: the call is refused", async () => {
    const [payer, agent] = [await payerFile(0n), await pricedAgent()];
    for (const flags of [[], ["--stream"]]) {
      const { code, stdout, stderr } = await run(agent.id, ...flags, ...paying(payer.file));
      expect({ code, stdout }).toEqual({ code: 3, stdout: "" });
      expect(stderr).toContain(
        "the gateway refused the call (402): the facilitator declined the payment, and nothing was collected; ",
      );
    }
    expect(await chain.transfers({ from: payer.address })).toEqual([]);
  });
});

test("a paid call that fails says that the payment was taken", async () => {
  const [payer, agent] = [await payerFile(), await pricedAgent({ upstream_url: `${upstream.url}fails` })];
  const { code, stdout, stderr } = await run(agent.id, ...paying(payer.file));
  expect({ code, stdout }).toEqual({ code: 1, stdout: "no" });
  const [transfer] = await chain.transfers({ from: payer.address });
  expect(stderr).toContain(`its payment was taken (transaction ${transfer?.transaction_hash})`);
});

test("a payment whose outcome is not known is told as open, with the call's ID and status 4", async () => {
  const [payer, agent] = [await payerFile(), await pricedAgent()];
  const resume = door.hold();
  try {
    const { code, stdout, stderr } = await run(agent.id, "--wait", "1", ...paying(payer.file));
    expect({ code, stdout }).toEqual({ code: 4, stdout: "" });
    expect(stderr).toMatch(
      /the call goes on as inv_\S+, and its payment is open: don't pay again; its result: curl -H "Authorization: Bearer \$TOLLGATE_TOKEN" \S+\n$/,
    );
    resume();
    const [id = ""] = /inv_[0-9a-f-]{36}/.exec(stderr) ?? [];
    for (let view = await tenant.poll(agent.id, id); view.status !== "succeeded"; )
      view = await tenant.poll(agent.id, id);
    await expectOneTransfer(payer.address, agent.payee, PRICE);
  } finally {
    resume();
  }
}, 150_000);
