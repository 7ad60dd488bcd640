// Streaming mode for http agents: what passes in both directions, and as it arrives.
import { describe, expect, test } from "bun:test";
import { brotliCompressSync, gzipSync } from "node:zlib";
import type { RawConnection } from "../support/http/upstream.ts";
import { contract, expectError, UNKNOWN_AGENT } from "./contract.ts";
import { HEAD, idOf, MIB, paced, rawUpstreams, stream, streamsOf } from "./streamed-calls.ts";
import { parseAnswer } from "./wire.ts";

const TIMEOUT_MS = 1500;
const rawUpstream = rawUpstreams();

contract(
  (at) => {
    const { agentAt, open, only } = streamsOf(at);

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
        expect(await wire.received((text) => text.endsWith("\r\n0\r\n\r\n"))).toEndWith("0\r\n\r\n");
        wire.close();
        // The record is made before the answer ends.
        expect(await tenant.poll(id, invocation)).toMatchObject({ status: "succeeded" });
      });

      test("does not say where when it sends its caller back to the gateway, with the caller's token", async () => {
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

      test("is an answer as well with an error status, and the call failed", async () => {
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

      test("passes decoded when it is encoded unasked, and counts as such", async () => {
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

      test("passes as it is in an encoding that nobody knows", async () => {
        const headers = { "content-encoding": "x-own" };
        const { tenant, id } = await agentAt(at.upstream(() => new Response("abc", { headers })).url);
        const answer = await stream(tenant, id);
        expect([answer.headers.get("content-encoding"), answer.text]).toEqual(["x-own", "abc"]);
      });

      test("has its head at once, before its first event, when it is an event stream", async () => {
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
        expectError(await stream(tenant, id, { body: "", headers: { "x-service-model": "m".repeat(257) } }), 400);
        expectError(await stream(tenant, id, { body: new Uint8Array(32 * MIB + 1) }), 413);
        const unpaid = await stream(tenant, priced);
        expect(unpaid.status).toBe(402);
        expect(unpaid.body.accepts[0].resource).toEndWith(`/v1/proxy/${priced}/stream`);
        await tenant.send("PUT", "/v1/policy", { json: { default: "deny", on_error: "deny", rules: [] } });
        expectError(await stream(tenant, id), 403);
        expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
        expect(route.seen.length).toBe(1);
      });

      test("passes with a policy's warning, which is told", async () => {
        const { tenant, id } = await agentAt(at.upstream().url);
        await tenant.send("PUT", "/v1/policy", { json: { default: "warn", on_error: "deny", rules: [] } });
        const answer = await stream(tenant, id);
        expect([answer.status, answer.headers.get("x-service-policy-warning")]).toEqual([200, "default: warn"]);
        expect((await tenant.send("GET", "/v1/policy/decisions")).body.data.length).toBe(1);
      });

      test("is not made again with a key that has been used", async () => {
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

      test("passes byte for byte with 32 MiB, with and without a length", async () => {
        const bytes = new Uint8Array(32 * MIB);
        for (let at = 0; at < bytes.length; at += 65_536) crypto.getRandomValues(bytes.subarray(at, at + 65_536));
        const hash = Bun.SHA256.hash(bytes, "hex");
        const route = at.upstream(({ body }) => new Response(Bun.SHA256.hash(body, "hex")));
        const { tenant, id } = await agentAt(route.url);
        for (const body of [bytes, new Blob([bytes]).stream()]) {
          const answer = await stream(tenant, id, { body });
          expect([answer.status, answer.text]).toEqual([200, hash]);
          const row = await tenant.detail(idOf(answer));
          expect([row.req_size, Bun.SHA256.hash(Buffer.from(row.req_body, "base64"), "hex")]).toEqual([
            32 * MIB,
            Bun.SHA256.hash(bytes.subarray(0, MIB), "hex"),
          ]);
        }
      });

      test("passes byte for byte with some MiB to an mcp agent, which are read as one message", async () => {
        const route = at.upstream(({ body }) => new Response(Bun.SHA256.hash(body, "hex")));
        const { tenant, id } = await agentAt(route.url, { protocol: "mcp", mcp_transport: "streamable_http" });
        const text = Buffer.from(crypto.getRandomValues(new Uint8Array(3 * MIB))).toString("base64");
        const params = { name: "weigh", arguments: { text } };
        const body = JSON.stringify({ jsonrpc: "2.0", id: 1, method: "tools/call", params });
        const answer = await stream(tenant, id, { body: new Blob([body]).stream() });
        expect([answer.status, answer.text]).toEqual([200, Bun.SHA256.hash(body, "hex")]);
        expect(await tenant.detail(idOf(answer))).toMatchObject({ req_size: body.length, mcp_tool: "weigh" });
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

    test("a connection is used again after a streamed answer, and closed for its silence then", async () => {
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
