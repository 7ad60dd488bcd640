import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { type RecordingProxy, startRecordingProxy } from "../../../../test/support/http/upstream.ts";
import {
  answer,
  client,
  echo,
  keep,
  LIST,
  methods,
  sessionsOf,
  stopKept,
  text,
} from "../../../../test/support/mcp/mcp-calls.ts";
import { type McpServer, startMcpServer } from "../../../../test/support/mcp/mcp-servers.ts";

afterEach(stopKept);

describe("calls of the everything server (sessions, event streams, 400 to an unknown session)", () => {
  let server: McpServer;
  let proxy: RecordingProxy;
  beforeAll(async () => {
    server = await startMcpServer("everything");
    proxy = startRecordingProxy(server.url);
  });
  afterAll(async () => {
    await proxy.stop();
    await server.stop();
  });

  test("go over one session, which is closed at the end", async () => {
    const before = proxy.requests.length;
    const { send, close } = client();
    const first = await send(proxy.url, echo("hello", "my-id"));
    expect(first).toMatchObject({
      status: "succeeded",
      upstream_status: 200,
      response_content_type: "application/json",
      response_truncated: false,
    });
    expect(answer(first)).toMatchObject({ id: "my-id", result: { content: [{ text: "Echo: hello" }] } });
    expect(first.resp_size).toBeGreaterThan(text(first).length);
    for (let i = 0; i < 5; i++) expect(answer(await send(proxy.url, echo(`m${i}`))).id).toBe(1);
    await close();
    const requests = proxy.requests.slice(before);
    expect(methods(requests)).toEqual([
      "tools/call 400",
      "initialize 200",
      "notifications/initialized 202",
      ...Array.from({ length: 6 }, () => "tools/call 200"),
      "DELETE 200",
    ]);
    expect(sessionsOf(requests)).toBe(1);
    const posts = requests.filter(({ method }) => method === "POST");
    expect(new Set(posts.map(({ headers }) => headers.get("accept")))).toEqual(
      new Set(["application/json, text/event-stream"]),
    );
  });

  test("share one initialize when they come together, and each gets its own answer under one caller id", async () => {
    const before = proxy.requests.length;
    const { send } = client();
    const outcomes = await Promise.all(Array.from({ length: 40 }, (_, i) => send(proxy.url, echo(`n${i}`))));
    expect(outcomes.map((outcome) => [answer(outcome).id, answer(outcome).result.content[0].text])).toEqual(
      outcomes.map((_, i) => [1, `Echo: n${i}`]),
    );
    const requests = proxy.requests.slice(before);
    expect(methods(requests).filter((m) => m.startsWith("initialize"))).toHaveLength(1);
    expect(sessionsOf(requests)).toBe(1);
    const ids = requests.filter((r) => r.status === 200).map((r) => (JSON.parse(r.body) as { id: number }).id);
    expect(new Set(ids).size).toBe(ids.length);
  });

  test("share no session when they are of two keys", async () => {
    const before = proxy.requests.length;
    const { send } = client();
    await send(proxy.url, LIST, { session_key: "a", credential: { name: "X-API-Key", value: "A" } });
    await send(proxy.url, LIST, { session_key: "b", credential: { name: "X-API-Key", value: "B" } });
    const requests = proxy.requests.slice(before);
    const pairs = requests.map(({ headers }) => `${headers.get("mcp-session-id")} ${headers.get("x-api-key")}`);
    expect(new Set(pairs.filter((pair) => !pair.startsWith("null"))).size).toBe(2);
    expect(sessionsOf(requests)).toBe(2);
  });

  test("get their result, and progress before it is passed over", async () => {
    const { send } = client();
    const outcome = await send(proxy.url, {
      jsonrpc: "2.0",
      id: 9,
      method: "tools/call",
      params: {
        name: "trigger-long-running-operation",
        arguments: { duration: 0.3, steps: 3 },
        _meta: { progressToken: "p" },
      },
    });
    expect(outcome.status).toBe("succeeded");
    expect(answer(outcome)).toMatchObject({ id: 9, result: { content: [{ type: "text" }] } });
    expect(outcome.latency_ms).toBeGreaterThanOrEqual(290);
    // The result alone would be shorter: progress was in the stream as well.
    expect(outcome.resp_size).toBeGreaterThan(2 * text(outcome).length);
  });

  test("leave the session to the others when they are cancelled", async () => {
    const { send } = client();
    await send(proxy.url, LIST);
    const before = proxy.requests.length;
    const stop = new AbortController();
    const long = { name: "trigger-long-running-operation", arguments: { duration: 20, steps: 2 } };
    const pending = send(proxy.url, { ...LIST, method: "tools/call", params: long }, {}, stop);
    const other = await send(proxy.url, echo("meanwhile"));
    stop.abort("cancelled");
    expect(await pending).toMatchObject({ status: "failed", error_class: "cancelled" });
    const told = await proxy.seen((request) => request.body.includes("notifications/cancelled"));
    const sent = proxy.requests.find((request) => request.body.includes('"duration":20'));
    expect((JSON.parse(told.body) as { params: { requestId: number } }).params.requestId).toBe(
      (JSON.parse(sent!.body) as { id: number }).id,
    );
    expect(answer(other).result.content[0].text).toBe("Echo: meanwhile");
    expect(answer(await send(proxy.url, echo("after"))).result.content[0].text).toBe("Echo: after");
    expect(methods(proxy.requests.slice(before)).some((m) => m.startsWith("initialize"))).toBe(false);
  });

  test("may have JSON-RPC errors for answers", async () => {
    const { send } = client();
    const outcome = await send(proxy.url, { ...LIST, id: "e", method: "no/such" });
    expect(outcome).toMatchObject({ status: "succeeded", error_class: null, upstream_status: 200 });
    expect(answer(outcome)).toMatchObject({ id: "e", error: { code: -32601 } });
  });
});

test("a server that starts again gets a new session (400 to the old one)", async () => {
  const first = keep(await startMcpServer("everything"));
  const proxy = keep(startRecordingProxy(first.url));
  const { send } = client();
  await send(proxy.url, LIST);
  await first.stop();
  const second = keep(await startMcpServer("everything"));
  proxy.forwardTo(second.url);
  const before = proxy.requests.length;
  const outcomes = await Promise.all(Array.from({ length: 5 }, (_, i) => send(proxy.url, echo(`again ${i}`))));
  expect(outcomes.map((outcome) => answer(outcome).result.content[0].text)).toEqual(
    outcomes.map((_, i) => `Echo: again ${i}`),
  );
  const seen = methods(proxy.requests.slice(before));
  expect(seen.filter((m) => m === "tools/call 400")).toHaveLength(5);
  expect(seen.filter((m) => m.startsWith("initialize"))).toHaveLength(1);
});

test("a server that starts again gets a new session (404 to the old one)", async () => {
  const first = keep(await startMcpServer("stateful"));
  const proxy = keep(startRecordingProxy(first.url));
  const { send } = client();
  await send(proxy.url, LIST);
  await first.stop();
  const second = keep(await startMcpServer("stateful"));
  proxy.forwardTo(second.url);
  const before = proxy.requests.length;
  expect(await send(proxy.url, LIST)).toMatchObject({ status: "succeeded", upstream_status: 200 });
  expect(methods(proxy.requests.slice(before))).toEqual([
    "tools/list 404",
    "initialize 200",
    "notifications/initialized 202",
    "tools/list 200",
  ]);
});

test("JSON answers on a session get the caller's id back", async () => {
  const server = keep(await startMcpServer("json"));
  const proxy = keep(startRecordingProxy(server.url));
  const { send } = client();
  const big = '{"method":"tools/list","params":{"n":12345678901234567890},"id":98765432109876543210,"jsonrpc":"2.0"}';
  for (let i = 0; i < 2; i++) {
    const outcome = await send(proxy.url, big);
    expect(outcome).toMatchObject({
      status: "succeeded",
      response_content_type: "application/json",
    });
    expect(text(outcome)).toContain('"id":98765432109876543210');
    expect(outcome.resp_size).toBeGreaterThan(100);
  }
  expect(proxy.requests.at(-1)?.body).toBe(big.replace("98765432109876543210", "3"));
  expect(sessionsOf(proxy.requests)).toBe(1);
});

test("a server without sessions is called plainly, byte for byte, and never initialized", async () => {
  const server = keep(await startMcpServer("stateless"));
  const proxy = keep(startRecordingProxy(server.url));
  const { send } = client();
  const body = ' {"jsonrpc":"2.0" , "id":"\\u0061", "method":"tools\\/list"}\n';
  const outcomes = await Promise.all([send(proxy.url, body), send(proxy.url, body)]);
  for (const outcome of outcomes) {
    expect(outcome.status).toBe("succeeded");
    expect(text(outcome)).toContain('"id":"\\u0061"');
  }
  expect(proxy.requests.map((request) => request.body)).toEqual([body, body]);
});
