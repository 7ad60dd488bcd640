// Whatever the collector of traces does, calls go on, the log stays short, and the gateway ends in time.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { ask, idOf } from "./support/gateway/api.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { SERVER } from "./support/http/certificates.ts";
import { startCollector } from "./support/http/collector.ts";
import { startUpstream, type Upstream } from "./support/http/upstream.ts";

/** With two spans each, more than wait for a collector. */
const CALLS = 2_500;
const CALLERS = 50;

let upstream: Upstream;

beforeAll(() => {
  upstream = startUpstream(() => Response.json({}));
});

afterAll(() => upstream?.stop());

function startTraced(endpoint: string, more: Readonly<Record<string, string>> = {}): Promise<Gateway> {
  const traced = { OTEL_EXPORTER_OTLP_ENDPOINT: endpoint, TOLLGATE_TRACES_PER_SECOND: "10000" };
  return startGateway({ env: { ...traced, ...more } });
}

/** Streams so many calls, which are over when they are answered. */
async function callMany(gateway: Gateway, calls: number): Promise<void> {
  const token = await gateway.token({ tenant: "acme", user: "alice" });
  const agent = await idOf(ask(gateway, token, "/v1/agents", { name: "a", upstream_url: upstream.url }));
  let left = calls;
  const statuses = new Set<number>();
  const caller = async () => {
    while (left-- > 0) {
      const answer = await ask(gateway, token, `/v1/proxy/${agent}/stream`, {});
      statuses.add(answer.status);
      await answer.bytes();
    }
  };
  await Promise.all(Array.from({ length: CALLERS }, caller));
  expect([...statuses]).toEqual([200]);
}

interface Line {
  readonly event: string;
  readonly level: string;
  readonly count?: number;
  readonly reason?: string;
}

function linesOf(gateway: Gateway): Line[] {
  const lines = gateway.log().split("\n");
  return lines.filter((line) => line.startsWith("{")).map((line): Line => JSON.parse(line));
}

/** What was dropped. Whoever drops much says so seldom, and breaks nothing else. */
function droppedBy(gateway: Gateway): Line[] {
  const lines = linesOf(gateway);
  const dropped = lines.filter(({ event }) => event === "spans_dropped");
  const others = lines.filter(
    ({ level, event }) => level !== "info" && event !== "spans_dropped" && event !== "event_loop_blocked",
  );
  expect(others).toEqual([]);
  expect(dropped.length).toBeGreaterThan(0);
  // At once, at the end, and one a minute.
  expect(dropped.length).toBeLessThanOrEqual(3);
  return dropped;
}

describe("a collector that", () => {
  test.concurrent("hangs costs no call, only spans", async () => {
    await using collector = startCollector();
    const asked = collector.next();
    const held = Promise.withResolvers<Response>();
    collector.answer(() => held.promise);
    await using gateway = await startTraced(collector.url);
    await callMany(gateway, CALLS);
    await asked;
    const startedAt = performance.now();
    await gateway.stop();
    expect(performance.now() - startedAt).toBeLessThan(20_000);
    held.resolve(new Response());
    const dropped = droppedBy(gateway);
    expect(dropped[0]?.reason).toBe("too many wait for the collector");
    const count = dropped.reduce((sum, line) => sum + (line.count ?? 0), 0);
    expect(count + collector.spans.length).toBeGreaterThanOrEqual(2 * CALLS);
  });

  test.concurrent("is not there costs no call, only spans", async () => {
    await using gateway = await startTraced("http://127.0.0.1:1");
    await callMany(gateway, CALLERS);
    await gateway.stop();
    expect(droppedBy(gateway).at(-1)?.reason).toContain("ECONNREFUSED");
  });

  test.concurrent("has a certificate that nobody vouches for gets no span, and costs no call", async () => {
    await using collector = startCollector(SERVER);
    await using gateway = await startTraced(collector.url);
    await callMany(gateway, 1);
    await gateway.stop();
    expect(droppedBy(gateway).at(-1)?.reason).toMatch(/UNABLE_TO|SELF_SIGNED/);
    expect(collector.requests).toEqual([]);
  });

  test.concurrent("answers 500 costs no call, only spans", async () => {
    await using collector = startCollector();
    collector.answer(() => new Response("no", { status: 500 }));
    await using gateway = await startTraced(collector.url);
    await callMany(gateway, CALLS);
    await gateway.stop();
    const dropped = droppedBy(gateway);
    expect(dropped.map(({ reason }) => reason)).toContain("answered 500");
    expect(dropped.reduce((sum, { count = 0 }) => sum + count, 0)).toBe(2 * CALLS);
  });

  test.concurrent("answers without an end is cut off", async () => {
    await using collector = startCollector();
    const cut = Promise.withResolvers<void>();
    const endless = () =>
      new ReadableStream({
        pull: (controller) => controller.enqueue(new Uint8Array(65_536)),
        cancel: () => cut.resolve(),
      });
    collector.answer(() => new Response(endless()));
    await using gateway = await startTraced(collector.url);
    await callMany(gateway, CALLERS);
    await cut.promise;
    await gateway.stop();
    expect(droppedBy(gateway)[0]?.reason).toBe("a response of more than 65536 bytes");
  });

  test.concurrent("takes nothing for now gets the same spans again, and loses none", async () => {
    await using collector = startCollector();
    let asked = 0;
    collector.answer(() => new Response(null, { status: asked++ === 0 ? 503 : 200 }));
    await using gateway = await startTraced(collector.url);
    await callMany(gateway, 1);
    await collector.next();
    const first = collector.spans.map(({ spanId }) => spanId);
    await collector.next();
    expect(collector.spans.slice(first.length).map(({ spanId }) => spanId)).toEqual(first);
    await gateway.stop();
    expect(linesOf(gateway).filter(({ event }) => event === "spans_dropped")).toEqual([]);
  });

  test.concurrent("asks for time gets it, and loses none", async () => {
    await using collector = startCollector();
    const asked: number[] = [];
    collector.answer(() => {
      asked.push(performance.now());
      return new Response(null, { status: asked.length === 1 ? 429 : 200, headers: { "retry-after": "3" } });
    });
    await using gateway = await startTraced(collector.url);
    await callMany(gateway, 1);
    await collector.next();
    await collector.next();
    const [first = 0, second = 0] = asked;
    // A timer of the gateway may be early by a millisecond.
    expect(second - first).toBeGreaterThan(2_990);
    await gateway.stop();
    expect(linesOf(gateway).filter(({ event }) => event === "spans_dropped")).toEqual([]);
  });

  test.concurrent("asks for a day does not keep the gateway from ending, which tells what it drops", async () => {
    await using collector = startCollector();
    collector.answer(() => new Response(null, { status: 503, headers: { "retry-after": "86400" } }));
    await using gateway = await startTraced(collector.url);
    await callMany(gateway, 200);
    await gateway.stop();
    const dropped = droppedBy(gateway);
    expect(dropped.at(-1)?.reason).toBe("answered 503");
    expect(dropped.reduce((sum, { count = 0 }) => sum + count, 0)).toBe(400);
  });

  test.concurrent("is there when the gateway ends gets the last spans", async () => {
    await using collector = startCollector();
    await using gateway = await startTraced(collector.url);
    await callMany(gateway, 20);
    await gateway.stop();
    expect(collector.spans).toHaveLength(40);
  });
});
