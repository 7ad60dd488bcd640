// The proxy call from acceptance to its end: the answer, the order of checks, poll, waiting and cancelling.
import { describe, expect, test } from "bun:test";
import {
  contract,
  DETAIL,
  expectError,
  expectRequestId,
  expectShape,
  MCP,
  POLL,
  POLL_WITH_BODY,
  PRICING,
  responseText,
  type Sending,
  UNKNOWN_AGENT,
  UNKNOWN_INVOCATION,
} from "./contract.ts";

const LONG_MODEL = { "x-service-model": "m".repeat(257) };
const BAD_KEY = { "idempotency-key": "not visible: \t" };
const RPC = { jsonrpc: "2.0", id: 1, method: "tools/list" };

/** A body that says by its length that it is too large, and of which nothing is sent. */
const TOO_LARGE = new Uint8Array(32 * 1024 * 1024 + 1);

contract((at) => {
  /** An upstream that answers when it is told to. */
  function gated() {
    const gate = Promise.withResolvers<void>();
    const route = at.upstream(async () => {
      await gate.promise;
      return new Response("late");
    });
    return { ...route, open: gate.resolve };
  }

  describe("an accepted call", () => {
    test("answers 202 at once with the ID in body, header and Location", async () => {
      const tenant = at.tenant();
      const slow = gated();
      const { id } = await tenant.agent({ upstream_url: slow.url });
      const answer = await tenant.send("POST", `/v1/proxy/${id}`, { json: {} });
      expect(answer.status).toBe(202);
      expectShape(answer.body, { invocation_id: POLL["invocation_id"]! });
      const { invocation_id } = answer.body;
      expect(answer.headers.get("x-service-invocation-id")).toBe(invocation_id);
      expect(answer.headers.get("location")).toBe(`/v1/proxy/${id}/invocations/${invocation_id}`);
      expect(answer.headers.get("content-type")).toBe("application/json");
      expect(answer.headers.has("x-payment-response")).toBe(false);
      expectRequestId(answer);
      slow.open();
      await tenant.ended(id, invocation_id);
    });

    test("is answered, refused and recorded alike however its path is written", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream(() => new Response("ok")).url });
      const sendings: Sending[] = [
        { json: {}, headers: { "x-service-model": "m" } },
        { json: {}, headers: LONG_MODEL },
        { json: {}, headers: BAD_KEY },
        { body: TOO_LARGE },
      ];
      /** With what is another each time replaced. */
      const shown = async (path: string, sending: Sending) => {
        const { status, headers, body } = await tenant.send("POST", path, sending);
        const text = JSON.stringify([status, [...headers.keys()].sort(), headers.get("location"), body]);
        return text.replaceAll(/inv_[0-9a-f-]+/g, "inv_…");
      };
      for (const sending of sendings) {
        for (const agent of [id, UNKNOWN_AGENT]) {
          const plain = await shown(`/v1/proxy/${agent}`, sending);
          for (const written of [`${agent}?a=/../b`, `%61${agent.slice(1)}`, agent.replaceAll("-", "%2d")]) {
            expect(await shown(`/v1/proxy/${written}`, sending)).toBe(plain);
          }
        }
      }
      const { data } = (await tenant.send("GET", "/v1/invocations")).body;
      expect(data.map((call: { agent_id: string; model: string }) => [call.agent_id, call.model])).toEqual(
        Array(4).fill([id, "m"]),
      );
    });

    test("is polled as running with explicit nulls, then as succeeded with its result", async () => {
      const tenant = at.tenant();
      const slow = gated();
      const { id } = await tenant.agent({ upstream_url: slow.url });
      const invocation = await tenant.call(id);
      await slow.arrival();
      const running = await tenant.poll(id, invocation);
      expectShape(running, POLL);
      expect(running).toEqual({
        invocation_id: invocation,
        agent_id: id,
        status: "running",
        error_class: null,
        error_detail: null,
        created_at: running.created_at,
        updated_at: running.updated_at,
        completed_at: null,
        upstream_status: null,
        latency_ms: null,
        mcp_method: null,
        mcp_tool: null,
        payment_network: null,
        payment_asset: null,
        payment_amount: null,
        payment_payer: null,
        payment_nonce: null,
        settlement: null,
        response_content_type: null,
        response_truncated: false,
      });
      const meanwhile = await tenant.detail(invocation);
      expect(meanwhile).toMatchObject({
        status: "running",
        completed_at: null,
        resp_size: null,
        req_size: 2,
      });
      slow.open();
      const ended = await tenant.ended(id, invocation);
      expectShape(ended, POLL_WITH_BODY);
      expect(ended).toMatchObject({ status: "succeeded", error_class: null, upstream_status: 200 });
      expect(responseText(ended)).toBe("late");
      const [created, completed, updated] = [ended.created_at, ended.completed_at, ended.updated_at].map((text) =>
        Date.parse(text),
      );
      expect(completed).toBeGreaterThanOrEqual(created!);
      expect(updated).toBe(completed!);
      expect(ended.created_at).toBe(running.created_at);
    });

    test("shows the same in the detail view, in its own shape", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream(() => new Response("four")).url });
      const headers = { "x-service-model": " gpt-x ünï " };
      const invocation = await tenant.call(id, { body: "a request", headers: { ...headers } });
      const poll = await tenant.ended(id, invocation);
      const { status, body } = await tenant.send("GET", `/v1/invocations/${invocation}`);
      expect(status).toBe(200);
      expectShape(body, DETAIL);
      expect(body).toEqual({
        id: invocation,
        agent_id: id,
        mode: "transactional",
        status: "succeeded",
        error_class: null,
        error_detail: null,
        model: "gpt-x ünï",
        mcp_method: null,
        mcp_tool: null,
        payment_network: null,
        payment_asset: null,
        payment_amount: null,
        payment_payer: null,
        payment_nonce: null,
        upstream_status: 200,
        latency_ms: poll.latency_ms,
        ttft_ms: null,
        req_size: 9,
        resp_size: 4,
        created_at: poll.created_at,
        completed_at: poll.completed_at,
        body_captured: true,
      });
    });

    test("takes any media type, and none", async () => {
      const tenant = at.tenant();
      const echo = at.upstream(
        ({ body, headers }) =>
          new Response(body.slice(), {
            headers: { "content-type": headers.get("content-type") ?? "none/none" },
          }),
      );
      const { id } = await tenant.agent({ upstream_url: echo.url });
      const sent: Sending[] = [
        { body: "plain", headers: { "content-type": "text/plain; charset=utf-8" } },
        { body: Uint8Array.of(0, 255, 128, 13, 10), headers: { "content-type": "application/x-any" } },
        { body: "{not json", headers: { "content-type": "application/json" } },
        { body: Uint8Array.of(1, 2, 3) },
        {},
      ];
      for (const sending of sent) {
        const view = await tenant.invoke(id, sending);
        expect(view).toMatchObject({ status: "succeeded" });
        expect(Buffer.from(view.response_body_b64, "base64").equals(Buffer.from((sending.body as string) ?? ""))).toBe(
          true,
        );
        expect(view.response_content_type).toBe(sending.headers?.["content-type"] ?? "none/none");
      }
    });
  });

  describe("X-Service-Model", () => {
    test.each([
      ["m".repeat(256), "m".repeat(256)],
      ["é".repeat(128), "é".repeat(128)],
      ["", null],
    ])("may be %s", async (model, shown) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const bytes = Buffer.from(model).toString("latin1");
      const invocation = await tenant.call(id, { json: {}, headers: { "x-service-model": bytes } });
      expect((await tenant.detail(invocation)).model).toBe(shown);
      await tenant.ended(id, invocation);
    });

    test.each(["m".repeat(257), "é".repeat(129)])("is refused when it is of over 256 bytes", async (model) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent();
      const headers = { "x-service-model": Buffer.from(model).toString("latin1") };
      expectError(await tenant.send("POST", `/v1/proxy/${id}`, { json: {}, headers }), 400, "X-Service-Model");
    });
  });

  describe("an agent that cannot be called", () => {
    test.each([
      [
        "inactive",
        async (tenant: ReturnType<typeof at.tenant>, id: string) => tenant.send("DELETE", `/v1/agents/${id}`),
      ],
      ["suspended", async (tenant: ReturnType<typeof at.tenant>, id: string) => tenant.patch(id, { suspended: true })],
      ["pending", async (tenant: ReturnType<typeof at.tenant>, id: string) => tenant.patch(id, { upstream_url: null })],
    ])("is 422 to its caller, and leaves no invocation: %s", async (_, change) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent();
      await change(tenant, id);
      expectError(await tenant.send("POST", `/v1/proxy/${id}`, { json: {} }), 422);
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
    });

    test("is callable again when it is no longer suspended", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      await tenant.patch(id, { suspended: true });
      expectError(await tenant.send("POST", `/v1/proxy/${id}`, { json: {} }), 422);
      await tenant.patch(id, { suspended: false });
      expect(await tenant.invoke(id)).toMatchObject({ status: "succeeded" });
    });
  });

  describe("the order of checks", () => {
    const post = (tenant: ReturnType<typeof at.tenant>, id: string, sending: Sending) =>
      tenant.send("POST", `/v1/proxy/${id}`, sending);

    test("has the token before the agent", async () => {
      const response = await fetch(`${at.gateway.url}/v1/proxy/${UNKNOWN_AGENT}`, { method: "POST" });
      expect(response.status).toBe(401);
    });

    test("has the agent before model and body", async () => {
      const tenant = at.tenant();
      expectError(await post(tenant, UNKNOWN_AGENT, { json: {}, headers: LONG_MODEL }), 404);
      expectError(await post(tenant, UNKNOWN_AGENT, { body: TOO_LARGE }), 404);
    });

    test("has an invocable agent before the rate", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      await tenant.patch(id, { invocation_rate_limit: 0.01, invocation_burst: 1 });
      await tenant.call(id);
      expectError(await post(tenant, id, { json: {} }), 429);
      // Suspending is no patch of the rate fields, so the bucket stays empty.
      await tenant.patch(id, { suspended: true });
      expectError(await post(tenant, id, { json: {} }), 422);
      await tenant.patch(id, { suspended: false });
      expectError(await post(tenant, id, { json: {} }), 429);
    });

    test("has the rate before the model, the model before the body, the body before the form", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: at.upstream().url });
      expectError(await post(tenant, id, { body: TOO_LARGE, headers: LONG_MODEL }), 400, "X-Service-Model");
      expectError(await post(tenant, id, { body: TOO_LARGE }), 413);
      await tenant.patch(id, { invocation_rate_limit: 0.01, invocation_burst: 1 });
      // A call takes its token even if a later check refuses it.
      expectError(await post(tenant, id, { json: RPC, headers: LONG_MODEL }), 400, "X-Service-Model");
      expectError(await post(tenant, id, { json: RPC, headers: LONG_MODEL }), 429);
    });

    test("has the form before the idempotency key, that before the payment", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: at.upstream().url, pricing: PRICING });
      expectError(await post(tenant, id, { body: "[]", headers: BAD_KEY }), 400, "body");
      expectError(await post(tenant, id, { json: RPC, headers: BAD_KEY }), 400, "Idempotency-Key");
      const unpaid = await post(tenant, id, { json: RPC });
      expect(unpaid.status).toBe(402);
      expect(unpaid.body.error).toBeString();
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
    });

    test("has the form before the payment", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...MCP, upstream_url: at.upstream().url, pricing: PRICING });
      expectError(await post(tenant, id, { body: "{}" }), 400, "body");
    });
  });

  describe("a priced agent", () => {
    test("answers 402 and calls nobody; price 0 is free, flat or per tool", async () => {
      const tenant = at.tenant();
      const route = at.upstream(() => Response.json({ jsonrpc: "2.0", id: 1, result: {} }));
      const http = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
      const answer = await tenant.send("POST", `/v1/proxy/${http.id}`, { json: {} });
      expect([answer.status, answer.body.error]).toEqual([402, expect.any(String)]);
      expect(answer.body.accepts).toHaveLength(1);
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
      expect(route.seen).toEqual([]);

      await tenant.patch(http.id, { pricing: { ...PRICING, amount: "0" } });
      expect(await tenant.invoke(http.id)).toMatchObject({ status: "succeeded", payment_amount: null });
      await tenant.patch(http.id, { pricing: null });
      expect(await tenant.invoke(http.id)).toMatchObject({ status: "succeeded" });

      const tools = { free: "0" };
      const mcp = await tenant.agent({ ...MCP, upstream_url: route.url, pricing: { ...PRICING, tools } });
      const call = (name: string) => ({ ...RPC, method: "tools/call", params: { name, arguments: {} } });
      expect((await tenant.send("POST", `/v1/proxy/${mcp.id}`, { json: call("paid") })).status).toBe(402);
      expect(await tenant.invoke(mcp.id, { json: call("free") })).toMatchObject({ mcp_tool: "free" });
    });
  });

  describe("a caller that waits", () => {
    test("gets 202 for the call at once, after the call has ended with Prefer: wait", async () => {
      const tenant = at.tenant();
      const slow = gated();
      const { id } = await tenant.agent({ upstream_url: slow.url });
      let answered = false;
      const waiting = tenant.send("POST", `/v1/proxy/${id}`, { json: {}, headers: { prefer: "wait=20" } });
      void waiting.then(() => {
        answered = true;
      });
      await slow.arrival();
      await tenant.send("GET", "/v1/agents");
      expect(answered).toBe(false);
      slow.open();
      const { status, body } = await waiting;
      expect(status).toBe(202);
      expect(await tenant.poll(id, body.invocation_id)).toMatchObject({ status: "succeeded" });
    });

    test("gets a poll answered with the end, or after its time with what there is", async () => {
      const tenant = at.tenant();
      const slow = gated();
      const { id } = await tenant.agent({ upstream_url: slow.url });
      const invocation = await tenant.call(id);
      await slow.arrival();
      const poll = (prefer: string) =>
        tenant.send("GET", `/v1/proxy/${id}/invocations/${invocation}`, { headers: { prefer } });
      const startedAt = performance.now();
      expect((await poll("respond-async, wait=1")).body.status).toBe("running");
      expect(performance.now() - startedAt).toBeWithin(950, 10_000);
      for (const prefer of ["wait=0", "wait=-1", "wait=x", "wait"]) {
        // If it waits, it waits each time; a busy machine holds up one or the other.
        const took: number[] = [];
        for (let time = 0; time < 3; time++) {
          const before = performance.now();
          expect((await poll(prefer)).body.status).toBe("running");
          took.push(performance.now() - before);
        }
        expect(Math.min(...took)).toBeLessThan(900);
      }
      const waiting = poll("wait=9999");
      slow.open();
      expect((await waiting).body).toMatchObject({ status: "succeeded" });
      expect((await poll("wait=60")).body).toMatchObject({ status: "succeeded" });
    });
  });

  describe("cancelling a call", () => {
    test("ends one that runs: failed, cancelled; the upstream is let go; 409 afterwards", async () => {
      const tenant = at.tenant();
      const slow = gated();
      const { id } = await tenant.agent({ upstream_url: slow.url });
      const invocation = await tenant.call(id);
      const { signal } = await slow.arrival();
      const gone = new Promise((resolve) => signal.addEventListener("abort", resolve));
      const path = `/v1/proxy/${id}/invocations/${invocation}`;
      const waiting = tenant.send("GET", path, { headers: { prefer: "wait=20" } });
      const answer = await tenant.send("POST", `${path}/cancel`);
      expect(answer.status).toBe(200);
      expectShape(answer.body, POLL);
      expect(answer.body).toMatchObject({
        status: "failed",
        error_class: "cancelled",
        upstream_status: null,
        completed_at: expect.any(String),
      });
      await gone;
      expect((await waiting).body).toEqual(answer.body);
      slow.open();
      expectError(await tenant.send("POST", `${path}/cancel`), 409);
      expect(await tenant.poll(id, invocation)).toEqual(answer.body);
    });

    test("is 409 for one that has ended, which stays as it ended", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const invocation = await tenant.call(id);
      const ended = await tenant.ended(id, invocation);
      expectError(await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`), 409);
      expect(await tenant.poll(id, invocation)).toEqual(ended);
    });
  });

  describe("polling and cancelling", () => {
    test("is 404 for an unknown or malformed ID, and for another agent's call", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const other = await tenant.agent();
      const invocation = await tenant.call(id);
      await tenant.ended(id, invocation);
      for (const [agent, call] of [
        [id, UNKNOWN_INVOCATION],
        [id, "inv_x"],
        [id, "x"],
        [id, "%00"],
        [other.id, invocation],
        [UNKNOWN_AGENT, invocation],
        ["x", invocation],
      ]) {
        const path = `/v1/proxy/${agent}/invocations/${call}`;
        expectError(await tenant.send("GET", path), 404);
        expectError(await tenant.send("GET", path, { headers: { prefer: "wait=20" } }), 404);
        expectError(await tenant.send("POST", `${path}/cancel`), 404);
      }
      for (const call of [UNKNOWN_INVOCATION, "inv_x", "x", "%00", id]) {
        expectError(await tenant.send("GET", `/v1/invocations/${call}`), 404);
      }
    });

    test("a deleted agent's calls can still be read", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const invocation = await tenant.call(id);
      const ended = await tenant.ended(id, invocation);
      await tenant.send("DELETE", `/v1/agents/${id}`);
      expect(await tenant.poll(id, invocation)).toEqual(ended);
    });
  });
});
