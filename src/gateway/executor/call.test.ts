import { afterAll, describe, expect, test } from "bun:test";
import { startRawUpstream, startUpstream, type Upstream } from "../../../test/support/http/upstream.ts";
import { type JobParts, LOOPBACK, makeJob } from "../../../test/support/stores/jobs.ts";
import { hostRules } from "../../core/host.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import { createOutbound, type Outbound } from "../../http/client/outbound.ts";
import { MAX } from "../../kernel/limits.ts";
import { callHttp, ResponseMemory, runCall } from "./call.ts";
import type { WorkerSettings } from "./job.ts";

const started: Upstream[] = [];
afterAll(() => Promise.all(started.map((upstream) => upstream.stop())));

function keep<T extends Upstream>(upstream: T): T {
  started.push(upstream);
  return upstream;
}

const memory = new ResponseMemory(1);

function call(url: string, parts: JobParts = {}, settings: Partial<WorkerSettings> = {}, stop = new AbortController()) {
  const whole = { ...LOOPBACK, ...settings };
  const outbound = createOutbound({ rules: hostRules({ allow: whole.allow_hosts }), extraCa: null });
  return runCall(makeJob(url, parts), { outbound, settings: whole, memory }, stop, callHttp);
}

function text(bytes: Uint8Array | null): string | null {
  return bytes === null ? null : new TextDecoder().decode(bytes);
}

describe("a polled http call", () => {
  test("goes out for its tenant, whose connections and turns it has", async () => {
    const tenants: (string | undefined)[] = [];
    const outbound: Outbound = {
      async request(_, { tenant }) {
        tenants.push(tenant);
        return new Response();
      },
    };
    for (const tenant of ["acme", "rival"]) {
      const job = makeJob("http://up.test/", { tenant });
      await runCall(job, { outbound, settings: LOOPBACK, memory }, new AbortController(), callHttp);
    }
    expect(tenants).toEqual(["acme", "rival"]);
  });

  test("posts the body byte for byte with the caller's headers, the credential and our ids", async () => {
    let seen: { method: string; headers: Headers; body: Uint8Array } | null = null;
    const upstream = keep(
      startUpstream(async (request) => {
        seen = { method: request.method, headers: request.headers, body: await request.bytes() };
        return new Response("thanks", { status: 201, headers: { "content-type": "text/x" } });
      }),
    );
    const body = new Uint8Array(256).map((_, index) => index);
    const outcome = await call(`${upstream.url}a?b=c`, {
      id: "inv_here",
      body,
      credential: { name: "X-API-Key", value: "secret" },
      call: {
        request_id: "req-1",
        headers: [
          ["content-type", "application/octet-stream"],
          ["accept", "text/x"],
        ],
      },
    });
    expect(outcome).toMatchObject({
      status: "succeeded",
      error_class: null,
      upstream_status: 201,
      resp_size: 6,
      response_truncated: false,
      response_content_type: "text/x",
      detail: null,
    });
    expect(text(outcome.response)).toBe("thanks");
    expect(outcome.latency_ms).toBeGreaterThanOrEqual(0);
    expect(seen!.method).toBe("POST");
    expect(seen!.body).toEqual(body);
    const headers = Object.fromEntries(seen!.headers);
    expect(headers).toMatchObject({
      "x-api-key": "secret",
      "x-request-id": "req-1",
      "x-service-invocation-id": "inv_here",
      "content-type": "application/octet-stream",
      accept: "text/x",
    });
  });

  test("sends nothing when its claim was last seen long ago", async () => {
    let count = 0;
    const upstream = keep(
      startUpstream(() => {
        count++;
        return new Response("made");
      }),
    );
    const outcome = await call(upstream.url, { claim_seen_at: Date.now() - 20_000 });
    expect([outcome.is_stale, count]).toEqual([true, 0]);
  });

  test("sends an empty body as one", async () => {
    const upstream = keep(startUpstream(async (r) => Response.json([r.headers.get("content-length"), await r.text()])));
    expect(text((await call(upstream.url)).response)).toBe('["0",""]');
  });

  test("takes a redirect as the answer", async () => {
    const upstream = keep(startUpstream(() => Response.redirect("http://127.0.0.1:1/", 307)));
    expect(await call(upstream.url)).toMatchObject({ status: "succeeded", upstream_status: 307 });
  });

  test("fails with the class of the status, and keeps the answer", async () => {
    const upstream = keep(
      startUpstream((r) => new Response("no", { status: Number(new URL(r.url).pathname.slice(1)) })),
    );
    const notFound = await call(`${upstream.url}404`);
    expect(notFound).toMatchObject({ status: "failed", error_class: "upstream_4xx", upstream_status: 404 });
    expect(text(notFound.response)).toBe("no");
    expect(await call(`${upstream.url}503`)).toMatchObject({
      error_class: "upstream_5xx",
      upstream_status: 503,
    });
  });

  test("captures the first MiB and counts the whole", async () => {
    const upstream = keep(startUpstream(() => new Response(new Uint8Array(3_000_000).fill(97))));
    const outcome = await call(upstream.url);
    expect(outcome).toMatchObject({ status: "succeeded", resp_size: 3_000_000, response_truncated: true });
    expect(outcome.response?.length).toBe(MAX.capturedBytes);
  });

  test("counts and stores the decoded body", async () => {
    const upstream = keep(
      startUpstream(() => new Response(Bun.gzipSync("a".repeat(1000)), { headers: { "content-encoding": "gzip" } })),
    );
    const outcome = await call(upstream.url);
    expect(outcome.resp_size).toBe(1000);
    expect(text(outcome.response)).toBe("a".repeat(1000));
  });

  test("only counts when capture is off", async () => {
    const upstream = keep(startUpstream(() => new Response("12345", { headers: { "content-type": "text/x" } })));
    expect(await call(upstream.url, { call: { capture: false } })).toMatchObject({
      status: "succeeded",
      resp_size: 5,
      response: null,
      response_truncated: false,
    });
  });

  test("ends with internal when the response is larger than allowed", async () => {
    const stopped = Promise.withResolvers<void>();
    const endless = () =>
      new ReadableStream({
        async pull(controller) {
          controller.enqueue(new Uint8Array(65_536));
          await Bun.sleep(0);
        },
        cancel() {
          stopped.resolve();
        },
      });
    const upstream = keep(startUpstream(() => new Response(endless())));
    const outcome = await call(upstream.url, {}, { max_response_bytes: 1_000_000 });
    expect(outcome).toMatchObject({
      status: "failed",
      error_class: "internal",
      upstream_status: 200,
      response: null,
    });
    expect(outcome.resp_size).toBeGreaterThan(1_000_000);
    await stopped.promise;
  });
});

describe("a call that can't be sent", () => {
  test("is blocked by the host rules, and never dialled", async () => {
    expect(await call("http://127.0.0.1:9/", {}, { allow_hosts: [] })).toMatchObject({
      status: "failed",
      error_class: "ssrf_blocked",
      upstream_status: null,
      latency_ms: null,
      resp_size: null,
    });
  });

  test("is tried three times when nothing listens", async () => {
    const closed = startUpstream(() => new Response());
    await closed.stop();
    let dials = 0;
    const real = createOutbound({ rules: hostRules({ allow: LOOPBACK.allow_hosts }), extraCa: null });
    const outbound: Outbound = {
      ...real,
      request(url, request) {
        dials++;
        return real.request(url, request);
      },
    };
    const parts = { outbound, settings: LOOPBACK, memory };
    const outcome = await runCall(makeJob(closed.url), parts, new AbortController(), callHttp);
    expect(outcome).toMatchObject({ status: "failed", error_class: "upstream_5xx", upstream_status: null });
    expect(dials).toBe(3);
    expect(outcome.latency_ms).toBeGreaterThanOrEqual(499);
  });

  test("is sent once it can be", async () => {
    let dials = 0;
    let arrived = 0;
    const upstream = keep(startUpstream(() => new Response(String(++arrived))));
    const outbound = createOutbound({ rules: hostRules({ allow: LOOPBACK.allow_hosts }), extraCa: null });
    const flaky: Outbound = {
      async request(url, request) {
        if (++dials < 3) throw new OutboundError("unreached", "refused");
        return outbound.request(url, request);
      },
    };
    const outcome = await runCall(
      makeJob(upstream.url),
      { outbound: flaky, settings: LOOPBACK, memory },
      new AbortController(),
      callHttp,
    );
    expect(outcome).toMatchObject({ status: "succeeded", upstream_status: 200 });
    expect([dials, arrived]).toEqual([3, 1]);
  });

  test("ends at the deadline between two tries", async () => {
    const closed = startUpstream(() => new Response());
    await closed.stop();
    const outcome = await call(closed.url, {}, { upstream_timeout_ms: 50 });
    expect(outcome).toMatchObject({ error_class: "timeout", upstream_status: null });
  });

  test("sends nothing when no header can carry the secret, and does not tell it", async () => {
    const outcome = await call("http://127.0.0.1:9/", {
      credential: { name: "Authorization", value: "Bearer a\r\nb: c" },
    });
    expect(outcome).toMatchObject({ status: "failed", upstream_status: null });
    expect(outcome.detail).not.toContain("b: c");
  });
});

describe("a call on a connection", () => {
  test("is upstream_5xx, without a status, when that breaks before the head, and is never sent again", async () => {
    const upstream = keep(startRawUpstream((connection) => connection.reset()));
    expect(await call(upstream.url)).toMatchObject({ error_class: "upstream_5xx", upstream_status: null });
    expect(upstream.connections()).toBe(1);
  });

  test("is upstream_5xx too after a proper close without an answer, and is never sent again", async () => {
    const upstream = keep(startRawUpstream((connection) => connection.end()));
    expect(await call(upstream.url)).toMatchObject({ error_class: "upstream_5xx", upstream_status: null });
    expect(upstream.connections()).toBe(1);
  });

  test("is upstream_5xx, with the status that had come, when that breaks in the body", async () => {
    const upstream = keep(
      startRawUpstream((connection) => {
        connection.write("HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 100\r\n\r\nhalf");
        setTimeout(() => connection.end(), 10);
      }),
    );
    expect(await call(upstream.url)).toMatchObject({
      status: "failed",
      error_class: "upstream_5xx",
      upstream_status: 200,
      response: null,
    });
    expect(upstream.connections()).toBe(1);
  });

  test("is upstream_5xx, without a status, when the status is none, like 000", async () => {
    for (const status of ["000", "099", "101"]) {
      const answer = `HTTP/1.1 ${status} X\r\nContent-Length: 2\r\n\r\nok`;
      const upstream = keep(startRawUpstream((connection) => connection.write(answer)));
      expect(await call(upstream.url)).toMatchObject({
        status: "failed",
        error_class: "upstream_5xx",
        upstream_status: null,
      });
      expect(upstream.connections()).toBe(1);
    }
  });

  test("is upstream_5xx when the answer is no HTTP", async () => {
    const upstream = keep(startRawUpstream((connection) => connection.write("SSH-2.0-OpenSSH\r\n\r\n")));
    expect(await call(upstream.url)).toMatchObject({ error_class: "upstream_5xx", upstream_status: null });
    expect(upstream.connections()).toBe(1);
  });
});

describe("a call that takes too long", () => {
  test("ends at the deadline without a head", async () => {
    const upstream = keep(startUpstream(() => new Promise<Response>(() => {})));
    const outcome = await call(upstream.url, {}, { upstream_timeout_ms: 100 });
    expect(outcome).toMatchObject({
      status: "failed",
      error_class: "timeout",
      upstream_status: null,
      resp_size: null,
    });
    // The deadline begins before the first dial, from which latency counts: on a busy machine some of it is gone then.
    expect(outcome.latency_ms).toBeGreaterThanOrEqual(50);
  });

  test("ends at the deadline in the body, with the status that had come", async () => {
    const upstream = keep(
      startRawUpstream((connection) => connection.write("HTTP/1.1 206 OK\r\nContent-Length: 9\r\n\r\nhalf")),
    );
    expect(await call(upstream.url, {}, { upstream_timeout_ms: 60 })).toMatchObject({
      error_class: "timeout",
      upstream_status: 206,
      response: null,
    });
  });
});

describe("a call that is cancelled", () => {
  test("ends at once, and its upstream sees the connection close", async () => {
    const stop = new AbortController();
    const seen = Promise.withResolvers<void>();
    const gone = Promise.withResolvers<void>();
    const upstream = keep(
      startUpstream((request) => {
        request.signal.addEventListener("abort", () => gone.resolve());
        seen.resolve();
        return new Promise<Response>(() => {});
      }),
    );
    const pending = call(upstream.url, {}, {}, stop);
    await seen.promise;
    stop.abort("cancelled");
    expect(await pending).toMatchObject({
      status: "failed",
      error_class: "cancelled",
      upstream_status: null,
    });
    await gone.promise;
  });

  test("is never sent when the cancel came first", async () => {
    const stop = new AbortController();
    stop.abort("cancelled");
    const outcome = await call("http://127.0.0.1:9/", {}, {}, stop);
    expect(outcome).toMatchObject({ error_class: "cancelled", latency_ms: null });
  });
});
