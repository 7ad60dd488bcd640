// What an MCP client's messages come to on the streaming path, each by itself and in batches: which are the
// connection and free, what the others cost, and that the policy judges every call among them.
import { describe, expect, test } from "bun:test";
import { type Answer, contract, expectError, type Json, MCP, type Tenant } from "../contract/contract.ts";
import { startMcpServer } from "../support/mcp/mcp-servers.ts";

const PRICING = {
  amount: "100",
  asset: "USDC",
  network: "base",
  pay_to: `0x${"aB".repeat(20)}`,
  tools: { cheap: "3", free: "0" },
};

const request = (method: string, params?: object) => ({ jsonrpc: "2.0", id: method, method, params });
const notification = (method: string, params?: object) => ({ jsonrpc: "2.0", method, params });
const call = (name: string) => request("tools/call", { name, arguments: {} });
const answer = { jsonrpc: "2.0", id: 1, result: { action: "accept" } };

const CONNECTION: ReadonlyArray<readonly [string, unknown]> = [
  ...[
    request("initialize", { protocolVersion: "2025-11-25", capabilities: {}, clientInfo: { name: "a" } }),
    request("ping"),
    request("tools/list"),
    request("prompts/list", { cursor: "a" }),
    request("resources/list"),
    request("resources/templates/list"),
    request("tasks/list"),
    request("resources/subscribe", { uri: "a:b" }),
    request("logging/setLevel", { level: "info" }),
    request("completion/complete"),
    request("server/discover"),
    notification("notifications/initialized"),
    notification("notifications/cancelled", { requestId: 1 }),
  ].map((message) => [message.method, message] as const),
  ["the answer to a question of the server", answer],
  ["the refusal of one", { jsonrpc: "2.0", id: 1, error: { code: -1, message: "no" } }],
  ["a batch of all that", [request("ping"), request("tools/list"), notification("notifications/x"), answer]],
];

const CALLS: ReadonlyArray<readonly [string, price: string, unknown]> = [
  ...[
    request("prompts/get", { name: "cheap" }),
    request("resources/read", { uri: "a:b" }),
    request("tasks/result", { taskId: "a" }),
    request("notifications/initialized"),
    request("Ping"),
    notification("ping"),
    notification("tools/call", { name: "any" }),
  ].map((message) => [JSON.stringify(message), PRICING.amount, message] as const),
  ["a tool", "100", call("other")],
  ["a tool with a price of its own", "3", call("cheap")],
  [
    "one whose name is escaped",
    "3",
    String.raw`{"jsonrpc":"2.0","id":1,"method":"tools\u002fcall","params":{"name":"\u0063heap"}}`,
  ],
  ["a tool call without a name", "100", request("tools/call", {})],
  ["a batch of calls", "106", [call("other"), call("cheap"), call("free"), call("cheap"), request("tasks/get")]],
  ["a batch with one call in it", "3", [request("ping"), call("cheap"), answer]],
];

const REFUSED: ReadonlyArray<readonly [string, string]> = [
  ["a name given twice", '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"free","name":"a"}}'],
  ["params given twice", '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"free"},"params":{}}'],
  ["params in capitals", '{"jsonrpc":"2.0","id":1,"method":"tools/call","Params":{"name":"a"},"params":{}}'],
  ["a method and a result", '{"jsonrpc":"2.0","id":1,"method":"tools/call","result":{}}'],
  ["an empty batch", "[]"],
  ["a batch in a batch", '[[{"jsonrpc":"2.0","id":1,"method":"ping"}]]'],
  ["a batch with something else in it", '[{"jsonrpc":"2.0","id":1,"method":"ping"},1]'],
  ["two messages", '{"jsonrpc":"2.0","id":1,"method":"ping"}{"jsonrpc":"2.0","id":1,"method":"ping"}'],
];

async function realServer() {
  const { url, stop } = await startMcpServer("stateless");
  return { url, [Symbol.asyncDispose]: stop };
}

contract((at) => {
  const upstream = () => at.upstream(() => Response.json({ jsonrpc: "2.0", id: 1, result: { tools: [] } }));
  /** A text is sent as it is. */
  const post = (tenant: Tenant, id: string, message: unknown): Promise<Answer> => {
    const body = typeof message === "string" ? message : JSON.stringify(message);
    const headers = { "content-type": "application/json" };
    return tenant.send("POST", `/v1/proxy/${id}/stream`, { body, headers });
  };
  const total = async (tenant: Tenant): Promise<number> => (await tenant.send("GET", "/v1/invocations")).body.total;
  const decisions = async (tenant: Tenant): Promise<Json[]> =>
    (await tenant.send("GET", "/v1/policy/decisions")).body.data;
  const decree = async (tenant: Tenant, policy: object): Promise<void> => {
    const json = { default: "allow", on_error: "deny", rules: [], ...policy };
    expect((await tenant.send("PUT", "/v1/policy", { json })).status).toBe(200);
  };

  describe("a message of the connection", () => {
    test.each(CONNECTION)("is free and not judged: %s", async (_, message) => {
      const tenant = at.tenant();
      await decree(tenant, { default: "deny" });
      const route = upstream();
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url, pricing: PRICING });
      const passed = await post(tenant, id, message);
      expect(passed.status).toBe(200);
      expect(passed.headers.get("x-service-invocation-id")).toStartWith("inv_");
      expect(JSON.parse(new TextDecoder().decode((await route.arrival()).body))).toEqual(
        JSON.parse(JSON.stringify(message)),
      );
      expect(await decisions(tenant)).toEqual([]);
      expect(await total(tenant)).toBe(1);
    });
  });

  describe("the price of a call", () => {
    test.each(CALLS)("is asked for: %s at %s", async (_, price, message) => {
      const tenant = at.tenant();
      const route = upstream();
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url, pricing: PRICING });
      const asked = await post(tenant, id, message);
      expect(asked.status).toBe(402);
      expect(asked.body.accepts[0].maxAmountRequired).toBe(price);
      expect(asked.body.accepts[0].resource).toBe(`${at.gateway.url}/v1/proxy/${id}/stream`);
      expect(route.seen).toEqual([]);
      expect(await total(tenant)).toBe(0);
    });

    test("is none for a tool whose price is zero", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: upstream().url, pricing: PRICING });
      expect((await post(tenant, id, [call("free"), call("free")])).status).toBe(200);
    });
  });

  describe("the policy", () => {
    const deny = (...tools: string[]) => ({ rules: [{ action: "deny", match: { tools } }] });

    test("judges each call of a batch, and one that it denies refuses them all", async () => {
      const tenant = at.tenant();
      await decree(tenant, deny("delete_*"));
      const route = upstream();
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
      const batch = [request("ping"), call("read_a"), call("delete_a"), call("read_b")];
      expectError(await post(tenant, id, batch), 403);
      expect(route.seen).toEqual([]);
      expect(await total(tenant)).toBe(0);
      const made = await decisions(tenant);
      expect(made.filter(({ action }) => action === "deny")).toMatchObject([{ mcp_tool: "delete_a" }]);

      expect((await post(tenant, id, [call("read_a"), call("read_b")])).status).toBe(200);
      const tools = (await decisions(tenant)).slice(0, 2).map(({ mcp_tool }) => mcp_tool);
      expect(tools.toSorted()).toEqual(["read_a", "read_b"]);
    });

    test("judges a call that asks for no answer, and what is no tool", async () => {
      const tenant = at.tenant();
      await decree(tenant, { default: "deny" });
      const route = upstream();
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
      for (const message of [notification("tools/call", { name: "a" }), request("resources/read", { uri: "a:b" })]) {
        expectError(await post(tenant, id, message), 403);
      }
      expect(route.seen).toEqual([]);
    });

    // Express, on which the official SDK's servers stand, decodes the body by the charset that the request names.
    test("judges what the server reads, whatever charset the caller says", async () => {
      const tenant = at.tenant();
      await decree(tenant, deny("*"));
      await using server = await realServer();
      const { id } = await tenant.agent({ ...MCP, upstream_url: server.url });
      const utf7 = (text: string) => `+${Buffer.from(text, "utf16le").swap16().toString("base64").replace(/=+$/, "")}-`;
      const hidden = `"}},"method":"tools/call","params":{"name":"start-notification-stream","arguments":{"interval":1,"count":1},"_meta":{"x":"`;
      const body = `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":{"x":"${utf7(hidden)}"}}}`;
      const headers = {
        "content-type": "application/json; charset=utf-7",
        accept: "application/json, text/event-stream",
      };
      const { status, text } = await tenant.send("POST", `/v1/proxy/${id}/stream`, { body, headers });
      expect([status, text]).toEqual([200, expect.stringContaining('"result":{}')]);
    });

    test("takes a denied tool out of whatever answer brings a list, and leaves the rest as it was", async () => {
      const tenant = at.tenant();
      await decree(tenant, deny("delete_*"));
      const tools = ["delete_a", "read_a", "delete_b", "read_b", "delete_c"].map((name) => ({ name }));
      const list = JSON.stringify({ jsonrpc: "2.0", id: 1, result: { tools, nextCursor: "é" } });
      const kept = { jsonrpc: "2.0", id: 1, result: { tools: [tools[1], tools[3]], nextCursor: "é" } };
      const events = `id: 1\nretry: 5\ndata:\n\n: x\r\nid: 2\r\nevent: message\r\ndata: ${list}\r\n\r\n`;
      const kinds = [
        ["application/json", ` [${list},{"jsonrpc":"2.0","id":2,"result":{}}]`],
        ["text/event-stream; charset=utf-8", events],
      ] as const;
      for (const [type, body] of kinds) {
        const route = at.upstream(() => new Response(body, { headers: { "content-type": type } }));
        const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
        for (const method of ["POST", "GET"]) {
          if (method === "GET" && type === "application/json") continue;
          const sending = method === "POST" ? { json: [request("tools/list"), request("ping")] } : {};
          const { status, text } = await tenant.send(method, `/v1/proxy/${id}/stream`, sending);
          expect(status).toBe(200);
          expect(text).not.toContain("delete_");
          expect(text).toContain(JSON.stringify(kept));
          if (type !== "application/json") expect(text).toStartWith("id: 1\nretry: 5\ndata: \n\n");
        }
      }
    });
  });

  describe("a message that can be read in two ways", () => {
    test.each(REFUSED)("is refused: %s", async (_, body) => {
      const tenant = at.tenant();
      const route = upstream();
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
      expectError(await post(tenant, id, body), 400, "body");
      expect(route.seen).toEqual([]);
    });
  });
});
