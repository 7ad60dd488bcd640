// Streaming mode for http agents: how every kind of broken exchange looks to the caller, who must never take a part for
// the whole, and what the record says of it.
import { describe, expect, test } from "bun:test";
import { gzipSync } from "node:zlib";
import type { RawConnection } from "../support/http/upstream.ts";
import { contract, expectError } from "./contract.ts";
import { HEAD, idOf, MIB, paced, rawUpstreams, stream, streamsOf } from "./streamed-calls.ts";
import { connect, parseAnswer } from "./wire.ts";

const TIMEOUT_MS = 1500;
const rawUpstream = rawUpstreams();

contract(
  (at) => {
    const { agentAt, open, only } = streamsOf(at);

    describe("a streamed call that gets no answer", () => {
      const nothing: [string, () => string, number, string][] = [
        ["refuses the connection", () => "http://127.0.0.1:1/", 502, "upstream_5xx"],
        ["closes it", () => rawUpstream((peer) => peer.end()), 502, "upstream_5xx"],
        ["resets it", () => rawUpstream((peer) => peer.reset()), 502, "upstream_5xx"],
        ["talks nonsense", () => rawUpstream((peer) => [peer.write("SSH-2.0-x\r\n"), peer.end()]), 502, "upstream_5xx"],
        ["stops in its head", () => rawUpstream((peer) => peer.write("HTTP/1.1 200 OK\r\nA: b\r\n")), 504, "timeout"],
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
        "ends in an Error, and is recorded, because its upstream %s",
        async (_name, url, status, error_class) => {
          const { tenant, id } = await agentAt(url());
          const answer = await stream(tenant, id);
          expectError(answer, status);
          const row = await tenant.detail(idOf(answer));
          expect(row).toMatchObject({ status: "failed", error_class, upstream_status: null, ttft_ms: null });
        },
      );

      test("ends in 502, credential_error, because its credential can't be had, and nobody is called", async () => {
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
        ["by a reset", (peer) => [peer.write(`${HEAD}5\r\nhello\r\n`), setTimeout(peer.reset, 50)], "upstream_5xx"],
        ["by a close", (peer) => [peer.write(`${HEAD}5\r\nhello\r\n`), setTimeout(peer.end, 50)], "upstream_5xx"],
        ["in half a chunk", (peer) => [peer.write(`${HEAD}ff\r\nhello`), setTimeout(peer.end, 50)], "upstream_5xx"],
        [
          "before its length",
          (peer) => [peer.write("HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"), setTimeout(peer.end, 50)],
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
        "gives its head and its first part when that is at once by a %s, %s",
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

      test("never ends cleanly either when that is in its encoding", async () => {
        const bytes = gzipSync(crypto.getRandomValues(new Uint8Array(100_000))).subarray(0, 60_000);
        const headers = { "content-encoding": "gzip" };
        const { tenant, id } = await agentAt(at.upstream(() => new Response(new Uint8Array(bytes), { headers })).url);
        expect(
          await stream(tenant, id)
            .then(() => "whole")
            .catch(() => "broken"),
        ).toBe("broken");
        expect((await only(tenant)).error_class).toBe("upstream_5xx");
      });
    });

    describe("a caller that leaves", () => {
      test("stops the upstream before the head, and the call is cancelled", async () => {
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

      test("stops the upstream in the middle of the answer too: cancelled, and the status is kept", async () => {
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

      test("makes no call when it leaves while it sends its body", async () => {
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
      expect(await wire.received()).not.toContain("\r\n0\r\n\r\n");
      expectError(await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`), 409);
      expect(await only(tenant)).toMatchObject({ status: "failed", error_class: "cancelled" });
    });

    test("a receipt has the hash of a whole answer, and none of one that broke off", async () => {
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
  },
  { TOLLGATE_UPSTREAM_TIMEOUT_MS: String(TIMEOUT_MS), TOLLGATE_AGENT_CONCURRENCY: "2" },
);
