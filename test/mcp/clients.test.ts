// Ordinary MCP clients use an agent by the URL of its streaming path and a bearer token, and need to know nothing else
// of the gateway: calls, what a server asks and tells on the way, sessions, streams that are resumed, prices, policy.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { registerExactEvmScheme } from "@x402/evm/exact/client";
import { wrapFetchWithPayment, x402Client } from "@x402/fetch";
import { type FacilitatorStandIn, startFacilitatorStandIn } from "../support/chain/facilitator-stand-in.ts";
import { type Json, openPayingTenant, type PayingTenant } from "../support/chain/paying.ts";
import { newPayer } from "../support/chain/payments.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { temporaryRoot } from "../support/gateway/process.ts";
import { ALICE, TEST_CA } from "../support/http/certificates.ts";
import { type ConformanceServer, startConformanceServer } from "../support/mcp/conformance-server.ts";
import {
  CLIENTS,
  type Endpoint,
  inspect,
  type McpClient,
  MODEL_SAYS,
  type OpenClient,
  openVersion1,
  openVersion2,
  USER_SAYS,
} from "../support/mcp/mcp-clients.ts";
import { type McpServer, startMcpServer } from "../support/mcp/mcp-servers.ts";

/** On a busy machine too: what is held back comes much later, or never. */
const HEAD_MS_MAX = 12_000;
const PRICE = "1000";
const MCP = { protocol: "mcp", mcp_transport: "streamable_http" };
const CLIENT = { ...ALICE, name: "alice", ca: TEST_CA, bundle: ALICE.cert + ALICE.key + TEST_CA };
const STATIC = "demo://resource/static/document/features.md";

let gateway: Gateway;
let facilitator: FacilitatorStandIn;
let everything: McpServer;
let fixture: ConformanceServer;
let tenant: PayingTenant;

beforeAll(async () => {
  const caFile = join(mkdtempSync(join(temporaryRoot(), "ca-")), "ca.pem");
  writeFileSync(caFile, TEST_CA);
  facilitator = startFacilitatorStandIn({ mutual: true });
  fixture = startConformanceServer();
  [gateway, everything] = await Promise.all([
    startGateway({ env: { TOLLGATE_CA_FILE: caFile } }),
    startMcpServer("everything"),
  ]);
  tenant = await openTenant();
});

afterAll(async () => {
  await gateway?.[Symbol.asyncDispose]();
  await everything?.stop();
  await fixture?.stop();
  await facilitator?.stop();
});

function openTenant(): Promise<PayingTenant> {
  return openPayingTenant(gateway, { url: facilitator.url, client: CLIENT });
}

async function endpoint(upstreamUrl: string, fields: object = {}, owner = tenant): Promise<Endpoint> {
  const id = await owner.agent({ ...MCP, upstream_url: upstreamUrl, ...fields });
  const token = owner.headers["authorization"]?.replace("Bearer ", "") ?? "";
  return { url: `${owner.callUrl(id)}/stream`, token };
}

/** What the test does with a client of its own. */
async function using<T>(open: OpenClient, to: Endpoint, work: (client: McpClient) => Promise<T>): Promise<T> {
  const client = await open(to);
  try {
    return await work(client);
  } finally {
    await client.close();
  }
}

const said = (result: unknown) => JSON.stringify(result);

describe.each(Object.entries(CLIENTS))("%s", (_, open) => {
  test("connects, lists the tools and calls one", async () => {
    await using(open, await endpoint(everything.url), async (client) => {
      expect(client.serverName()).toBe("mcp-servers/everything");
      expect(await client.tools()).toContain("echo");
      expect(said(await client.call("echo", { message: "ünï 🦆" }))).toContain("ünï 🦆");
    });
  });

  test("hears of a call's progress", async () => {
    await using(open, await endpoint(everything.url), async (client) => {
      let heard = 0;
      const given = { duration: 0.2, steps: 4 };
      const result = await client.call("trigger-long-running-operation", given, () => heard++);
      expect(said(result)).toContain("completed");
      expect(heard).toBe(4);
    });
  });

  test("is asked for its model and for its user in the middle of a call", async () => {
    await using(open, await endpoint(everything.url), async (client) => {
      // The server offers these tools when it knows what the client can do, which is after its first answer.
      expect(await client.tools()).toContain("trigger-elicitation-request");
      expect(said(await client.call("trigger-sampling-request", { prompt: "Hi" }))).toContain(MODEL_SAYS);
      expect(said(await client.call("trigger-elicitation-request"))).toContain(USER_SAYS);
    });
  });

  test("comes back for an answer whose stream was closed, with the last event that it has", async () => {
    await using(open, await endpoint(fixture.url), async (client) => {
      expect(said(await client.call("test_reconnection"))).toContain("on the stream that was resumed");
      const resumed = fixture.arrived.filter(
        ({ method, headers }) =>
          method === "GET" &&
          headers.has("last-event-id") &&
          client.sessionId?.startsWith(`${headers.get("mcp-session-id")}.`),
      );
      expect(resumed).not.toBeEmpty();
    });
  });

  test("hears what the server says outside of calls, on a stream that was silent at first", async () => {
    const listened = fixture.listened();
    await using(open, await endpoint(fixture.url), async (client) => {
      await listened;
      await fixture.announce();
      await client.resourcesChanged;
    });
  });

  test("ends its session", async () => {
    await using(open, await endpoint(fixture.url), async (client) => {
      const { sessionId = "none" } = client;
      const isOpen = () => fixture.sessions().some((session) => sessionId.startsWith(`${session}.`));
      expect(isOpen()).toBe(true);
      await client.terminate();
      expect(isOpen()).toBe(false);
    });
  });

  test("connects to an agent that has a price, and is asked for it when it calls", async () => {
    const pricing = { amount: PRICE, asset: "USDC", network: "base", pay_to: newPayer().address };
    await using(open, await endpoint(everything.url, { pricing }), async (client) => {
      expect(await client.tools()).toContain("echo");
      const unpaid = await client.call("echo", { message: "free?" }).catch((error) => error);
      expect(unpaid).toBeInstanceOf(Error);
      expect(String(unpaid)).toContain('"x402Version":1');
    });
  });
});

describe("a client that can pay", () => {
  test.each([
    ["the SDK of version 1", openVersion1],
    ["the client of version 2", openVersion2],
  ])("%s pays for the tool that has a price, and for nothing else", async (_, open) => {
    const owner = await openTenant();
    const pricing = { amount: PRICE, asset: "USDC", network: "base", pay_to: newPayer().address };
    const to = await endpoint(everything.url, { pricing }, owner);
    const payer = newPayer();
    const wallet = registerExactEvmScheme(new x402Client(), { signer: payer });
    await using(open, { ...to, fetch: wrapFetchWithPayment(fetch, wallet) }, async (client) => {
      expect(await client.tools()).toContain("trigger-sampling-request");
      // The client's answer to the server comes in a message of its own, which is no call.
      expect(said(await client.call("trigger-sampling-request", { prompt: "Hi" }))).toContain(MODEL_SAYS);
      const { data } = (await owner.send("GET", "/v1/invocations")).body;
      const [paid, ...others] = data.filter((item: Json) => item.payment_payer !== null);
      expect(others).toEqual([]);
      expect(paid).toMatchObject({ mode: "streaming", mcp_tool: "trigger-sampling-request" });
      // The client has its answer before the stream has its end, which is what ends the invocation.
      expect(await owner.poll(paid.agent_id, paid.id)).toMatchObject({
        status: "succeeded",
        payment_amount: PRICE,
        payment_payer: payer.address.toLowerCase(),
        settlement: { status: "settled" },
      });
    });
    const from = payer.address.toLowerCase();
    const settled = facilitator.calls.filter(
      ({ body }) => body.paymentPayload.payload.authorization.from.toLowerCase() === from,
    );
    expect(settled).toHaveLength(1);
  });
});

describe("the inspector", () => {
  test("lists and calls, each time in a session of its own", async () => {
    const to = await endpoint(everything.url);
    const [listed, called, resource, prompt] = await Promise.all([
      inspect(to, "--method", "tools/list"),
      inspect(to, "--method", "tools/call", "--tool-name", "get-sum", "--tool-arg", "a=19", "b=23"),
      inspect(to, "--method", "resources/read", "--uri", STATIC),
      inspect(to, "--method", "prompts/get", "--prompt-name", "args-prompt", "--prompt-args", "city=Bonn"),
    ]);
    expect(listed.tools.map(({ name }: Json) => name)).toContain("get-sum");
    expect(said(called)).toContain("42");
    expect(resource.contents[0].uri).toBe(STATIC);
    expect(said(prompt)).toContain("Bonn");
  });
});

describe("the policy", () => {
  test.each([
    ["event streams", "everything", "get-env"],
    ["JSON", "json", "multi-greet"],
  ] as const)("takes denied tools out of lists in %s, and holds for their calls", async (_, name, tool) => {
    const owner = await openTenant();
    const server = name === "everything" ? everything : await startMcpServer(name);
    const to = await endpoint(server.url, {}, owner);
    const all = await using(openVersion1, to, (client) => client.tools());
    expect(all).toContain(tool);
    const document = {
      default: "allow",
      on_error: "deny",
      rules: [
        { action: "deny", match: { tools: [tool] } },
        // Not whatever the rate is: it stays in the list.
        { action: "deny", match: { tools: ["*"], rate_per_min: 100 } },
      ],
    };
    expect((await owner.send("PUT", "/v1/policy", document)).status).toBe(200);
    await using(openVersion1, to, async (client) => {
      expect(await client.tools()).toEqual(all.filter((each) => each !== tool));
      expect(String(await client.call(tool).catch((error) => error))).toContain("denied by policy");
    });
    if (server !== everything) await server.stop();
  });
});

/** A session without a client around it: the headers of its requests. */
async function openSession({ url, token }: Endpoint): Promise<Record<string, string>> {
  const headers = {
    authorization: `Bearer ${token}`,
    accept: "application/json, text/event-stream",
    "content-type": "application/json",
  };
  const params = {
    protocolVersion: "2025-11-25",
    capabilities: {},
    clientInfo: { name: "none", version: "1" },
  };
  const body = JSON.stringify({ jsonrpc: "2.0", id: 1, method: "initialize", params });
  const response = await fetch(url, { method: "POST", headers, body });
  expect(await response.text()).toContain('"serverInfo"');
  return { ...headers, "mcp-session-id": response.headers.get("mcp-session-id") ?? "none" };
}

test("an event stream that says nothing is open at once", async () => {
  const to = await endpoint(everything.url);
  const headers = await openSession(to);
  const gone = new AbortController();
  const signal = AbortSignal.any([gone.signal, AbortSignal.timeout(HEAD_MS_MAX)]);
  const response = await fetch(to.url, { headers, signal });
  expect(response.status).toBe(200);
  expect(response.headers.get("content-type")).toStartWith("text/event-stream");
  gone.abort();
});

test("an event stream is closed at the server when its caller goes", async () => {
  const to = await endpoint(fixture.url);
  const headers = await openSession(to);
  const listened = fixture.listened();
  const gone = new AbortController();
  const response = fetch(to.url, { headers, signal: gone.signal });
  await listened;
  await fixture.announce();
  const { body } = await response;
  const seen = await body?.getReader().read();
  expect(new TextDecoder().decode(seen?.value)).toContain("notifications/resources/list_changed");
  const opened = fixture.arrived.findLast(({ method }) => method === "GET");
  expect(headers["mcp-session-id"]).toStartWith(`${opened?.headers.get("mcp-session-id")}.`);
  const closed = Promise.withResolvers<void>();
  opened?.signal.addEventListener("abort", () => closed.resolve());
  gone.abort();
  await closed.promise;
});

test("a caller that has lost its connection in the middle of a call comes back for the rest", async () => {
  const to = await endpoint(fixture.url);
  const headers = await openSession(to);
  const lost = new AbortController();
  const params = { name: "test_tool_with_progress", arguments: {}, _meta: { progressToken: 7 } };
  const body = JSON.stringify({ jsonrpc: "2.0", id: 2, method: "tools/call", params });
  const response = await fetch(to.url, { method: "POST", headers, body, signal: lost.signal });
  const first = await response.body?.getReader().read();
  const last = /^id: (.+)$/m.exec(new TextDecoder().decode(first?.value))?.[1] ?? "none";
  lost.abort();
  const signal = AbortSignal.timeout(HEAD_MS_MAX);
  const resumed = await fetch(to.url, { headers: { ...headers, "last-event-id": last }, signal });
  let rest = "";
  for await (const piece of (resumed.body ?? new ReadableStream()).pipeThrough(new TextDecoderStream())) {
    rest += piece;
    if (rest.includes("Told its progress.")) break;
  }
  expect(rest).toContain('"progress":100');
});

test("a gateway that is told to stop keeps no open event stream", async () => {
  const own = await startGateway();
  try {
    const owner = await openPayingTenant(own, { url: facilitator.url, client: CLIENT });
    const to = await endpoint(everything.url, {}, owner);
    const { body } = await fetch(to.url, { headers: await openSession(to) });
    const stopped = own.stop();
    await expect(new Response(body).text()).rejects.toThrow();
    await stopped;
  } finally {
    await own[Symbol.asyncDispose]();
  }
});

test("a session is its user's alone", async () => {
  const alice = await endpoint(fixture.url);
  const bob = { ...alice, token: await gateway.token({ tenant: tenant.name, user: "bob" }) };
  await using(openVersion1, alice, async (client) => {
    const taken = (method: string) =>
      fetch(bob.url, {
        method,
        headers: {
          authorization: `Bearer ${bob.token}`,
          accept: "application/json, text/event-stream",
          "content-type": "application/json",
          "mcp-session-id": client.sessionId ?? "",
        },
        ...(method === "POST" && { body: JSON.stringify({ jsonrpc: "2.0", id: 1, method: "tools/list" }) }),
        signal: AbortSignal.timeout(HEAD_MS_MAX),
      });
    for (const method of ["POST", "GET", "DELETE"]) {
      const response = await taken(method);
      await response.body?.cancel();
      // As to one whose session is unknown: a client then opens one of its own.
      expect([method, response.status]).toEqual([method, 404]);
    }
    expect(said(await client.call("test_simple_text"))).toContain("simple text");
  });
});
