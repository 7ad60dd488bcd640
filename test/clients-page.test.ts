// The manual's page on clients, example by example, against the compiled binary: the demo is the gateway, with its chain, its MCP agent,
// and its agent that has a price. The packages are those of test/tour, installed in a folder of their own.
import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import type { Transport } from "@modelcontextprotocol/sdk/shared/transport.js";
import { browserPath, launchBrowser } from "./support/browser.ts";
import { copyTour, manifest, pages } from "./support/documentation.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { type RunningDemo, runDemo } from "./support/gateway/demo.ts";
import { startUpstream, type Upstream } from "./support/http/upstream.ts";
import tour from "./tour/package.json" with { type: "json" };

/** The packages come from Bun's cache, or else from the registry. */
setDefaultTimeout(120_000);
const RUN_MS_MAX = 40_000;
const page = pages.get("clients")!;
const [python, curl] = ["python3", "curl"].map((name) => Bun.which(name));
const node = Bun.which("node") ?? process.execPath;

const home = mkdtempSync(join(tmpdir(), "tollgate-clients-"));
const folder = join(home, "test", "tour");
let demo: RunningDemo;
let echo: Upstream;
/** What the demo tells its user to export. */
let exported: Record<string, string>;
let agents: Record<"echo" | "calculator" | "notary", string>;

beforeAll(async () => {
  copyTour(folder);
  const install = blockOf("sh packages").replace(`npx --yes bun@${manifest.engines.bun}`, process.execPath);
  await run(["sh", "-ec", install], {}, home);
  for (const { info, text } of page.blocks) {
    const [, name = ""] = info.split(" ");
    if (!/\.(sh|mjs|py|json)$/.test(name)) continue;
    mkdirSync(dirname(join(folder, name)), { recursive: true });
    writeFileSync(join(folder, name), text);
  }
  echo = startUpstream(async (request) => new Response(await request.text()));
  demo = runDemo({ program: [tollgateBinary()] });
  await demo.prints(/Ctrl-C here stops everything/);
  const printed = demo.printed();
  exported = Object.fromEntries([...printed.matchAll(/^export (\w+)=(.+)$/gm)].map(([, name, value]) => [name, value]));
  const [, notary = ""] = /http agent +(agt_\S+)/.exec(printed) ?? [];
  const [, calculator = ""] = /mcp agent +(agt_\S+)/.exec(printed) ?? [];
  const created = await fetch(`${exported["GATEWAY"]}/v1/agents`, {
    method: "POST",
    headers: { authorization: `Bearer ${exported["TOKEN"]}`, "content-type": "application/json" },
    body: JSON.stringify({ name: "echo", upstream_url: echo.url }),
  });
  agents = { echo: ((await created.json()) as { id: string }).id, calculator, notary };
});

afterAll(async () => {
  await demo?.[Symbol.asyncDispose]();
  await echo?.stop();
  rmSync(home, { recursive: true, force: true });
});

/** The text of the page's only block with this line after its fence. */
function blockOf(info: string): string {
  const found = page.blocks.filter((block) => block.info === info);
  expect([info, found.length]).toEqual([info, 1]);
  return found[0]?.text ?? "";
}

/** What the page shows below the block. */
function shownBelow(info: string): string {
  return page.blocks[page.blocks.findIndex((block) => block.info === info) + 1]?.text.trim() ?? "";
}

/** How a command ends, and what it printed. */
async function ended(command: readonly string[], env: Record<string, string>, cwd = folder) {
  const own = Object.entries(process.env).filter(([name]) => !/^(TOLLGATE_|DATABASE_URL$)/.test(name));
  const child = Bun.spawn([...command], {
    cwd,
    env: { ...(Object.fromEntries(own) as Record<string, string>), ...env },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: RUN_MS_MAX,
    killSignal: "SIGKILL",
  });
  const [output, problems, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { code, output: output.trim(), problems };
}

/** Standard output of a command that ends well. */
async function run(command: readonly string[], env: Record<string, string>, cwd = folder): Promise<string> {
  const { code, output, problems } = await ended(command, env, cwd);
  expect([code, problems], output).toEqual([0, code === 0 ? problems : ""]);
  return output;
}

/** Runs a file of the page with values for which it must fail. */
async function failing(command: readonly string[], env: Record<string, string>) {
  const result = await ended(command, { ...exported, ...env });
  expect(result.code, result.output).not.toBe(0);
  return result;
}

/** Runs a file of the page as the page says, for the agent. */
function runFile(command: readonly string[], agent: keyof typeof agents): Promise<string> {
  return run(command, { ...exported, AGENT: agents[agent] });
}

test("the command line makes a call and prints its response", async () => {
  const PATH = `${dirname(tollgateBinary())}:/usr/bin:/bin`;
  const values = { ...exported, AGENT: agents.echo, PATH };
  expect(await run(["sh", "-e", "cli.sh"], values)).toBe(shownBelow("sh cli.sh"));
});

test.skipIf(curl === null)("curl gets the agent's own response", async () => {
  expect(await runFile(["sh", "-e", "call.sh"], "echo")).toBe(shownBelow("sh call.sh"));
});

test.skipIf(curl === null)("curl stores a call and reads its result", async () => {
  const call = JSON.parse(await runFile(["sh", "-e", "poll.sh"], "echo"));
  expect([call.status, atob(call.response_body_b64)]).toEqual(["succeeded", '{"hello": "world"}']);
});

describe("fetch", () => {
  test.each([
    ["Node", node],
    ["Bun", process.execPath],
  ])("in %s", async (_, program) => {
    expect(await runFile([program, "call.mjs"], "echo")).toBe(shownBelow("js call.mjs"));
  });

  test.skipIf(browserPath === null)("in a browser, on a page of the gateway's origin and no other", async () => {
    const values = JSON.stringify({ GATEWAY: exported["GATEWAY"], TOKEN: exported["TOKEN"], AGENT: agents.echo });
    const code = blockOf("js call.mjs").replace("process.env", values).replace("console.log(", "return [].concat(");
    const browser = await launchBrowser("tollgate.test");
    try {
      const tab = await browser.newPage();
      await tab.goto(`${exported["GATEWAY"]}/swagger`);
      expect(await tab.evaluate(`(async () => { ${code} })()`)).toEqual(["succeeded", '{"hello":"world"}']);
      await tab.goto(echo.url);
      await expect(tab.evaluate(`(async () => { ${code} })()`)).rejects.toThrow("Failed to fetch");
    } finally {
      await browser.close();
    }
  });

  test("tells the reason of a refusal", async () => {
    const { code, problems } = await failing([node, "call.mjs"], { AGENT: agents.notary });
    expect([code, problems]).toEqual([1, expect.stringContaining("Error: 402 ")]);
  });
});

describe("the lines fail where the gateway refuses, and tell its status and reason", () => {
  const ABSENT = "agt_01a1fdf0-325d-72bb-9022-a56f8b61e206";
  const refusals: [string, string, () => Record<string, string>, string][] = [
    ["an unknown agent", "404", () => ({ AGENT: ABSENT }), "no such agent"],
    ["a bad token", "401", () => ({ AGENT: agents.notary, TOKEN: "bad" }), ""],
    ["a call without its payment", "402", () => ({ AGENT: agents.notary }), "accepts"],
  ];
  test.skipIf(curl === null).each(refusals)("curl, for %s", async (_, status, env, reason) => {
    for (const file of ["call.sh", "poll.sh"]) {
      const { code, output, problems } = await failing(["sh", "-e", file], env());
      expect([file, code > 0]).toEqual([file, true]);
      expect(problems).toContain(status);
      expect(file === "poll.sh" ? problems : output).toContain(reason);
    }
  });

  test.each(refusals.slice(0, 2))("x402-fetch, for %s", async (_, status, env, reason) => {
    const { code, output, problems } = await failing([node, "pay.mjs"], env());
    expect([code, output]).toEqual([1, ""]);
    expect(problems).toContain(`Error: ${status} `);
    expect(problems).toContain(reason);
  });

  test("x402-fetch, for a wallet without money", async () => {
    const PAYER_KEY = `0x${"42".repeat(32)}`;
    const { code, output, problems } = await failing([node, "pay.mjs"], { AGENT: agents.notary, PAYER_KEY });
    expect([code, output]).toEqual([1, ""]);
    expect(problems).toMatch(/Error: 402 \{"error":"\w/);
  });
});

test("x402-fetch says of an agent without a price that nothing was collected", async () => {
  const lines = (await runFile([node, "pay.mjs"], "echo")).split("\n");
  expect(lines).toEqual([expect.stringMatching(/^202 inv_/), "no payment was collected"]);
});

describe("a payment that was not decided when its call was accepted", () => {
  const record = { invocation_id: "inv_1", status: "failed", error_class: null, error_detail: null };
  const settled = { status: "settlement_failed", reason: "declined" };
  const programs: [string, readonly string[], object, string][] = [
    ["call.mjs", [node, "call.mjs"], settled, "the call failed: payment declined"],
    ["pay.mjs, declined", [node, "pay.mjs"], settled, "settlement_failed declined"],
    ["pay.mjs, pending", [node, "pay.mjs"], { status: "pending" }, "the payment is still pending: don't pay again"],
  ];
  if (python !== null) programs.push(["call.py", ["python3", "call.py"], settled, "the call failed: payment declined"]);
  // The gateway's answers are canned here, since the demo's facilitator decides every payment at once.
  test.each(programs)("%s", async (_, command, settlement, told) => {
    const gateway = startUpstream((request) => {
      if (request.method === "GET") return Response.json({ ...record, settlement });
      const headers = { location: "/v1/proxy/agt_1/invocations/inv_1" };
      return Response.json({ invocation_id: "inv_1" }, { status: 202, headers });
    });
    try {
      const env = { ...exported, GATEWAY: gateway.url.slice(0, -1), AGENT: "agt_1" };
      const { output, problems } = await ended(command, env);
      expect(output + problems).toContain(told);
    } finally {
      await gateway.stop();
    }
  });
});

test.skipIf(python === null)("Python needs nothing but its standard library", async () => {
  expect(await runFile(["python3", "call.py"], "echo")).toBe(shownBelow("python call.py"));
});

test("the MCP SDK lists the tools and calls one", async () => {
  expect(await runFile([node, "mcp.mjs"], "calculator")).toBe(shownBelow("js mcp.mjs"));
});

test("x402-fetch pays for a call, and shows the transaction", async () => {
  const plain = (text: string) => text.replace(/inv_[\da-f-]{36}/, "inv_…").replace(/0x[\da-f]{64}/, "0x…");
  expect(plain(await runFile([node, "pay.mjs"], "notary"))).toBe(plain(shownBelow("js pay.mjs")));
});

test("the packages have the versions that the page, the folder and the tests name", () => {
  const named = [...page.text.matchAll(/`npm install ([^`]+)`/g)].flatMap(([, list = ""]) => list.split(" "));
  const dependencies: Record<string, string> = tour.dependencies;
  expect(named).toEqual(
    ["@modelcontextprotocol/sdk", "x402-fetch", "viem"].map((name) => `${name}@${dependencies[name]}`),
  );
  const all: Record<string, string> = { ...manifest.dependencies, ...manifest.devDependencies };
  for (const [name, version] of Object.entries(dependencies)) {
    if (name in all) expect([name, version]).toEqual([name, all[name]!]);
  }
});

describe("the lines for an application", () => {
  const SHOWN = /^https:\/\/gateway\.example\.com(\/v1\/proxy\/)agt_[\da-f-]{36}(\/stream)$/;
  const here = (url: string) => url.replace(SHOWN, `${exported["GATEWAY"]}$1${agents.calculator}$2`);

  /** The tools that an MCP client sees by these lines. */
  async function toolsBy(transport: Transport): Promise<string[]> {
    const client = new Client({ name: "reader", version: "1" });
    await client.connect(transport);
    const { tools } = await client.listTools();
    await client.close();
    return tools.map(({ name }) => name);
  }

  test.each([
    ["Claude Code", "json .mcp.json", "mcpServers", "http", "TOKEN"],
    ["Cursor", "json .cursor/mcp.json", "mcpServers", undefined, "env:TOKEN"],
    ["VS Code", "json .vscode/mcp.json", "servers", "http", "input:token"],
  ])("%s", async (_, info, key, type, name) => {
    const variable = `\${${name}}`;
    const { [key]: servers, ...others } = JSON.parse(blockOf(info));
    const { url, headers, ...rest } = servers["my-agent"];
    expect([Object.keys(servers), rest]).toEqual([["my-agent"], type === undefined ? {} : { type }]);
    expect(url).toMatch(SHOWN);
    expect(headers).toEqual({ Authorization: `Bearer ${variable}` });
    expect(others).toEqual(
      key === "servers"
        ? { inputs: [{ id: "token", type: "promptString", description: expect.any(String), password: true }] }
        : {},
    );
    const filled = { Authorization: headers.Authorization.replace(variable, exported["TOKEN"]) };
    const transport = new StreamableHTTPClientTransport(new URL(here(url)), { requestInit: { headers: filled } });
    expect(await toolsBy(transport as Transport)).toEqual(["add", "factorize"]);
  });

  test("Claude Code's command", async () => {
    // In the place of Claude Code: prints its arguments, each with a zero byte behind it.
    writeFileSync(join(home, "claude"), `#!/bin/sh\nprintf '%s\\0' "$@"\n`, { mode: 0o755 });
    const env = { ...exported, AGENT: agents.calculator, PATH: `${home}:${process.env["PATH"]}` };
    const [url = "", ...header] = (await run(["sh", "-ec", blockOf("sh claude")], env)).split("\0").slice(5, -1);
    expect(blockOf("sh claude")).toStartWith("claude mcp add --transport http my-agent ");
    expect(header).toEqual(["--header", `Authorization: Bearer ${exported["TOKEN"]}`]);
    const headers = { Authorization: header[1]?.replace("Authorization: ", "") ?? "" };
    const transport = new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } });
    expect(await toolsBy(transport as Transport)).toEqual(["add", "factorize"]);
  });

  test("Claude Desktop starts a program that passes everything on", async () => {
    const { mcpServers } = JSON.parse(blockOf("json claude_desktop_config.json"));
    const { command, args, env } = mcpServers["my-agent"];
    expect([command, Object.keys(mcpServers["my-agent"])]).toEqual(["npx", ["command", "args", "env"]]);
    expect(args[2]).toMatch(SHOWN);
    expect(env).toEqual({ AUTHORIZATION: "Bearer YOUR_TOKEN" });
    const own = { PATH: process.env["PATH"] ?? "", HOME: home, AUTHORIZATION: `Bearer ${exported["TOKEN"]}` };
    const transport = new StdioClientTransport({
      command,
      args: args.map(here),
      env: own,
      cwd: folder,
      stderr: "ignore",
    });
    expect(await toolsBy(transport)).toEqual(["add", "factorize"]);
  });
});
