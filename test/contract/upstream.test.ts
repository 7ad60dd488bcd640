// What an upstream sees of a call, and what the caller sees of the upstream: headers, credentials, bodies, error
// classes, sizes, capture. Upstreams that misbehave do so on the bare socket.
import { afterAll, describe, expect, test } from "bun:test";
import { brotliCompressSync, deflateSync, gzipSync, zstdCompressSync } from "node:zlib";
import { type RawConnection, type RawUpstream, startRawUpstream } from "../support/http/upstream.ts";
import {
  contract,
  DETAIL,
  expectShape,
  is,
  type Json,
  POLL,
  POLL_WITH_BODY,
  READ_BODY,
  responseText,
  type Sending,
} from "./contract.ts";

const MIB = 1024 * 1024;

/** What the tests' own HTTP client adds unasked, and the connection's own. */
const OF_THE_CONNECTION = ["connection", "content-length", "host"];

/** Every call of a file of tests waits for at most this, where it is meant to run into it. */
const TIMEOUT_MS = 1500;

contract(
  (at) => {
    const raws: RawUpstream[] = [];
    afterAll(() => Promise.all(raws.map((raw) => raw.stop())));
    function raw(answer: (connection: RawConnection) => void): RawUpstream {
      const upstream = startRawUpstream(answer);
      raws.push(upstream);
      return upstream;
    }

    describe("the headers of a request", () => {
      test("are exactly those of the caller's that are listed, and those that are added", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url });
        const passing = {
          "content-type": "text/x-special; charset=x",
          accept: "text/plain;q=0.5",
          "accept-language": "de, en;q=0.1",
          "user-agent": "contract/1",
          "idempotency-key": "the-key",
          "mcp-protocol-version": "2025-06-18",
          "mcp-other": "x",
          traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
          tracestate: "a=b",
          baggage: "k=v",
        };
        const staying = {
          cookie: "session=secret-cookie",
          "x-payment": "secret-payment",
          "x-api-key": "secret-of-the-caller",
          "proxy-authorization": "Basic c2VjcmV0",
          "x-forwarded-for": "10.0.0.1",
          "x-forwarded-host": "evil.example.com",
          forwarded: "for=10.0.0.1",
          te: "trailers",
          referer: "https://example.com/",
          origin: "https://example.com",
          "accept-encoding": "gzip, br",
          "x-service-model": "m",
          "x-custom": "custom",
          prefer: "wait=5",
          range: "bytes=0-1",
          "if-none-match": '"x"',
          "mcp-session-id": "session-of-the-caller",
          "mcp-method": "x",
          "mcp-name": "y",
          "mcp-param-z": "z",
          "x-service-invocation-id": "inv_forged",
          "x-request-id": "the-request-id",
        };
        const headers = { ...passing, ...staying };
        const invocation = await tenant.call(id, { body: "body", headers });
        const { headers: seen, method } = await route.arrival();
        expect(method).toBe("POST");
        const all = Object.fromEntries([...seen].filter(([name]) => !OF_THE_CONNECTION.includes(name)));
        // No encoding is asked for: absent, or the name for none.
        expect([undefined, "identity"]).toContain(all["accept-encoding"]);
        delete all["accept-encoding"];
        expect(all["via"]).toMatch(/^1\.1 tollgate-[0-9a-f]{16}$/);
        delete all["via"];
        expect(all).toEqual({
          ...passing,
          "x-request-id": "the-request-id",
          "x-service-invocation-id": invocation,
        });
        expect(seen.get("host")).toBe(new URL(route.url).host);
        expect(seen.get("content-length")).toBe("4");
      });

      test("a call without a body sends none of its own invention", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: `${route.url}?a=1&b=%20` });
        await tenant.invoke(id, { headers: { accept: "", "user-agent": "" } });
        const seen = await route.arrival();
        expect(seen.url.search).toBe("?a=1&b=%20");
        expect(seen.body.length).toBe(0);
        expect(seen.headers.has("content-type")).toBe(false);
        expect(seen.headers.has("authorization")).toBe(false);
      });
    });

    describe("the credential of a call", () => {
      test.each([
        ["bearer", { authorization: "Bearer the secret" }],
        ["api_key", { "x-api-key": "the secret" }],
        ["none", {}],
      ])("%s reaches the upstream as decided, and the caller's own do not", async (auth_type, injected: Json) => {
        const tenant = at.tenant();
        const route = at.upstream();
        const credential = await tenant.credential({ auth_type, plaintext: "the secret" });
        const { id } = await tenant.agent({ upstream_url: route.url, credential_ref: credential.id });
        await tenant.invoke(id, { json: {}, headers: { "x-api-key": "of the caller" } });
        const { headers } = await route.arrival();
        expect(headers.get("authorization")).toBe(injected.authorization ?? null);
        expect(headers.get("x-api-key")).toBe(injected["x-api-key"] ?? null);
      });

      test("a rotated secret is used from then on", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const credential = await tenant.credential({ plaintext: "first secret" });
        const { id } = await tenant.agent({ upstream_url: route.url, credential_ref: credential.id });
        await tenant.invoke(id);
        await tenant.send("PUT", `/v1/credentials/${credential.id}`, {
          json: { plaintext: "second secret" },
        });
        await tenant.invoke(id);
        expect(route.seen.map(({ headers }) => headers.get("authorization"))).toEqual([
          "Bearer first secret",
          "Bearer second secret",
        ]);
      });

      test("fails the call as credential_error when it cannot be resolved or sent", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const vault = await tenant.credential({ source: "vault", vault_ref: "a/b", plaintext: undefined });
        const odd = await tenant.credential({ plaintext: "line\r\nX-Injected: 1" });
        for (const credential of [vault, odd]) {
          const { id } = await tenant.agent({ upstream_url: route.url, credential_ref: credential.id });
          const view = await tenant.invoke(id);
          expectShape(view, POLL);
          expect(view).toMatchObject({
            status: "failed",
            error_class: "credential_error",
            upstream_status: null,
            response_content_type: null,
          });
        }
        expect(route.seen).toEqual([]);
      });
    });

    describe("the bodies of a call", () => {
      test("go out byte for byte, 32 MiB of them with and without a length", async () => {
        const tenant = at.tenant();
        const bytes = new Uint8Array(32 * MIB);
        for (let at = 0; at < bytes.length; at += 65_536) crypto.getRandomValues(bytes.subarray(at, at + 65_536));
        const hash = Bun.SHA256.hash(bytes, "hex");
        const route = at.upstream(({ body }) => new Response(Bun.SHA256.hash(body, "hex")));
        const { id } = await tenant.agent({ upstream_url: route.url });
        const whole = await tenant.call(id, { body: bytes });
        const view = await tenant.ended(id, whole);
        expect(responseText(view)).toBe(hash);
        expect(await tenant.detail(whole)).toMatchObject({ req_size: 32 * MIB, resp_size: 64 });
        const stream = new Blob([bytes]).stream();
        expect(responseText(await tenant.invoke(id, { body: stream }))).toBe(hash);
        expect(route.seen.map(({ body }) => body.length)).toEqual([32 * MIB, 32 * MIB]);
      });

      test("are capped at 1 MiB when captured, and their sizes are whole", async () => {
        const tenant = at.tenant();
        const size = MIB + 1;
        const route = at.upstream(() => new Response("r".repeat(size)));
        const { id } = await tenant.agent({ upstream_url: route.url });
        const invocation = await tenant.call(id, { body: "q".repeat(size) });
        const view = await tenant.ended(id, invocation);
        expectShape(view, POLL_WITH_BODY);
        expect(view).toMatchObject({ status: "succeeded", response_truncated: true });
        expect(responseText(view)).toBe("r".repeat(MIB));
        const detail = await tenant.detail(invocation);
        expectShape(detail, { ...DETAIL, req_body: is.base64, resp_body: is.base64 });
        expect(detail).toMatchObject({ req_size: size, resp_size: size, body_captured: true });
        expect(Buffer.from(detail.req_body, "base64").toString()).toBe("q".repeat(MIB));
        expect(detail.resp_body).toBe(view.response_body_b64);
        expect(route.seen[0]?.body.length).toBe(size);
      });

      test("are not truncated at exactly 1 MiB, and there when they are empty", async () => {
        const tenant = at.tenant();
        const full = at.upstream(() => new Response("r".repeat(MIB)));
        const none = at.upstream(() => new Response(null, { status: 204 }));
        const { id } = await tenant.agent({ upstream_url: full.url });
        const view = await tenant.invoke(id);
        expect([view.response_truncated, responseText(view).length]).toEqual([false, MIB]);
        await tenant.patch(id, { upstream_url: none.url });
        const empty = await tenant.invoke(id, {});
        expectShape(empty, POLL_WITH_BODY);
        expect(empty).toMatchObject({ status: "succeeded", upstream_status: 204, response_body_b64: "" });
        expect(await tenant.detail(empty.invocation_id)).toMatchObject({
          req_size: 0,
          resp_size: 0,
          req_body: "",
          resp_body: "",
        });
      });

      test("are read with the scope alone, and never in a list", async () => {
        const tenant = at.tenant();
        const { id } = await tenant.agent({ upstream_url: at.upstream().url });
        const invocation = await tenant.call(id, { body: "request body" });
        await tenant.ended(id, invocation);
        for (const scope of ["", "invocations:read", "invocations:read_bodyx other", READ_BODY.toUpperCase()]) {
          const { body } = await tenant.send("GET", `/v1/invocations/${invocation}`, { scope });
          expectShape(body, DETAIL);
          expect(body.body_captured).toBe(true);
        }
        const scope = `other ${READ_BODY}`;
        const { body } = await tenant.send("GET", `/v1/invocations/${invocation}`, { scope });
        expect(Buffer.from(body.req_body, "base64").toString()).toBe("request body");
        const list = await tenant.send("GET", "/v1/invocations", { scope });
        expect(list.body.data[0]).not.toHaveProperty("req_body");
        expect(list.body.data[0]).not.toHaveProperty("body_captured");
      });

      test("are not kept when capture is off, for anybody", async () => {
        const tenant = at.tenant();
        const { id } = await tenant.agent({ upstream_url: at.upstream().url, capture_body: false });
        const invocation = await tenant.call(id, { body: "request" });
        const view = await tenant.ended(id, invocation);
        expectShape(view, POLL);
        expect(view).toMatchObject({ status: "succeeded", response_truncated: false });
        const detail = await tenant.detail(invocation);
        expectShape(detail, DETAIL);
        expect(detail).toMatchObject({ body_captured: false, req_size: 7, resp_size: 17 });
        // What was not captured then is not shown later.
        await tenant.patch(id, { capture_body: true });
        expectShape(await tenant.poll(id, invocation), POLL);
      });

      const text = "compressed ".repeat(1000);
      test.each([
        ["gzip", gzipSync],
        ["x-gzip", gzipSync],
        ["deflate", deflateSync],
        ["br", brotliCompressSync],
        ["zstd", zstdCompressSync],
      ])("are decoded from %s, and sized as decoded", async (encoding, compress) => {
        const tenant = at.tenant();
        const headers = { "content-encoding": encoding, "content-type": "text/plain" };
        const route = at.upstream(() => new Response(Uint8Array.from(compress(text)), { headers }));
        const { id } = await tenant.agent({ upstream_url: route.url });
        const view = await tenant.invoke(id);
        expect(responseText(view)).toBe(text);
        expect(view.response_content_type).toBe("text/plain");
        expect((await tenant.detail(view.invocation_id)).resp_size).toBe(text.length);
      });
    });

    describe("a call", () => {
      test.each([
        [200, "succeeded", null],
        [201, "succeeded", null],
        [299, "succeeded", null],
        [301, "succeeded", null],
        [304, "succeeded", null],
        [307, "succeeded", null],
        [400, "failed", "upstream_4xx"],
        [401, "failed", "upstream_4xx"],
        [404, "failed", "upstream_4xx"],
        [429, "failed", "upstream_4xx"],
        [499, "failed", "upstream_4xx"],
        [500, "failed", "upstream_5xx"],
        [503, "failed", "upstream_5xx"],
        [599, "failed", "upstream_5xx"],
      ])("is, when its upstream answers %d, %s, %p", async (upstreamStatus, status, error_class) => {
        const tenant = at.tenant();
        const target = at.upstream();
        const body = upstreamStatus === 304 ? null : "an answer";
        const headers = { location: target.url, "content-type": "text/x-answer" };
        const route = at.upstream(() => new Response(body, { status: upstreamStatus, headers }));
        const { id } = await tenant.agent({ upstream_url: route.url });
        const view = await tenant.invoke(id);
        expectShape(view, POLL_WITH_BODY);
        expect(view).toMatchObject({ status, error_class, upstream_status: upstreamStatus });
        expect(responseText(view)).toBe(body ?? "");
        expect(view.response_content_type).toBe("text/x-answer");
        expect(view.latency_ms).toBeWithin(0, 10_000);
        expect([route.seen.length, target.seen.length]).toEqual([1, 0]);
      });

      test("gets the answer that comes after a 1xx one", async () => {
        const tenant = at.tenant();
        const upstream = raw((connection) => {
          connection.write("HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n");
          connection.write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        });
        const { id } = await tenant.agent({ upstream_url: upstream.url });
        const view = await tenant.invoke(id);
        expect(view).toMatchObject({ status: "succeeded", upstream_status: 200 });
        expect(responseText(view)).toBe("ok");
      });

      const broken: ReadonlyArray<readonly [string, (connection: RawConnection) => void, number | null]> = [
        ["a reset before an answer", (connection) => connection.reset(), null],
        ["a close before an answer", (connection) => connection.end(), null],
        [
          "an answer that is no HTTP",
          (connection) => {
            connection.write("SSH-2.0-OpenSSH_9.9\r\n");
            connection.end();
          },
          null,
        ],
        [
          "a body that breaks off",
          (connection) => {
            connection.write("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart");
            connection.end();
          },
          200,
        ],
        [
          "a chunked body that breaks off",
          (connection) => {
            connection.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n");
            connection.end();
          },
          200,
        ],
      ];
      test.each(broken)("is upstream_5xx, and not sent again, after %s", async (_, answer, upstream_status) => {
        const tenant = at.tenant();
        const upstream = raw(answer);
        const { id } = await tenant.agent({ upstream_url: upstream.url });
        const view = await tenant.invoke(id, { body: "once" });
        expect(view).toMatchObject({ status: "failed", error_class: "upstream_5xx", upstream_status });
        expectShape(view, POLL);
        expect(upstream.connections()).toBe(1);
      });

      test("is upstream_5xx without a status where nobody listens", async () => {
        const tenant = at.tenant();
        const gone = startRawUpstream(() => {});
        await gone.stop();
        const { id } = await tenant.agent({ upstream_url: gone.url });
        const view = await tenant.invoke(id);
        expectShape(view, POLL);
        expect(view).toMatchObject({ status: "failed", error_class: "upstream_5xx", upstream_status: null });
        const detail = await tenant.detail(view.invocation_id);
        expectShape(detail, { ...DETAIL, req_body: is.base64 });
        expect(detail).toMatchObject({ resp_size: null, ttft_ms: null, body_captured: true });
      });

      test("is upstream_5xx without a status where no TLS is spoken under https", async () => {
        const tenant = at.tenant();
        const upstream_url = at.upstream().url.replace("http:", "https:");
        const { id } = await tenant.agent({ upstream_url });
        const view = await tenant.invoke(id);
        expect(view).toMatchObject({ status: "failed", error_class: "upstream_5xx", upstream_status: null });
      });

      test("is upstream_5xx without a status at a name that does not resolve", async () => {
        const tenant = at.tenant();
        const { id } = await tenant.agent({ upstream_url: "http://nobody.invalid/" });
        const view = await tenant.invoke(id);
        expect(view).toMatchObject({ status: "failed", error_class: "upstream_5xx", upstream_status: null });
      });

      test("fails as internal when its answer is beyond the limit, and nothing of that is kept", async () => {
        const tenant = at.tenant();
        const announced = at.upstream(() => new Response("x".repeat(3 * MIB)));
        const streamed = at.upstream(() => new Response(new Blob(["x".repeat(3 * MIB)]).stream()));
        const bomb = gzipSync("x".repeat(64 * MIB));
        const packed = at.upstream(
          () => new Response(Uint8Array.from(bomb), { headers: { "content-encoding": "gzip" } }),
        );
        for (const { url } of [announced, streamed, packed]) {
          const { id } = await tenant.agent({ upstream_url: url });
          const view = await tenant.invoke(id);
          expectShape(view, POLL);
          expect(view).toMatchObject({ status: "failed", error_class: "internal", upstream_status: 200 });
        }
        const { id } = await tenant.agent({
          upstream_url: at.upstream(() => new Response("x".repeat(2 * MIB))).url,
        });
        expect(await tenant.invoke(id)).toMatchObject({ status: "succeeded", response_truncated: true });
      });

      test("is a timeout when its deadline passes, before the head and in the body", async () => {
        const tenant = at.tenant();
        const silent = raw(() => {});
        const stuck = raw((connection) => connection.write("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"));
        const views = await Promise.all(
          [silent, stuck].map(async ({ url }) => {
            const { id } = await tenant.agent({ upstream_url: url });
            return tenant.invoke(id);
          }),
        );
        expect(views).toMatchObject([
          { status: "failed", error_class: "timeout", upstream_status: null },
          { status: "failed", error_class: "timeout", upstream_status: 200 },
        ]);
        for (const view of views) {
          expectShape(view, POLL);
          expect(view.latency_ms).toBeWithin(TIMEOUT_MS - 50, TIMEOUT_MS + 3000);
        }
      });
    });

    test("X-Request-ID goes to the upstream as the caller got it", async () => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await tenant.agent({ upstream_url: route.url });
      const sending: Sending = { json: {}, headers: { prefer: "wait=20" } };
      const answer = await tenant.send("POST", `/v1/proxy/${id}`, sending);
      expect(route.seen[0]?.headers.get("x-request-id")).toBe(answer.headers.get("x-request-id"));
    });
  },
  { TOLLGATE_UPSTREAM_TIMEOUT_MS: String(TIMEOUT_MS), TOLLGATE_MAX_RESPONSE_BYTES: String(2 * MIB) },
);
