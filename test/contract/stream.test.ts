// Streaming mode for http agents: what passes, as it arrives; how every kind of broken exchange looks to the caller,
// who must never take a part for the whole, and what the record says of it.
import { afterAll, describe, expect, test } from "bun:test";
import { brotliCompressSync, gzipSync } from "node:zlib";
import { type RawConnection, startRawUpstream } from "../support/http/upstream.ts";
import { type Answer, contract, expectError, type Json, type Tenant, UNKNOWN_AGENT } from "./contract.ts";
import { connect, parseAnswer, type Wire } from "./wire.ts";

const TIMEOUT_MS = 1500;
const MIB = 1024 * 1024;
const encode = (text: string) => new TextEncoder().encode(text);
const stream = (tenant: Tenant, id: string, sending: object = { json: { n: 1 } }) =>
  tenant.send("POST", `/v1/proxy/${id}/stream`, sending);
const idOf = (answer: Answer) => answer.headers.get("x-service-invocation-id") ?? "";

/** A body whose pieces the test lets go one by one. */
function paced(headers: Record<string, string> = { "content-type": "text/plain" }) {
  const pieces = new TransformStream<Uint8Array, Uint8Array>();
  const writer = pieces.writable.getWriter();
  writer.closed.catch(() => {});
  return {
    response: () => new Response(pieces.readable, { headers }),
    send: (text: string) => void writer.write(encode(text)).catch(() => {}),
    end: () => void writer.close().catch(() => {}),
  };
}

const raws: { stop(): Promise<void> }[] = [];
afterAll(() => Promise.all(raws.map((raw) => raw.stop())));

/** An upstream on the bare socket. */
function rawUpstream(onRequest: (connection: RawConnection) => void): string {
  const raw = startRawUpstream(onRequest);
  raws.push(raw);
  return raw.url;
}

const HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n";

contract(
  (at) => {
    const agentAt = async (upstream_url: string, fields: object = {}) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url, ...fields });
      return { tenant, id: String(id) };
    };
    /** The request on a bare socket, whose answer is then looked at byte by byte. */
    const open = async (tenant: Tenant, id: string, body = "{}"): Promise<Wire> => {
      const wire = await connect(at.gateway.url);
      const head = [
        `POST /v1/proxy/${id}/stream HTTP/1.1`,
        "Host: gateway.test",
        `Authorization: Bearer ${await tenant.token()}`,
        "Content-Type: application/json",
        `Content-Length: ${body.length}`,
      ];
      await wire.send(`${head.join("\r\n")}\r\n\r\n${body}`);
      return wire;
    };
    /** The only invocation of the tenant, when it has ended. */
    const only = async (tenant: Tenant): Promise<Json> => {
      for (;;) {
        const { data } = (await tenant.send("GET", "/v1/invocations")).body;
        expect(data.length).toBeLessThan(2);
        const [row] = data;
        if (row !== undefined && row.completed_at !== null) return tenant.detail(row.id);
        await Bun.sleep(20);
      }
    };

    describe("an answer", () => {
      test("passes with its status, headers and body, and is recorded", async () => {
        const route = at.upstream(
          () =>
            new Response("made", {
              status: 201,
              headers: {
                "content-type": "text/x-own; a=b",
                "x-own": "1",
                "set-cookie": "a=b",
                "x-service-invocation-id": "inv_theirs",
                "x-service-policy-warning": "theirs",
                "x-payment-response": "theirs",
                connection: "x-hop",
                "x-hop": "1",
                location: "/elsewhere",
              },
            }),
        );
        const { tenant, id } = await agentAt(route.url);
        const answer = await stream(tenant, id, { body: "hello", headers: { "x-request-id": "mine" } });
        expect([answer.status, answer.text]).toEqual([201, "made"]);
        const { headers } = answer;
        expect(headers.get("content-type")).toBe("text/x-own; a=b");
        expect([headers.get("x-own"), headers.get("location")]).toEqual(["1", "/elsewhere"]);
        for (const name of ["set-cookie", "x-hop", "x-payment-response", "x-service-policy-warning"]) {
          expect([name, headers.get(name)]).toEqual([name, null]);
        }
        expect(headers.get("x-request-id")).toBe("mine");
        expect(idOf(answer)).toStartWith("inv_");
        const row = await tenant.detail(idOf(answer));
        expect(row).toMatchObject({
          mode: "streaming",
          status: "succeeded",
          error_class: null,
          upstream_status: 201,
          req_size: 5,
          resp_size: 4,
          body_captured: true,
          req_body: Buffer.from("hello").toString("base64"),
          resp_body: Buffer.from("made").toString("base64"),
        });
        expect(row.ttft_ms).toBeGreaterThanOrEqual(0);
        expect(row.latency_ms).toBeGreaterThanOrEqual(row.ttft_ms);
      });

      test("comes piece by piece, while the call is running", async () => {
        const body = paced();
        const { tenant, id } = await agentAt(at.upstream(body.response).url);
        const wire = await open(tenant, id);
        body.send("first ");
        const seen = await wire.received((text) => text.includes("first "));
        const invocation = /x-service-invocation-id: (\S+)/i.exec(seen)?.[1] ?? "";
        expect((await tenant.poll(id, invocation)).status).toBe("running");
        body.send("second");
        await wire.received((text) => text.includes("second"));
        body.end();
        expect(await wire.received((text) => text.endsWith("0\r\n\r\n"))).toEndWith("0\r\n\r\n");
        wire.close();
        // The record is made before the answer ends.
        expect(await tenant.poll(id, invocation)).toMatchObject({ status: "succeeded" });
      });

      test("that sends its caller back to the gateway, with the caller's token, does not say where", async () => {
        for (const [location, passes] of [
          ["/v1/agents/agt_1", false],
          [`${at.gateway.url}/v1/agents/agt_1`, false],
          ["https://other.example/v1/agents", true],
        ] as const) {
          const route = at.upstream(() => new Response(null, { status: 307, headers: { location } }));
          const { tenant, id } = await agentAt(route.url);
          const { status, headers } = await stream(tenant, id);
          expect([status, headers.get("location")]).toEqual([307, passes ? location : null]);
        }
      });

      test("of an error status is an answer as well, and the call failed", async () => {
        for (const [status, error_class] of [
          [404, "upstream_4xx"],
          [503, "upstream_5xx"],
        ] as const) {
          const { tenant, id } = await agentAt(at.upstream(() => new Response("no", { status })).url);
          const answer = await stream(tenant, id);
          expect([answer.status, answer.text]).toEqual([status, "no"]);
          expect(await tenant.detail(idOf(answer))).toMatchObject({
            status: "failed",
            error_class,
            upstream_status: status,
            resp_size: 2,
          });
        }
      });

      test("may have no body", async () => {
        for (const status of [200, 204, 304]) {
          const { tenant, id } = await agentAt(at.upstream(() => new Response(null, { status })).url);
          const answer = await stream(tenant, id);
          expect([answer.status, answer.text]).toEqual([status, ""]);
          expect(await tenant.detail(idOf(answer))).toMatchObject({
            status: "succeeded",
            ttft_ms: null,
            resp_size: 0,
          });
        }
      });

      test("that is encoded unasked passes decoded, and counts as such", async () => {
        const plain = Buffer.alloc(3 * MIB, "abc");
        for (const [encoding, bytes] of [
          ["gzip", gzipSync(plain)],
          ["br", brotliCompressSync(plain)],
        ] as const) {
          const headers = { "content-encoding": encoding, "content-length": String(bytes.length) };
          const route = at.upstream(() => new Response(new Uint8Array(bytes), { headers }));
          const { tenant, id } = await agentAt(route.url);
          const answer = await stream(tenant, id, { json: {}, headers: { "accept-encoding": "identity" } });
          expect(answer.text.length).toBe(plain.length);
          expect(answer.headers.get("content-encoding")).toBeNull();
          expect(route.seen[0]?.headers.get("accept-encoding")).toBe("identity");
          const row = await tenant.detail(idOf(answer));
          expect(row.resp_size).toBe(plain.length);
          expect(Buffer.from(row.resp_body, "base64").equals(plain.subarray(0, MIB))).toBe(true);
        }
      });

      test("in an encoding that nobody knows passes as it is", async () => {
        const headers = { "content-encoding": "x-own" };
        const { tenant, id } = await agentAt(at.upstream(() => new Response("abc", { headers })).url);
        const answer = await stream(tenant, id);
        expect([answer.headers.get("content-encoding"), answer.text]).toEqual(["x-own", "abc"]);
      });

      test("that is an event stream has its head at once, before its first event", async () => {
        const peers: RawConnection[] = [];
        const head = HEAD.replace("text/plain", "text/event-stream; charset=utf-8");
        const url = rawUpstream((peer) => {
          peers.push(peer);
          peer.write(head);
        });
        const { tenant, id } = await agentAt(url);
        const wire = await open(tenant, id);
        const text = await wire.received((seen) => seen.includes("\r\n\r\n"));
        expect(parseAnswer(text)).toMatchObject({ status: 200 });
        peers[0]?.write("9\r\ndata: 1\n\n\r\n0\r\n\r\n");
        const { body: all } = parseAnswer(await wire.received((seen) => seen.endsWith("0\r\n\r\n")));
        expect(all).toBe("3\r\n:\n\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n");
        wire.close();
        expect((await only(tenant)).resp_size).toBe("data: 1\n\n".length);
      });

      test("is captured only when the agent's are", async () => {
        const { tenant, id } = await agentAt(at.upstream().url, { capture_body: false });
        const row = await tenant.detail(idOf(await stream(tenant, id)));
        expect(row).toMatchObject({ body_captured: false, resp_size: 17 });
        expect([row.req_body, row.resp_body]).toEqual([undefined, undefined]);
      });
    });

    describe("a request", () => {
      test("passes byte for byte, with the headers that may", async () => {
        const route = at.upstream();
        const tenant = at.tenant();
        const { id: credential_ref } = await tenant.credential({
          auth_type: "api_key",
          plaintext: "key-0001",
        });
        const { id } = await tenant.agent({ upstream_url: route.url, credential_ref });
        const bytes = crypto.getRandomValues(new Uint8Array(100_000));
        const answer = await stream(tenant, id, {
          body: bytes,
          headers: {
            "content-type": "application/x-own",
            accept: "text/x",
            cookie: "a=b",
            "x-payment": "none",
            "x-other": "1",
            "mcp-session-id": "s",
            "x-service-model": "m-1",
            traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
          },
        });
        expect(answer.status).toBe(200);
        const [seen] = route.seen;
        expect(Buffer.from(seen?.body ?? []).equals(bytes)).toBe(true);
        const sent = seen?.headers;
        expect(sent?.get("content-type")).toBe("application/x-own");
        expect([sent?.get("accept"), sent?.get("mcp-session-id")]).toEqual(["text/x", "s"]);
        expect(sent?.get("traceparent")).toStartWith("00-0af7");
        expect(sent?.get("x-api-key")).toBe("key-0001");
        expect(sent?.get("x-request-id")).toBe(answer.headers.get("x-request-id"));
        expect(sent?.get("x-service-invocation-id")).toBe(idOf(answer));
        for (const name of ["authorization", "cookie", "x-payment", "x-other", "x-service-model"]) {
          expect([name, sent?.get(name)]).toEqual([name, null]);
        }
        expect((await tenant.detail(idOf(answer))).model).toBe("m-1");
      });

      test("is checked as on the other path, and leaves nothing when it is refused", async () => {
        const route = at.upstream();
        const { tenant, id } = await agentAt(route.url);
        const { id: idle } = await tenant.agent({ upstream_url: null });
        const { id: priced } = await tenant.agent({
          upstream_url: route.url,
          pricing: { amount: "5", asset: "USDC", network: "base", pay_to: `0x${"ab".repeat(20)}` },
        });
        const { id: limited } = await tenant.agent({ upstream_url: route.url });
        await tenant.patch(limited, { invocation_rate_limit: 0.01, invocation_burst: 1 });
        expect((await stream(tenant, limited)).status).toBe(200);
        expectError(await stream(tenant, UNKNOWN_AGENT), 404);
        expectError(await stream(at.tenant(), id), 404);
        expectError(await stream(tenant, idle), 422);
        const late = await stream(tenant, limited);
        expectError(late, 429);
        expect(late.headers.get("retry-after")).toBe("60");
        expectError(
          await stream(tenant, id, { body: "", headers: { "x-service-model": "m".repeat(257) } }),
          400,
        );
        expectError(await stream(tenant, id, { body: new Uint8Array(32 * MIB + 1) }), 413);
        const unpaid = await stream(tenant, priced);
        expect(unpaid.status).toBe(402);
        expect(unpaid.body.accepts[0].resource).toEndWith(`/v1/proxy/${priced}/stream`);
        await tenant.send("PUT", "/v1/policy", { json: { default: "deny", on_error: "deny", rules: [] } });
        expectError(await stream(tenant, id), 403);
        expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
        expect(route.seen.length).toBe(1);
      });

      test("with a policy's warning passes, and is told", async () => {
        const { tenant, id } = await agentAt(at.upstream().url);
        await tenant.send("PUT", "/v1/policy", { json: { default: "warn", on_error: "deny", rules: [] } });
        const answer = await stream(tenant, id);
        expect([answer.status, answer.headers.get("x-service-policy-warning")]).toEqual([
          200,
          "default: warn",
        ]);
        expect((await tenant.send("GET", "/v1/policy/decisions")).body.data.length).toBe(1);
      });

      test("with a key that has been used is not made again", async () => {
        const route = at.upstream();
        const { tenant, id } = await agentAt(route.url);
        const headers = { "idempotency-key": "k-1" };
        const first = await stream(tenant, id, { json: { n: 1 }, headers });
        const again = await stream(tenant, id, { json: { n: 1 }, headers });
        expectError(again, 409);
        expect(idOf(again)).toBe(idOf(first));
        expectError(await stream(tenant, id, { json: { n: 2 }, headers }), 409);
        // Nor is it one that could be polled for on the other path, and the other way round.
        const other = await tenant.send("POST", `/v1/proxy/${id}`, { json: { n: 1 }, headers });
        expectError(other, 409);
        const transactional = { json: { n: 3 }, headers: { "idempotency-key": "k-2" } };
        await tenant.call(id, transactional);
        expectError(await stream(tenant, id, transactional), 409);
        await route.arrival(2);
        expect(route.seen.length).toBe(2);
      });

      test("of 32 MiB passes", async () => {
        const route = at.upstream();
        const { tenant, id } = await agentAt(route.url);
        const answer = await stream(tenant, id, { body: new Uint8Array(32 * MIB) });
        expect([answer.status, route.seen[0]?.body.length]).toEqual([200, 32 * MIB]);
        const row = await tenant.detail(idOf(answer));
        expect([row.req_size, Buffer.from(row.req_body, "base64").length]).toEqual([32 * MIB, MIB]);
      });

      test("waits for a place of its agent", async () => {
        const bodies = [paced(), paced()];
        let next = 0;
        const route = at.upstream(() => bodies[next++]?.response() ?? new Response("late"));
        const { tenant, id } = await agentAt(route.url);
        const wires = [await open(tenant, id), await open(tenant, id)];
        await route.arrival(2);
        const third = stream(tenant, id);
        for (const body of bodies) body.send("x");
        await Bun.sleep(100);
        expect(route.seen.length).toBe(2);
        bodies[0]?.end();
        expect((await third).text).toBe("late");
        bodies[1]?.end();
        for (const wire of wires) {
          await wire.received((text) => text.endsWith("0\r\n\r\n"));
          wire.close();
        }
      });
    });

    describe("an upstream that gives nothing", () => {
      const nothing: [string, () => string, number, string][] = [
        ["refuses the connection", () => "http://127.0.0.1:1/", 502, "upstream_5xx"],
        ["closes it", () => rawUpstream((peer) => peer.end()), 502, "upstream_5xx"],
        ["resets it", () => rawUpstream((peer) => peer.reset()), 502, "upstream_5xx"],
        [
          "talks nonsense",
          () => rawUpstream((peer) => [peer.write("SSH-2.0-x\r\n"), peer.end()]),
          502,
          "upstream_5xx",
        ],
        [
          "stops in its head",
          () => rawUpstream((peer) => peer.write("HTTP/1.1 200 OK\r\nA: b\r\n")),
          504,
          "timeout",
        ],
        ["says nothing", () => rawUpstream(() => {}), 504, "timeout"],
        [
          "never ends its head",
          () =>
            rawUpstream((peer) => {
              peer.write("HTTP/1.1 200 OK\r\n");
              const timer = setInterval(() => peer.write(`X-A${Math.random()}: ${"b".repeat(4000)}\r\n`), 5);
              setTimeout(() => clearInterval(timer), 3000);
            }),
          502,
          "upstream_5xx",
        ],
      ];
      test.each(nothing)(
        "because it %s: an Error, and the record",
        async (_name, url, status, error_class) => {
          const { tenant, id } = await agentAt(url());
          const answer = await stream(tenant, id);
          expectError(answer, status);
          const row = await tenant.detail(idOf(answer));
          expect(row).toMatchObject({ status: "failed", error_class, upstream_status: null, ttft_ms: null });
        },
      );

      test("because its credential can't be had: 502, credential_error, and nobody is called", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const vault = { auth_type: "bearer", source: "vault", plaintext: undefined, vault_ref: "nowhere" };
        const { id: credential_ref } = await tenant.credential(vault);
        const { id } = await tenant.agent({ upstream_url: route.url, credential_ref });
        const answer = await stream(tenant, id);
        expectError(answer, 502);
        const row = await tenant.detail(idOf(answer));
        expect(row).toMatchObject({ error_class: "credential_error", latency_ms: null });
        expect(route.seen.length).toBe(0);
      });
    });

    describe("an answer that breaks off", () => {
      const breaks: [string, (peer: RawConnection) => void, string][] = [
        [
          "by a reset",
          (peer) => [peer.write(`${HEAD}5\r\nhello\r\n`), setTimeout(peer.reset, 50)],
          "upstream_5xx",
        ],
        [
          "by a close",
          (peer) => [peer.write(`${HEAD}5\r\nhello\r\n`), setTimeout(peer.end, 50)],
          "upstream_5xx",
        ],
        [
          "in half a chunk",
          (peer) => [peer.write(`${HEAD}ff\r\nhello`), setTimeout(peer.end, 50)],
          "upstream_5xx",
        ],
        [
          "before its length",
          (peer) => [
            peer.write("HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"),
            setTimeout(peer.end, 50),
          ],
          "upstream_5xx",
        ],
        [
          "without a length, by a reset,",
          (peer) => [peer.write("HTTP/1.1 200 OK\r\n\r\nhello"), setTimeout(peer.reset, 50)],
          "upstream_5xx",
        ],
        [
          "by a broken chunk",
          (peer) => [peer.write(`${HEAD}5\r\nhello\r\n`), setTimeout(peer.write, 50, "zz\r\n")],
          "upstream_5xx",
        ],
        ["by silence", (peer) => peer.write(`${HEAD}5\r\nhello\r\n`), "timeout"],
      ];
      test.each(breaks)("%s never ends cleanly", async (_name, onRequest, error_class) => {
        const { tenant, id } = await agentAt(rawUpstream(onRequest));
        const wire = await open(tenant, id);
        const { status, head, body } = parseAnswer(await wire.received());
        expect([status, body]).toEqual([200, "5\r\nhello\r\n"]);
        expect(head).toContain("Transfer-Encoding: chunked");
        const row = await only(tenant);
        expect(row).toMatchObject({ status: "failed", error_class, upstream_status: 200, resp_size: 5 });
        expect(row.ttft_ms).toBeGreaterThanOrEqual(0);
        expect(Buffer.from(row.resp_body, "base64").toString()).toBe("hello");
        const viaFetch = stream(tenant, id);
        expect(await viaFetch.then(() => "whole").catch(() => "broken")).toBe("broken");
      });

      const first: [string, string][] = [
        ["of chunks", `${HEAD}5\r\nhello\r\n`],
        ["with a length", "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"],
        ["of events", `${HEAD.replace("text/plain", "text/event-stream")}5\r\nhello\r\n`],
      ];
      const breaches = ["end", "reset"] as const;
      test.each(first.flatMap(([of, answer]) => breaches.map((breach) => [breach, of, answer] as const)))(
        "at once by a %s, %s, gives its head and its first part",
        async (breach, _of, answer) => {
          const { tenant, id } = await agentAt(
            rawUpstream((peer) => {
              peer.write(answer);
              peer[breach]();
            }),
          );
          const wires = await Promise.all(Array.from({ length: 15 }, () => open(tenant, id)));
          for (const received of await Promise.all(wires.map((wire) => wire.received()))) {
            expect(received).toStartWith("HTTP/1.1 200 OK\r\n");
            expect(received).toMatch(/^x-service-invocation-id: inv_/im);
            expect(parseAnswer(received).body).toContain("5\r\nhello\r\n");
            expect(received).not.toContain("\r\n0\r\n");
          }
          const { data } = (await tenant.send("GET", "/v1/invocations?limit=50")).body;
          expect(data).toHaveLength(15);
          for (const each of data) {
            const row = await tenant.detail(each.id);
            expect(row).toMatchObject({
              status: "failed",
              error_class: "upstream_5xx",
              upstream_status: 200,
              resp_size: 5,
            });
            expect(Buffer.from(row.resp_body, "base64").toString()).toBe("hello");
          }
        },
      );

      test("in its encoding never ends cleanly either", async () => {
        const bytes = gzipSync(crypto.getRandomValues(new Uint8Array(100_000))).subarray(0, 60_000);
        const headers = { "content-encoding": "gzip" };
        const { tenant, id } = await agentAt(
          at.upstream(() => new Response(new Uint8Array(bytes), { headers })).url,
        );
        expect(
          await stream(tenant, id)
            .then(() => "whole")
            .catch(() => "broken"),
        ).toBe("broken");
        expect((await only(tenant)).error_class).toBe("upstream_5xx");
      });
    });

    describe("a caller that leaves", () => {
      test("before the head stops the upstream: cancelled", async () => {
        const { promise, resolve } = Promise.withResolvers<void>();
        const route = at.upstream(({ signal }) => {
          signal.addEventListener("abort", () => resolve());
          return new Promise<Response>(() => {});
        });
        const { tenant, id } = await agentAt(route.url);
        const wire = await open(tenant, id);
        await route.arrival();
        wire.close();
        await promise;
        expect(await only(tenant)).toMatchObject({ error_class: "cancelled", upstream_status: null });
      });

      test("in the middle stops it too: cancelled, and the status is kept", async () => {
        const body = paced();
        const { promise, resolve } = Promise.withResolvers<void>();
        const route = at.upstream(({ signal }) => {
          signal.addEventListener("abort", () => resolve());
          return body.response();
        });
        const { tenant, id } = await agentAt(route.url);
        const wire = await open(tenant, id);
        body.send("hello");
        await wire.received((text) => text.includes("hello"));
        wire.close();
        await promise;
        expect(await only(tenant)).toMatchObject({
          status: "failed",
          error_class: "cancelled",
          upstream_status: 200,
          resp_size: 5,
        });
      });

      test("while it sends its body makes no call", async () => {
        const route = at.upstream();
        const { tenant, id } = await agentAt(route.url);
        const wire = await connect(at.gateway.url);
        await wire.send(
          `POST /v1/proxy/${id}/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${await tenant.token()}\r\nContent-Length: 100\r\n\r\nhalf`,
        );
        wire.close();
        await stream(tenant, id);
        expect(route.seen.length).toBe(1);
      });
    });

    test("a call that is cancelled is broken off for its caller", async () => {
      const body = paced();
      const route = at.upstream(body.response);
      const { tenant, id } = await agentAt(route.url);
      const wire = await open(tenant, id);
      body.send("hello");
      const head = await wire.received((text) => text.includes("hello"));
      const invocation = /x-service-invocation-id: (\S+)/i.exec(head)?.[1] ?? "";
      const cancelled = await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`);
      expect([cancelled.status, cancelled.body.error_class]).toEqual([200, "cancelled"]);
      expect(await wire.received()).not.toContain("0\r\n\r\n");
      expectError(await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`), 409);
      expect(await only(tenant)).toMatchObject({ status: "failed", error_class: "cancelled" });
    });

    test("a receipt says the hash of a whole answer, and none of one that broke off", async () => {
      const sha256 = (text: string) => new Bun.CryptoHasher("sha256").update(text).digest("hex");
      const broken = rawUpstream((peer) => [peer.write(`${HEAD}5\r\nhello\r\n`), setTimeout(peer.end, 50)]);
      const whole = at.upstream(() => new Response("x".repeat(2 * MIB))).url;
      for (const [url, hash] of [
        [whole, sha256("x".repeat(2 * MIB))],
        [broken, null],
      ] as const) {
        const { tenant, id } = await agentAt(url, { emit_receipts: true });
        await stream(tenant, id, { body: "asked" }).catch(() => {});
        const { id: invocation } = await only(tenant);
        let answer = await tenant.send("GET", `/v1/invocations/${invocation}/receipt`);
        while (answer.status === 404) {
          await Bun.sleep(50);
          answer = await tenant.send("GET", `/v1/invocations/${invocation}/receipt`);
        }
        const [, claims = ""] = answer.body.receipt.split(".");
        expect(JSON.parse(Buffer.from(claims, "base64url").toString())).toMatchObject({
          invocation_id: invocation,
          mode: "streaming",
          req_sha256: sha256("asked"),
          resp_sha256: hash,
        });
      }
    });

    test("the connection is used again after a streamed answer, and closed for its silence then", async () => {
      const { tenant, id } = await agentAt(at.upstream().url);
      const wire = await open(tenant, id);
      const first = await wire.received((text) => text.includes("world"));
      await wire.send(`GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n`);
      await wire.received((text) => text.length > first.length + 20);
      wire.close();
    });
  },
  { TOLLGATE_UPSTREAM_TIMEOUT_MS: String(TIMEOUT_MS), TOLLGATE_AGENT_CONCURRENCY: "2" },
);
