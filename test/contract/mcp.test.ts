// MCP agents through the gateway: the form of a call, and real servers of every kind as upstreams.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { type McpServer, startMcpServer } from "../support/mcp/mcp-servers.ts";
import { contract, expectError, type Json, MCP, responseText } from "./contract.ts";

const list = (id: unknown) => ({ jsonrpc: "2.0", id, method: "tools/list" });
const SERVERS = ["everything", "stateful", "json", "stateless"] as const;
let servers: Record<(typeof SERVERS)[number], McpServer>;
beforeAll(async () => {
  const started = await Promise.all(SERVERS.map(async (name) => [name, await startMcpServer(name)] as const));
  servers = Object.fromEntries(started) as typeof servers;
});
afterAll(() => Promise.all(Object.values(servers ?? {}).map((server) => server.stop())));

const WRONG_FORM: ReadonlyArray<readonly [string, string]> = [
  ["nothing", ""],
  ["no JSON", "{"],
  ["an array", JSON.stringify([list(1)])],
  ["an empty array", "[]"],
  ["null", "null"],
  ["a string", '"tools/list"'],
  ["a notification", JSON.stringify({ jsonrpc: "2.0", method: "notifications/x" })],
  ["a null id", JSON.stringify(list(null))],
  ["an object for id", JSON.stringify(list({}))],
  ["true for id", JSON.stringify(list(true))],
  ["no version", JSON.stringify({ id: 1, method: "x" })],
  ["version 1.0", JSON.stringify({ ...list(1), jsonrpc: "1.0" })],
  ["a number for version", JSON.stringify({ ...list(1), jsonrpc: 2.0 })],
  ["no method", JSON.stringify({ jsonrpc: "2.0", id: 1 })],
  ["a number for method", JSON.stringify({ ...list(1), method: 5 })],
  ["a response", JSON.stringify({ jsonrpc: "2.0", id: 1, result: {} })],
  ["text for params", JSON.stringify({ ...list(1), params: "x" })],
  ["two ids", '{"jsonrpc":"2.0","id":1,"id":2,"method":"x"}'],
  ["two methods", '{"jsonrpc":"2.0","id":1,"method":"a","method":"b"}'],
];

const tool = (name: string, given: object = {}) => ["tools/call", { name, arguments: given }] as const;
const prompt = (name: string, given: object = {}) => ["prompts/get", { name, arguments: given }] as const;
const resource = (uri: string) => ["resources/read", { uri }] as const;
const STATIC = "demo://resource/static/document/features.md";

/** Everything that the server everything does for a client without capabilities, and a part of its answer. */
const EVERYTHING: ReadonlyArray<readonly [method: string, params: object | undefined, part: string]> = [
  ["ping", undefined, "{}"],
  ["tools/list", undefined, '"name":"echo"'],
  ["prompts/list", undefined, '"name":"simple-prompt"'],
  ["resources/list", undefined, STATIC],
  ["resources/templates/list", undefined, "demo://resource/dynamic/text/{resourceId}"],
  ["tasks/list", undefined, '"tasks":['],
  ["logging/setLevel", { level: "error" }, "{}"],
  ["resources/subscribe", { uri: STATIC }, "{}"],
  ["resources/unsubscribe", { uri: STATIC }, "{}"],
  [
    "completion/complete",
    { ref: { type: "ref/prompt", name: "completable-prompt" }, argument: { name: "department", value: "S" } },
    '"Sales"',
  ],
  [...resource(STATIC), "# "],
  [...resource("demo://resource/dynamic/text/7"), "Resource 7"],
  [...resource("demo://resource/dynamic/blob/7"), '"blob":"'],
  [...prompt("simple-prompt"), "simple prompt"],
  [...prompt("args-prompt", { city: "Bonn", state: "NRW" }), "Bonn, NRW"],
  [...prompt("completable-prompt", { department: "Sales", name: "David" }), "David"],
  [...prompt("resource-prompt", { resourceType: "Text", resourceId: "3" }), "demo://resource/dynamic/text/3"],
  [...tool("echo", { message: "ünï 🦆" }), "ünï 🦆"],
  [...tool("get-annotated-message", { messageType: "success", includeImage: true }), '"priority":'],
  [...tool("get-env"), "TEST_SERVER_PORT"],
  [...tool("get-resource-links", { count: 4 }), "resource_link"],
  [...tool("get-resource-reference", { resourceType: "Blob", resourceId: 2 }), "dynamic/blob/2"],
  [...tool("get-structured-content", { location: "Chicago" }), '"structuredContent":{'],
  [...tool("get-sum", { a: 19, b: 23 }), "42"],
  [...tool("get-tiny-image"), '"mimeType":"image/png"'],
  [
    ...tool("gzip-file-as-resource", { name: "a.gz", data: "data:text/plain,abc", outputType: "resource" }),
    '"mimeType":"application/gzip"',
  ],
  [...tool("toggle-simulated-logging"), "simulated"],
  [...tool("toggle-subscriber-updates"), "subscribed"],
  [...tool("trigger-long-running-operation", { duration: 0.2, steps: 2 }), "completed"],
];

contract((at) => {
  describe("an mcp call", () => {
    test.each(WRONG_FORM)("is refused in this form: %s", async (_, body) => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
      const headers = { "content-type": "application/json" };
      expectError(await tenant.send("POST", `/v1/proxy/${id}`, { body, headers }), 400, "body");
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
    });

    test("is refused with invalid UTF-8", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: at.upstream().url });
      const body = Buffer.concat([
        Buffer.from('{"jsonrpc":"2.0","id":"'),
        Buffer.of(0xff),
        Buffer.from('","method":"x"}'),
      ]);
      expectError(await tenant.send("POST", `/v1/proxy/${id}`, { body: new Uint8Array(body) }), 400, "body");
    });

    test("is recorded with its method and its tool, a tool of tools/call alone", async () => {
      const tenant = at.tenant();
      const route = at.upstream(({ body }) => {
        const { id } = JSON.parse(new TextDecoder().decode(body));
        return Response.json({ jsonrpc: "2.0", id, result: {} });
      });
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
      const call = { ...list(1), method: "tools/call", params: { name: "search", arguments: {} } };
      const prompt = { ...list(1), method: "prompts/get", params: { name: "p" } };
      expect(await tenant.invoke(id, { json: call })).toMatchObject({
        mcp_method: "tools/call",
        mcp_tool: "search",
      });
      expect(await tenant.invoke(id, { json: prompt })).toMatchObject({
        mcp_method: "prompts/get",
        mcp_tool: null,
      });
    });

    test("goes out with the body and headers that the protocol wants", async () => {
      const tenant = at.tenant();
      const route = at.upstream(() => Response.json({ jsonrpc: "2.0", id: "x", result: {} }));
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
      const body = ' { "jsonrpc": "2.0",\n "id": "x", "method": "tools/list", "params": {"_meta": {"a": 1e2}} } ';
      await tenant.invoke(id, { body, headers: { accept: "text/plain", "mcp-session-id": "mine" } });
      const seen = await route.arrival();
      expect(new TextDecoder().decode(seen.body)).toBe(body);
      expect(seen.headers.get("accept")).toBe("application/json, text/event-stream");
      expect(seen.headers.get("content-type")).toStartWith("application/json");
      expect(seen.headers.get("mcp-protocol-version")).toMatch(/^\d{4}-\d\d-\d\d$/);
      expect(seen.headers.has("mcp-session-id")).toBe(false);
    });

    test("may have a fraction for its id, for a server that takes one", async () => {
      const tenant = at.tenant();
      const route = at.upstream(({ body }) => new Response(body.slice()));
      const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
      await tenant.call(id, { json: list(1.5) });
      expect(JSON.parse(new TextDecoder().decode((await route.arrival()).body))).toEqual(list(1.5));
    });

    test("has an event stream stored as the response in it, and fails as internal when that ends without it", async () => {
      const tenant = at.tenant();
      const progress = JSON.stringify({
        jsonrpc: "2.0",
        method: "notifications/progress",
        params: { progress: 1 },
      });
      const response = JSON.stringify({ jsonrpc: "2.0", id: 7, result: { ok: true } });
      const stream = (...events: string[]) =>
        new Response(events.map((event) => `event: message\ndata: ${event}\n\n`).join(""), {
          headers: { "content-type": "text/event-stream" },
        });
      const good = at.upstream(() => stream(progress, response));
      const { id } = await tenant.agent({ ...MCP, upstream_url: good.url });
      const view = await tenant.invoke(id, { json: list(7) });
      expect(view).toMatchObject({ status: "succeeded", upstream_status: 200 });
      expect(view.response_content_type).toStartWith("application/json");
      expect(JSON.parse(responseText(view))).toEqual(JSON.parse(response));
      const sent = await stream(progress, response).bytes();
      expect((await tenant.detail(view.invocation_id)).resp_size).toBe(sent.length);

      const bad = at.upstream(() => stream(progress));
      await tenant.patch(id, { upstream_url: bad.url });
      expect(await tenant.invoke(id, { json: list(7) })).toMatchObject({
        status: "failed",
        error_class: "internal",
      });
    });
  });

  describe.each(SERVERS)("the server %s", (name) => {
    test.each([1, 0, -5, "text", "", "ünï 🦆"])("answers under the caller's id %p", async (rpcId) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: servers[name].url });
      const view = await tenant.invoke(id, { json: list(rpcId) });
      expect(view).toMatchObject({ status: "succeeded", upstream_status: 200, mcp_method: "tools/list" });
      expect(view.response_content_type).toStartWith("application/json");
      const message = JSON.parse(responseText(view));
      expect(message).toMatchObject({ jsonrpc: "2.0", id: rpcId });
      expect(message.result.tools.length).toBeGreaterThan(0);
    });

    test("concurrent calls under one id each get their own answer", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: servers[name].url });
      const views: Json[] = await Promise.all(
        Array.from({ length: 8 }, () => tenant.invoke(id, { json: list("same") })),
      );
      for (const view of views) {
        expect(view.status).toBe("succeeded");
        expect(JSON.parse(responseText(view))).toMatchObject({
          id: "same",
          result: { tools: expect.any(Array) },
        });
      }
    });
  });

  describe("a server that does things for a client without capabilities", () => {
    test.each(EVERYTHING)("does what it is called for: %s %j", async (method, params, part) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: servers.everything.url });
      const view = await tenant.invoke(id, { json: { jsonrpc: "2.0", id: 1, method, params } });
      expect(view).toMatchObject({ status: "succeeded", upstream_status: 200, mcp_method: method });
      const { result } = JSON.parse(responseText(view));
      expect(result?.isError).not.toBe(true);
      expect(JSON.stringify(result)).toContain(part);
    });

    test("begins a task, which is found again in the same session to be cancelled", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: servers.everything.url });
      const ask = async (method: string, params: object) => {
        const view = await tenant.invoke(id, { json: { jsonrpc: "2.0", id: method, method, params } });
        expect(view).toMatchObject({ status: "succeeded", mcp_method: method });
        return JSON.parse(responseText(view)).result;
      };
      const call = { name: "simulate-research-query", arguments: { topic: "ducks" }, task: { ttl: 60_000 } };
      const { taskId } = (await ask("tools/call", call)).task;
      expect(await ask("tasks/get", { taskId })).toMatchObject({ taskId, status: "working" });
      expect(await ask("tasks/cancel", { taskId })).toMatchObject({ taskId, status: "cancelled" });
    });
  });

  test("a forgotten session is renewed once, unseen by the caller", async () => {
    const tenant = at.tenant();
    const first = await startMcpServer("stateful");
    const { id } = await tenant.agent({ ...MCP, upstream_url: first.url });
    expect(await tenant.invoke(id, { json: list(1) })).toMatchObject({ status: "succeeded" });
    await first.stop();
    const second = await startMcpServer("stateful", first.port);
    expect(await tenant.invoke(id, { json: list(2) })).toMatchObject({ status: "succeeded" });
    await second.stop();
  });
});
