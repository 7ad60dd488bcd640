import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import {
  type Recorded,
  type RecordingProxy,
  startRecordingProxy,
  startUpstream,
  type Upstream,
} from "../../../../test/support/http/upstream.ts";
import { type McpServer, startMcpServer } from "../../../../test/support/mcp/mcp-servers.ts";
import { type JobParts, LOOPBACK, makeJob } from "../../../../test/support/stores/jobs.ts";
import { hostRules } from "../../../core/host.ts";
import { createDecoderShare } from "../../../http/decoder-share.ts";
import { createOutbound } from "../../../http/outbound.ts";
import { runCall } from "../call.ts";
import type { Outcome, WorkerSettings } from "../job.ts";
import { createResponseMemory } from "../workers/response-memory.ts";
import { createMcp } from "./call.ts";

const open: Array<{ stop(): Promise<void> }> = [];

afterEach(async () => {
  for (const part of open.splice(0).reverse()) await part.stop();
});

function keep<T extends { stop(): Promise<void> }>(part: T): T {
  open.push(part);
  return part;
}

/** A caller with sessions of its own. */
function client(settings: Partial<WorkerSettings> = {}, memory = createResponseMemory(1)) {
  const whole = { ...LOOPBACK, ...settings };
  const outbound = createOutbound({ rules: hostRules({ allow: whole.allow_hosts }), extraCa: null });
  const upstreams = { outbound, settings: whole, memory, decoders: createDecoderShare() };
  const mcp = createMcp(upstreams);
  keep({ stop: mcp.close });
  return {
    close: mcp.close,
    send: (url: string, request: unknown, parts: JobParts = {}, stop = new AbortController()) => {
      const body = typeof request === "string" ? request : JSON.stringify(request);
      const call = { protocol: "mcp" as const, ...parts.call };
      return runCall(makeJob(url, { body, ...parts, call }), upstreams, stop, mcp.call);
    },
  };
}

const LIST = { jsonrpc: "2.0", id: 1, method: "tools/list" };

function echo(message: string, id: unknown = 1) {
  return { jsonrpc: "2.0", id, method: "tools/call", params: { name: "echo", arguments: { message } } };
}

function text(outcome: Outcome): string {
  return new TextDecoder().decode(outcome.response ?? new Uint8Array());
}

// biome-ignore lint/suspicious/noExplicitAny: answers of test servers are looked into freely.
function answer(outcome: Outcome): any {
  return JSON.parse(text(outcome));
}

function methods(requests: readonly Recorded[]): string[] {
  return requests.map(({ method, body, status }) => {
    const name = body === "" ? method : (JSON.parse(body) as { method: string }).method;
    return `${name} ${status}`;
  });
}

function sessionsOf(requests: readonly Recorded[]): number {
  return new Set(requests.map(({ headers }) => headers.get("mcp-session-id")).filter((id) => id !== null)).size;
}

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

describe("a call of an mcp agent", () => {
  function recorder(respond: (request: Request, body: string) => Response) {
    const bodies: string[] = [];
    const seen: Headers[] = [];
    const upstream = keep(
      startUpstream(async (request) => {
        const body = await request.text();
        bodies.push(body);
        seen.push(request.headers);
        return respond(request, body);
      }),
    );
    return { upstream, bodies, seen };
  }
  const ok = () => Response.json({ jsonrpc: "2.0", id: 1, result: {} });

  test("leaves the caller's session, Accept and Content-Type behind, and passes its version and other headers", async () => {
    const { upstream, seen } = recorder(ok);
    await client().send(upstream.url, LIST, {
      call: {
        headers: [
          ["mcp-session-id", "stolen"],
          ["accept", "text/html"],
          ["content-type", "text/plain"],
          ["mcp-protocol-version", "2025-03-26"],
          ["mcp-vendor", "x"],
          ["traceparent", "00-1-2-3"],
        ],
      },
    });
    expect(Object.fromEntries(seen[0]!)).toMatchObject({
      accept: "application/json, text/event-stream",
      "content-type": "application/json",
      "mcp-protocol-version": "2025-03-26",
      "mcp-vendor": "x",
      traceparent: "00-1-2-3",
    });
    expect(seen[0]!.has("mcp-session-id")).toBe(false);
  });

  test("passes headers that say again what the body says only in a version that knows them", async () => {
    const { upstream, seen } = recorder(ok);
    const { send } = client();
    for (const version of ["2025-11-25", "2026-07-28"]) {
      const headers: [string, string][] = [
        ["mcp-protocol-version", version],
        ["mcp-method", "tools/list"],
      ];
      await send(upstream.url, LIST, { call: { headers } });
    }
    expect(seen.map((headers) => headers.get("mcp-method"))).toEqual([null, "tools/list"]);
  });

  test("is sent with the agent's version, else with the newest that has sessions", async () => {
    const { upstream, seen } = recorder(ok);
    const { send } = client();
    await send(upstream.url, LIST, { call: { mcp_protocol_version: "2025-06-18" } });
    await send(upstream.url, LIST);
    expect(seen.map((headers) => headers.get("mcp-protocol-version"))).toEqual(["2025-06-18", "2025-11-25"]);
  });

  test("passes unharmed in the form of 2026-07-28, whatever the answer", async () => {
    const { upstream, seen, bodies } = recorder(() => Response.json({ error: "no" }, { status: 400 }));
    const { send } = client();
    const byHeader = await send(upstream.url, LIST, {
      call: {
        headers: [
          ["mcp-protocol-version", "2026-07-28"],
          ["mcp-method", "tools/list"],
        ],
      },
    });
    const _meta = { "io.modelcontextprotocol/protocolVersion": "2026-07-28" };
    const modern = JSON.stringify({ ...LIST, params: { _meta } });
    await send(upstream.url, modern);
    expect(byHeader).toMatchObject({ status: "failed", error_class: "upstream_4xx", upstream_status: 400 });
    expect(bodies).toEqual([JSON.stringify(LIST), modern]);
    expect(seen.map((headers) => headers.get("mcp-protocol-version"))).toEqual(["2026-07-28", "2026-07-28"]);
  });

  test("keeps its refusal when the server opens no session, and is not sent again", async () => {
    const { upstream, bodies } = recorder((_, body) =>
      body.includes('"initialize"')
        ? Response.json({ jsonrpc: "2.0", id: 1, result: { protocolVersion: "2025-11-25" } })
        : Response.json({ nope: true }, { status: 400 }),
    );
    const { send } = client();
    for (let i = 0; i < 2; i++) {
      const outcome = await send(upstream.url, LIST);
      expect(outcome).toMatchObject({ error_class: "upstream_4xx", upstream_status: 400, resp_size: 13 });
      expect(answer(outcome)).toEqual({ nope: true });
    }
    expect(bodies.map((body) => (JSON.parse(body) as { method: string }).method)).toEqual([
      "tools/list",
      "initialize",
      "notifications/initialized",
      "tools/list",
    ]);
  });

  test("keeps its refusal when initialize fails", async () => {
    const { upstream, bodies } = recorder(() => new Response("nothing here", { status: 404 }));
    const outcome = await client().send(upstream.url, LIST);
    expect(outcome).toMatchObject({ error_class: "upstream_4xx", upstream_status: 404 });
    expect(text(outcome)).toBe("nothing here");
    expect(bodies).toHaveLength(2);
  });

  test("takes another version that was negotiated, without a session", async () => {
    const { upstream, seen } = recorder((request, body) => {
      if (body.includes('"initialize"')) {
        return Response.json({ jsonrpc: "2.0", id: 1, result: { protocolVersion: "2024-11-05" } });
      }
      if (body.includes("notifications/")) return new Response(null, { status: 202 });
      const isKnown = request.headers.get("mcp-protocol-version") === "2024-11-05";
      return isKnown ? ok() : new Response("unsupported version", { status: 400 });
    });
    const { send } = client();
    expect((await send(upstream.url, LIST)).status).toBe("succeeded");
    expect((await send(upstream.url, LIST)).status).toBe("succeeded");
    expect(seen).toHaveLength(5);
  });

  test("is answered by 400 with a result, or with an error of the application: the call ran", async () => {
    for (const part of [{ result: {} }, { error: { code: 42, message: "no" } }]) {
      const { upstream, bodies } = recorder(() => Response.json({ jsonrpc: "2.0", id: 1, ...part }, { status: 400 }));
      expect(await client().send(upstream.url, LIST)).toMatchObject({ upstream_status: 400 });
      expect(bodies).toHaveLength(1);
    }
  });

  test("is sent at most twice, however often it is refused", async () => {
    let sessions = 0;
    const { upstream, bodies } = recorder((request, body) => {
      if (request.method === "DELETE") return new Response();
      if (!body.includes('"initialize"')) return new Response("", { status: body.includes("tools") ? 404 : 202 });
      const headers = { "mcp-session-id": `s${++sessions}` };
      return Response.json({ jsonrpc: "2.0", id: 1, result: { protocolVersion: "2025-11-25" } }, { headers });
    });
    const { send } = client();
    for (let i = 0; i < 2; i++) expect(await send(upstream.url, LIST)).toMatchObject({ upstream_status: 404 });
    expect(bodies.filter((body) => body.includes("tools/list"))).toHaveLength(4);
    expect(sessions).toBe(2);
  });

  test("is never sent again after a server error", async () => {
    const { upstream, bodies } = recorder(() => new Response("", { status: 503 }));
    expect(await client().send(upstream.url, LIST)).toMatchObject({ error_class: "upstream_5xx" });
    expect(bodies).toHaveLength(1);
  });

  test("opens no session that stays by an initialize of its caller", async () => {
    const gone = Promise.withResolvers<string | null>();
    const { upstream } = recorder((request) => {
      if (request.method === "DELETE") gone.resolve(request.headers.get("mcp-session-id"));
      return Response.json({ jsonrpc: "2.0", id: 1, result: {} }, { headers: { "mcp-session-id": "orphan" } });
    });
    expect((await client().send(upstream.url, { ...LIST, method: "initialize" })).status).toBe("succeeded");
    expect(await gone.promise).toBe("orphan");
  });
});

describe("an event stream", () => {
  function streaming(chunks: readonly (string | Uint8Array)[], end = true): Upstream {
    return keep(
      startUpstream(() => {
        const encoder = new TextEncoder();
        const body = new ReadableStream({
          async start(controller) {
            for (const chunk of chunks) {
              controller.enqueue(typeof chunk === "string" ? encoder.encode(chunk) : chunk);
              await Bun.sleep(0);
            }
            if (end) controller.close();
          },
        });
        return new Response(body, { headers: { "content-type": "text/event-stream; charset=utf-8" } });
      }),
    );
  }
  const RESULT = '{"jsonrpc":"2.0","id":1,"result":{"t":"é€😀"}}';

  test("is closed as soon as the response has come", async () => {
    const closed = Promise.withResolvers<void>();
    const upstream = keep(
      startUpstream((request) => {
        request.signal.addEventListener("abort", () => closed.resolve());
        const body = new ReadableStream({
          start: (controller) => controller.enqueue(`data: ${RESULT}\n\ndata: more\n\n`),
        });
        return new Response(body, { headers: { "content-type": "text/event-stream" } });
      }),
    );
    const outcome = await client().send(upstream.url, LIST);
    expect(text(outcome)).toBe(RESULT);
    await closed.promise;
  });

  test("is still an answer when its last blank line is missing", async () => {
    expect(text(await client().send(streaming([`data: ${RESULT}\n`]).url, LIST))).toBe(RESULT);
  });

  test("ends the call as internal when it ends without the response", async () => {
    const other = 'data: {"jsonrpc":"2.0","id":2,"result":{}}\n\n';
    expect(await client().send(streaming([other]).url, LIST)).toMatchObject({
      status: "failed",
      error_class: "internal",
      upstream_status: 200,
      resp_size: other.length,
      response: null,
    });
  });

  test("ends the call when it never ends and never answers: as internal at the size limit, as timeout at the deadline", async () => {
    const noise = `data: ${"x".repeat(5000)}\n\n`;
    const big = streaming([noise, noise, noise], false);
    expect(await client({ max_response_bytes: 12_000 }).send(big.url, LIST)).toMatchObject({
      error_class: "internal",
      upstream_status: 200,
    });
    const silent = streaming([": hello\n\n"], false);
    expect(await client({ upstream_timeout_ms: 60 }).send(silent.url, LIST)).toMatchObject({
      error_class: "timeout",
      upstream_status: 200,
      resp_size: 9,
    });
  });

  test("is cut to the captured MiB like any answer", async () => {
    const long = JSON.stringify({ jsonrpc: "2.0", id: 1, result: { t: "y".repeat(1_500_000) } });
    const outcome = await client().send(streaming([`data: ${long}\n\n`]).url, LIST);
    expect(outcome).toMatchObject({ status: "succeeded", response_truncated: true });
    expect(text(outcome)).toBe(long.slice(0, 1_048_576));
  });

  test("keeps no other call waiting when it never ends its event, however many there are", async () => {
    const memory = createResponseMemory(4);
    const part = `"${"y".repeat(500_000)}",`;
    const allBegun = Promise.withResolvers<void>();
    let [begun, taken] = [0, 0];
    const endless = keep(
      startUpstream(() => {
        const parts = ['data: {"jsonrpc":"2.0","id":1,"result":[', part, part, part, part];
        if (++begun === 40) allBegun.resolve();
        const body = new ReadableStream({
          pull(controller) {
            const next = parts.shift();
            taken++;
            return next === undefined ? new Promise(() => {}) : controller.enqueue(next);
          },
        });
        return new Response(body, { headers: { "content-type": "text/event-stream" } });
      }),
    );
    const stop = new AbortController();
    const greedy = client({}, memory);
    const hung = Array.from({ length: 40 }, (_, i) =>
      greedy.send(endless.url, LIST, { tenant: "greedy", agent_id: `agt_${i % 9}` }, stop),
    );
    await allBegun.promise;
    // How much of them the kernel takes for who does not read on depends on the machine: until nothing more is taken.
    for (let before = -1; before !== taken; await Bun.sleep(100)) before = taken;
    const long = JSON.stringify({ jsonrpc: "2.0", id: 1, result: { t: "y".repeat(2_000_000) } });
    const other = await client({}, memory).send(streaming([`data: ${long}\n\n`]).url, LIST);
    expect(other).toMatchObject({ status: "succeeded", response_truncated: true });
    stop.abort("cancelled");
    expect(new Set((await Promise.all(hung)).map(({ status }) => status))).toEqual(new Set(["failed"]));
  });
});
