// Traces as an operator sees them: what a collector receives from both services as they are deployed, and what the
// upstream is told. The collector decodes by OpenTelemetry's own definitions: see support/http/collector.ts.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { agentWithSecret, ask, idOf, SECRET } from "./support/gateway/api.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { steppedClock } from "./support/gateway/stepped-clock.ts";
import { type CollectedSpan, type Collector, startCollector } from "./support/http/collector.ts";
import { startUpstream, type Upstream } from "./support/http/upstream.ts";
import { startMcpServer } from "./support/mcp/mcp-servers.ts";

const TRACE = "0af7651916cd43dd8448eb211c80319c";
const PARENT = "b7ad6b7169203331";
const SAMPLED = `00-${TRACE}-${PARENT}-01`;
const NAMED = /^00-([0-9a-f]{32})-([0-9a-f]{16})-(0[01])$/;
const HOUR_MS = 3_600_000;

type HeaderPairs = Readonly<Record<string, string>>;

/** What the upstream was asked with, by the invocation. */
const asked = new Map<string, Headers>();
let upstream: Upstream;

beforeAll(() => {
  upstream = startUpstream(({ headers }) => {
    asked.set(headers.get("x-service-invocation-id") ?? "", headers);
    return headers.get("user-agent") === "refuse" ? new Response("no", { status: 503 }) : Response.json({});
  });
});

afterAll(() => upstream?.stop());

async function call(gateway: Gateway, token: string, path: string, headers: HeaderPairs = {}): Promise<Response> {
  const response = await fetch(`${gateway.url}/v1/proxy/${path}`, {
    method: "POST",
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json", prefer: "wait=30", ...headers },
    body: "{}",
  });
  await response.bytes();
  return response;
}

const invocationOf = ({ headers }: Response) => headers.get("x-service-invocation-id") ?? "";

const sentTo = (answer: Response, name: string) => asked.get(invocationOf(answer))?.get(name) ?? null;

/** What the upstream was told of the trace. */
function named(answer: Response): { readonly trace: string; readonly span: string; readonly flags: string } {
  const [, trace = "", span = "", flags = ""] = NAMED.exec(sentTo(answer, "traceparent") ?? "") ?? [];
  return { trace, span, flags };
}

const spanOf = (collector: Collector, kind: CollectedSpan["kind"], invocation: string) =>
  collector.span((span) => span.kind === kind && span.attributes["tollgate.invocation.id"] === invocation);

async function newAgent(gateway: Gateway, token: string, fields: object = {}): Promise<string> {
  return idOf(ask(gateway, token, "/v1/agents", { name: crypto.randomUUID(), upstream_url: upstream.url, ...fields }));
}

describe("a gateway with a collector", () => {
  let collector: Collector;
  let gateway: Gateway;
  let token: string;
  let agent: string;

  beforeAll(async () => {
    collector = startCollector();
    gateway = await startGateway({
      env: {
        OTEL_EXPORTER_OTLP_ENDPOINT: `${collector.url}/`,
        OTEL_EXPORTER_OTLP_HEADERS: "api-key=a%20key,X-Other=1",
        OTEL_RESOURCE_ATTRIBUTES: "deployment.environment.name=test",
        TOLLGATE_TRACES_PER_SECOND: "1000",
      },
    });
    token = await gateway.token({ tenant: "acme", user: "alice" });
    agent = await agentWithSecret(gateway, token, `${upstream.url}path?key=${SECRET}`, "with a secret");
  });

  afterAll(async () => {
    await gateway?.[Symbol.asyncDispose]();
    await collector?.[Symbol.asyncDispose]();
  });

  describe.each(["", "/stream"])("on the path /v1/proxy/{id}%s", (path) => {
    test.concurrent("goes on with the trace of its caller, through its own span to the upstream", async () => {
      const headers = { traceparent: SAMPLED, tracestate: "a=b,c=d", baggage: "k=v, k=v;p" };
      const answer = await call(gateway, token, agent + path, headers);
      const at = named(answer);
      const invocation = invocationOf(answer);
      const server = await spanOf(collector, "SERVER", invocation);
      const client = await spanOf(collector, "CLIENT", invocation);
      expect([server.traceId, server.parentSpanId, server.traceState]).toEqual([TRACE, PARENT, "a=b,c=d"]);
      expect([client.traceId, client.parentSpanId]).toEqual([TRACE, server.spanId]);
      expect(at).toEqual({ trace: TRACE, span: client.spanId, flags: "01" });
      expect([sentTo(answer, "tracestate"), sentTo(answer, "baggage")]).toEqual(["a=b,c=d", "k=v, k=v;p"]);
      expect([server.name, server.service]).toEqual([`POST /v1/proxy/{id}${path}`, "tollgate-gateway"]);
      const both = { "tollgate.tenant": "acme", "tollgate.agent.id": agent, "tollgate.invocation.id": invocation };
      expect(server.attributes).toEqual({
        ...both,
        "http.request.method": "POST",
        "http.route": `/v1/proxy/{id}${path}`,
        "http.response.status_code": answer.status,
      });
      expect(client.attributes).toEqual({
        ...both,
        "http.request.method": "POST",
        "server.address": "127.0.0.1",
        "http.response.status_code": 200,
      });
      expect([server.isError, client.isError]).toEqual([false, false]);
      // From a line of the log to the trace.
      const lines = gateway.log().split("\n");
      const line = lines.find((each) => each.includes('"event":"request"') && each.includes(invocation)) ?? "{}";
      expect(JSON.parse(line)).toMatchObject({ trace_id: TRACE });
    });

    test.concurrent("begins a trace where its caller names none, or nonsense", async () => {
      const nonsense = [
        "",
        "00-1-2-3",
        `00-${"0".repeat(32)}-${PARENT}-01`,
        `00-${TRACE}-${"0".repeat(16)}-01`,
        `ff-${TRACE}-${PARENT}-01`,
        `${SAMPLED}-more`,
        `${SAMPLED}, ${SAMPLED}`,
        SAMPLED.toUpperCase(),
        "0".repeat(8000),
      ];
      const made = [];
      for (const traceparent of nonsense) {
        const headers = { tracestate: "a=b", baggage: "kept", ...(traceparent !== "" && { traceparent }) };
        const answer = await call(gateway, token, agent + path, headers);
        const at = named(answer);
        expect([traceparent, at.trace === TRACE, at.flags]).toEqual([traceparent, false, "01"]);
        // The state of a trace that is not gone on with means nothing.
        expect([sentTo(answer, "tracestate"), sentTo(answer, "baggage")]).toEqual([null, "kept"]);
        made.push({ at, invocation: invocationOf(answer) });
      }
      for (const { at, invocation } of made) {
        const { traceId, spanId } = await spanOf(collector, "CLIENT", invocation);
        expect([traceId, spanId]).toEqual([at.trace, at.span]);
      }
    });

    test.concurrent("keeps to the form of tracestate, whatever its caller sends", async () => {
      for (const [tracestate, passed] of [
        ["a=b, ,c=d", "a=b,c=d"],
        ["=,no pair,A=upper", null],
        [Array.from({ length: 60 }, (_, n) => `k${n}=v`).join(","), /^(k\d+=v,?){32}$/],
        [`a=${"v".repeat(5000)},b=c`, "b=c"],
      ] as const) {
        const sent = sentTo(
          await call(gateway, token, agent + path, { traceparent: SAMPLED, tracestate }),
          "tracestate",
        );
        if (passed instanceof RegExp) expect(sent).toMatch(passed);
        else expect(sent).toBe(passed);
      }
    });

    test.concurrent("records nothing that its caller does not want recorded, and passes that on", async () => {
      const answer = await call(gateway, token, agent + path, { traceparent: `00-${TRACE}-${PARENT}-00` });
      expect(named(answer)).toMatchObject({ trace: TRACE, flags: "00" });
      expect(named(answer).span).not.toBe(PARENT);
      // What comes after it has come, and it has not.
      const next = invocationOf(await call(gateway, token, agent + path));
      await spanOf(collector, "CLIENT", next);
      const recorded = collector.spans.map((span) => span.attributes["tollgate.invocation.id"]);
      expect(recorded).not.toContain(invocationOf(answer));
    });

    test.concurrent("marks the failure of an upstream, and not that of its own span", async () => {
      const answer = await call(gateway, token, agent + path, { "user-agent": "refuse" });
      const unreached = await newAgent(gateway, token, { upstream_url: "http://127.0.0.1:1/" });
      const lost = await call(gateway, token, unreached + path);
      const client = await spanOf(collector, "CLIENT", invocationOf(answer));
      expect(client.attributes).toMatchObject({ "http.response.status_code": 503, "error.type": "503" });
      expect(client.isError).toBe(true);
      expect((await spanOf(collector, "CLIENT", invocationOf(lost))).attributes["error.type"]).toBe("upstream_5xx");
    });
  });

  test.concurrent("goes on with a trace to an MCP server, in both modes", async () => {
    const server = await startMcpServer("stateless");
    try {
      const fields = { upstream_url: server.url, protocol: "mcp", mcp_transport: "streamable_http" };
      const mcp = await newAgent(gateway, token, fields);
      const calls = ["", "/stream"].map(async (path) => {
        const response = await fetch(`${gateway.url}/v1/proxy/${mcp}${path}`, {
          method: "POST",
          headers: {
            authorization: `Bearer ${token}`,
            "content-type": "application/json",
            accept: "application/json, text/event-stream",
            prefer: "wait=30",
            traceparent: SAMPLED,
          },
          body: JSON.stringify({ jsonrpc: "2.0", id: 1, method: "tools/list" }),
        });
        await response.bytes();
        const client = await spanOf(collector, "CLIENT", invocationOf(response));
        const parent = await spanOf(collector, "SERVER", invocationOf(response));
        expect([client.traceId, client.parentSpanId]).toEqual([TRACE, parent.spanId]);
        expect(client.attributes["http.response.status_code"]).toBe(200);
      });
      await Promise.all(calls);
      // What is no call is a part of its trace as well.
      const headers = { authorization: `Bearer ${token}`, traceparent: SAMPLED };
      const ended = await fetch(`${gateway.url}/v1/proxy/${mcp}/stream`, { method: "DELETE", headers });
      await ended.bytes();
      const closing = await collector.span(({ name }) => name === "DELETE");
      const route = await collector.span(({ name }) => name === "DELETE /v1/proxy/{id}/stream");
      expect([closing.traceId, closing.parentSpanId]).toEqual([TRACE, route.spanId]);
      expect(closing.attributes).toMatchObject({ "http.response.status_code": ended.status, "tollgate.agent.id": mcp });
    } finally {
      await server.stop();
    }
  });

  test.concurrent("makes no span for strangers, polls and what else is no call", async () => {
    const other = await gateway.token({ tenant: "other", user: "alice" });
    const own = await newAgent(gateway, other);
    await call(gateway, "nonsense", own, { traceparent: SAMPLED });
    const invocation = invocationOf(await call(gateway, other, own));
    await ask(gateway, other, `/v1/proxy/${own}/invocations/${invocation}`).then((response) => response.bytes());
    const last = invocationOf(await call(gateway, other, own));
    await spanOf(collector, "CLIENT", last);
    await spanOf(collector, "SERVER", last);
    const tenants = collector.spans.map((span) => span.attributes["tollgate.tenant"]);
    expect(new Set(tenants)).toEqual(new Set(["acme", "other"]));
    const ofOther = collector.spans.filter((span) => span.attributes["tollgate.tenant"] === "other");
    const made = ofOther.map(({ kind, attributes }) => [kind, attributes["tollgate.invocation.id"]].join(" "));
    expect(made.sort()).toEqual([invocation, last].flatMap((id) => [`CLIENT ${id}`, `SERVER ${id}`]).sort());
  });

  test.concurrent("sends its own headers, and no secret of anybody in a span", async () => {
    await spanOf(collector, "CLIENT", invocationOf(await call(gateway, token, agent, { "x-payment": "cGFpZA==" })));
    const { headers } = collector.requests.at(-1) ?? {};
    expect([headers?.get("api-key"), headers?.get("x-other")]).toEqual(["a key", "1"]);
    const all = Buffer.concat(collector.requests.map(({ bytes }) => bytes)).toString("latin1");
    for (const secret of [SECRET, token, "path?", "cGFpZA==", "Bearer"]) expect(all).not.toContain(secret);
    expect(all).toContain("deployment.environment.name");
  });
});

describe("traces", () => {
  test.concurrent("that are off leave the caller's headers as they came, byte for byte", async () => {
    await using gateway = await startGateway();
    const token = await gateway.token({ tenant: "acme", user: "alice" });
    const agent = await newAgent(gateway, token);
    for (const path of ["", "/stream"]) {
      for (const traceparent of [SAMPLED, "00-1-2-3", `${SAMPLED}, ${SAMPLED}`]) {
        const headers = { traceparent, tracestate: "a=b, ,=,x", baggage: "k = v ;p" };
        const answer = await call(gateway, token, agent + path, headers);
        for (const [name, value] of Object.entries(headers))
          expect([name, sentTo(answer, name)]).toEqual([name, value]);
      }
    }
  });

  test.concurrent("go on with the trace of a call that was accepted before a crash", async () => {
    await using collector = startCollector();
    const held = Promise.withResolvers<void>();
    const arrived = Promise.withResolvers<void>();
    const slow = startUpstream(async ({ headers }) => {
      asked.set(headers.get("x-service-invocation-id") ?? "", headers);
      arrived.resolve();
      if (headers.get("user-agent") === "hold") await held.promise;
      return Response.json({});
    });
    try {
      const env = { OTEL_EXPORTER_OTLP_ENDPOINT: collector.url, TOLLGATE_AGENT_CONCURRENCY: "1" };
      await using gateway = await startGateway({ env });
      const token = await gateway.token({ tenant: "acme", user: "alice" });
      const agent = await newAgent(gateway, token, { upstream_url: slow.url });
      await call(gateway, token, agent, { prefer: "", "user-agent": "hold" });
      await arrived.promise;
      const waiting = await call(gateway, token, agent, { prefer: "", traceparent: SAMPLED });
      // Both requests have been recorded when the process dies.
      const server = await spanOf(collector, "SERVER", invocationOf(waiting));
      await gateway.kill9();
      held.resolve();
      await gateway.restart();
      const client = await spanOf(collector, "CLIENT", invocationOf(waiting));
      expect([client.traceId, client.parentSpanId]).toEqual([TRACE, server.spanId]);
      expect(named(waiting)).toEqual({ trace: TRACE, span: client.spanId, flags: "01" });
    } finally {
      held.resolve();
      await slow.stop();
    }
  });

  test.concurrent("have a bound, whatever callers want, of which every tenant has its share", async () => {
    await using collector = startCollector();
    const env = { OTEL_EXPORTER_OTLP_ENDPOINT: collector.url, TOLLGATE_TRACES_PER_SECOND: "8" };
    await using gateway = await startGateway({ env });
    const callOf = async (tenant: string, calls: number) => {
      const token = await gateway.token({ tenant, user: "alice" });
      const agent = await newAgent(gateway, token);
      const one = () => call(gateway, token, agent, { traceparent: SAMPLED });
      return { one, many: () => Promise.all(Array.from({ length: calls }, one)) };
    };
    const [loud, quiet] = [await callOf("loud", 200), await callOf("quiet", 1)];
    const startedAt = performance.now();
    const answers = await loud.many();
    const last = await quiet.one();
    const seconds = Math.ceil((performance.now() - startedAt) / 1000) + 1;
    expect(answers.map(({ status }) => status)).toEqual(answers.map(() => 202));
    await spanOf(collector, "SERVER", invocationOf(last));
    const servers = collector.spans.filter(({ kind }) => kind === "SERVER");
    const loudOnes = servers.filter((span) => span.attributes["tollgate.tenant"] === "loud");
    expect(loudOnes.length).toBeLessThanOrEqual(7 * seconds);
    expect(loudOnes.length).toBeGreaterThan(0);
  });

  test.concurrent("have durations that a step of the wall clock does not change", async () => {
    await using collector = startCollector();
    const clock = steppedClock();
    const stepping = startUpstream(async () => {
      clock.set(-HOUR_MS);
      return Response.json({});
    });
    try {
      const env = { OTEL_EXPORTER_OTLP_ENDPOINT: collector.url };
      await using gateway = await startGateway({ env, program: clock.program });
      const token = await gateway.token({ tenant: "acme", user: "alice" });
      const agent = await newAgent(gateway, token, { upstream_url: stepping.url });
      const answer = await call(gateway, token, `${agent}/stream`);
      for (const kind of ["SERVER", "CLIENT"] as const) {
        const { durationMs, startMs } = await spanOf(collector, kind, invocationOf(answer));
        expect(durationMs).toBeGreaterThan(0);
        expect(durationMs).toBeLessThan(HOUR_MS / 2);
        expect(Math.abs(startMs - Date.now())).toBeLessThan(HOUR_MS / 2);
      }
    } finally {
      await stepping.stop();
    }
  });
});
