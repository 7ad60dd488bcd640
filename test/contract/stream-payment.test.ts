// Payment on the streaming path, against a stand-in facilitator: settled before the upstream is called, declined for
// good, or unknown, and then taken up by the same payment where it stood, once.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
  collected,
  type FacilitatorStandIn,
  notCollected,
  startFacilitatorStandIn,
} from "../support/chain/facilitator-stand-in.ts";
import { type Answer, contract, expectError, MCP, type Tenant } from "./contract.ts";
import { eventually, PRICING, pay, settleBy, settlementTold, writeCaFile } from "./priced.ts";

const caFile = writeCaFile();

const stream = (tenant: Tenant, id: string, headers: Record<string, string>, json: unknown = { n: 1 }) =>
  tenant.send("POST", `/v1/proxy/${id}/stream`, { json, headers });
const idOf = (answer: Answer) => answer.headers.get("x-service-invocation-id") ?? "";
const away = () => new Response("away", { status: 500 });

contract(
  (at) => {
    let facilitator: FacilitatorStandIn;
    beforeAll(() => {
      facilitator = startFacilitatorStandIn();
    });
    afterAll(() => facilitator?.stop());

    const open = async (fields: object = {}, configured = true) => {
      const tenant = at.tenant();
      if (configured) await settleBy(tenant, facilitator.url);
      const route = at.upstream();
      const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING, ...fields });
      return { tenant, id: String(id), route };
    };
    /** A call whose payment the facilitator leaves unknown until `land` is called. */
    async function openUnknown(more: Record<string, string> = {}) {
      const { tenant, id, route } = await open();
      const payment = await pay();
      const headers = { ...payment.headers, ...more };
      const { nonce } = payment.authorization;
      facilitator.answer(nonce, away);
      const first = await stream(tenant, id, headers);
      expectError(first, 503);
      const land = () => facilitator.answer(nonce, collected);
      const becomes = (wanted: string) =>
        eventually(
          () => settlement(tenant, idOf(first)),
          ({ status }) => status === wanted,
        );
      return { tenant, id, route, headers, first, land, becomes };
    }
    const settlement = async (tenant: Tenant, id: string) => (await tenant.detail(id)).settlement;

    test("a payment is verified without a facilitator, and the answer streamed", async () => {
      const { tenant, id, route } = await open({}, false);
      const payment = await pay();
      const answer = await stream(tenant, id, payment.headers);
      expect([answer.status, answer.headers.get("x-payment-response")]).toEqual([200, null]);
      const row = await tenant.detail(idOf(answer));
      expect(row).toMatchObject({ status: "succeeded", payment_amount: "1000", mode: "streaming" });
      expect(row.settlement).toBeUndefined();
      const again = await stream(tenant, id, payment.headers);
      expectError(again, 409);
      expect(idOf(again)).toBe(idOf(answer));
      expectError(await stream(tenant, id, payment.headers, { n: 2 }), 402);
      expect(route.seen.length).toBe(1);
    });

    test("a payment that is collected is told with the answer, and comes before the upstream", async () => {
      const { tenant, id, route } = await open();
      const payment = await pay();
      let calledBefore = -1;
      facilitator.answer(payment.authorization.nonce, (call) => {
        calledBefore = route.seen.length;
        return collected(call);
      });
      const answer = await stream(tenant, id, payment.headers);
      expect([answer.status, answer.text, calledBefore]).toEqual([200, '{"hello":"world"}', 0]);
      const told = settlementTold(answer);
      expect(told).toMatchObject({ success: true, network: "base" });
      expect(await settlement(tenant, idOf(answer))).toMatchObject({
        status: "settled",
        tx_hash: told.transaction,
        attempts: 1,
      });
      // The same payment does not make the call again, and tells what became of it.
      const again = await stream(tenant, id, payment.headers);
      expectError(again, 409);
      expect([idOf(again), settlementTold(again)]).toEqual([idOf(answer), told]);
      expectError(await tenant.send("POST", `/v1/proxy/${id}`, { json: { n: 1 }, headers: payment.headers }), 409);
      const second = await pay();
      expect(settlementTold(await stream(tenant, id, second.version2Headers), "payment-response").success).toBe(true);
      expect(route.seen.length).toBe(2);
    });

    test("a payment that is declined is 402, with a record, and nobody is called", async () => {
      const { tenant, id, route } = await open();
      const payment = await pay();
      facilitator.answer(payment.authorization.nonce, () => notCollected());
      const answer = await stream(tenant, id, payment.headers);
      expectError(answer, 402);
      expect(await tenant.detail(idOf(answer))).toMatchObject({
        status: "failed",
        error_class: null,
        settlement: { status: "settlement_failed" },
      });
      expectError(await stream(tenant, id, payment.headers), 402);
      expect(route.seen.length).toBe(0);
    });

    test.each(["", "/stream"])(
      "no 402 of a call%s may be kept, and a decline is told in its payment's version",
      async (form) => {
        const { tenant, id, route } = await open();
        const send = async (headers: Record<string, string>) => {
          const answer = await tenant.send("POST", `/v1/proxy/${id}${form}`, { json: { n: 1 }, headers });
          expect([answer.status, answer.headers.get("cache-control")]).toEqual([402, "no-store"]);
          return answer;
        };
        const told = (answer: Answer) =>
          ["payment-response", "x-payment-response"].filter((name) => answer.headers.has(name));
        const { headers: tooLittle } = await pay({ value: 1n });
        for (const refused of [{}, { "x-payment": "garbage" }, tooLittle])
          expect(told(await send(refused))).toEqual([]);
        for (const [version, name, network] of [
          ["headers", "x-payment-response", "base"],
          ["version2Headers", "payment-response", "eip155:8453"],
        ] as const) {
          const payment = await pay();
          const { nonce, from } = payment.authorization;
          facilitator.answer(nonce, () => notCollected());
          // At once, and when the payment comes again.
          for (let n = 0; n < 2; n++) {
            const answer = await send(payment[version]);
            expect(told(answer)).toEqual([name]);
            const declined = { success: false, transaction: "", network, payer: from.toLowerCase() };
            expect(settlementTold(answer, name)).toEqual(declined);
          }
        }
        expect(route.seen).toEqual([]);
      },
    );

    describe("a streamed call whose payment is of unknown outcome", () => {
      test("is 503, and the same payment goes on where it stood", async () => {
        const { tenant, id, route, headers, first, land, becomes } = await openUnknown();
        expect(first.headers.get("retry-after")).toBe("5");
        expect(await tenant.detail(idOf(first))).toMatchObject({
          status: "pending",
          settlement: { status: "pending" },
        });
        const second = await stream(tenant, id, headers);
        expect([second.status, idOf(second)]).toEqual([503, idOf(first)]);
        expect(route.seen.length).toBe(0);
        land();
        await becomes("settled");
        expect((await tenant.detail(idOf(first))).status).toBe("pending");
        const third = await stream(tenant, id, headers);
        expect([third.status, idOf(third)]).toEqual([200, idOf(first)]);
        expect(settlementTold(third).success).toBe(true);
        expect(await tenant.detail(idOf(first))).toMatchObject({
          status: "succeeded",
          settlement: { status: "settled" },
        });
        expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
        expect(route.seen.length).toBe(1);
      });

      test("is made once, however many come back with it", async () => {
        const { tenant, id, route, headers, first, land, becomes } = await openUnknown();
        land();
        await becomes("settled");
        const answers = await Promise.all(Array.from({ length: 10 }, () => stream(tenant, id, headers)));
        expect(answers.map(({ status }) => status).sort()).toEqual([200, ...Array(9).fill(409)]);
        expect(new Set(answers.map(idOf))).toEqual(new Set([idOf(first)]));
        expect(route.seen.length).toBe(1);
      });

      test("is never made by the gateway itself when nobody comes back for it", async () => {
        const { tenant, id, route, first, land, becomes } = await openUnknown();
        land();
        await becomes("settled");
        // Another call of the agent, on the other path, has the dispatcher look for what is pending.
        const other = await pay();
        const accepted = await tenant.send("POST", `/v1/proxy/${id}`, { json: {}, headers: other.headers });
        expect((await tenant.ended(id, accepted.body.invocation_id)).status).toBe("succeeded");
        expect(await tenant.detail(idOf(first))).toMatchObject({ status: "pending", mode: "streaming" });
        expect(route.seen.length).toBe(1);
      });

      test("goes on by its idempotency key, which the other path's callers find taken", async () => {
        const more = { "idempotency-key": "k-1" };
        const { tenant, id, route, headers, land, becomes } = await openUnknown(more);
        expectError(await tenant.send("POST", `/v1/proxy/${id}`, { json: { n: 1 }, headers }), 409);
        land();
        await becomes("settled");
        expect((await stream(tenant, id, headers)).status).toBe(200);
        expect(route.seen.length).toBe(1);
      });

      test("survives a kill, and goes on after the restart", async () => {
        const { tenant, id, route, headers, first, land } = await openUnknown();
        await at.gateway.kill9();
        land();
        await at.gateway.restart();
        const second = await eventually(
          () => stream(tenant, id, headers),
          ({ status }) => status !== 503,
        );
        expect([second.status, idOf(second)]).toEqual([200, idOf(first)]);
        expect(route.seen.length).toBe(1);
      });

      test("can be cancelled, and has then been paid for nothing", async () => {
        const { tenant, id, route, headers, first, land, becomes } = await openUnknown();
        const path = `/v1/proxy/${id}/invocations/${idOf(first)}/cancel`;
        expect((await tenant.send("POST", path)).body.error_class).toBe("cancelled");
        land();
        await becomes("settled_upstream_failed");
        expectError(await stream(tenant, id, headers), 409);
        expect(route.seen.length).toBe(0);
      });
    });

    test("a caller that leaves while its payment is settled can come back for its call", async () => {
      const { tenant, id, route } = await open();
      const payment = await pay();
      const { nonce } = payment.authorization;
      const settled = Promise.withResolvers<void>();
      facilitator.answer(nonce, async (call) => {
        await settled.promise;
        return collected(call);
      });
      const leaving = new AbortController();
      const { signal } = leaving;
      const gone = tenant
        .send("POST", `/v1/proxy/${id}/stream`, { json: { n: 1 }, headers: payment.headers, signal })
        .catch(() => null);
      await facilitator.arrival(nonce);
      leaving.abort();
      await gone;
      await Bun.sleep(100);
      settled.resolve();
      const answer = await stream(tenant, id, payment.headers);
      expect(answer.status).toBe(200);
      expect(route.seen.length).toBe(1);
      expect(await settlement(tenant, idOf(answer))).toMatchObject({ status: "settled" });
    });

    test("a payment is settled and recorded, though the upstream failed", async () => {
      const refuse = at.upstream(() => new Response("no", { status: 500 }));
      for (const [url, status] of [
        [refuse.url, 500],
        ["http://127.0.0.1:1/", 502],
      ] as const) {
        const { tenant, id } = await open({ upstream_url: url });
        const answer = await stream(tenant, id, (await pay()).headers);
        expect(answer.status).toBe(status);
        expect(settlementTold(answer).success).toBe(true);
        expect(await settlement(tenant, idOf(answer))).toMatchObject({ status: "settled_upstream_failed" });
      }
    });

    test("a connection of an mcp agent is free, and a batch costs its sum", async () => {
      const pricing = { ...PRICING, tools: { cheap: "10", free: "0" } };
      const { tenant, id, route } = await open({ ...MCP, pricing }, false);
      const message = (method: string, params?: object) => ({ jsonrpc: "2.0", id: 1, method, params });
      const call = (name: string) => message("tools/call", { name });
      const free = [
        message("initialize"),
        message("ping"),
        message("tools/list"),
        message("resources/templates/list"),
        ...[
          "server/discover",
          "subscriptions/listen",
          "completion/complete",
          "logging/setLevel",
          "resources/subscribe",
        ].map((method) => message(method)),
        ...["tasks/get", "tasks/update", "tasks/cancel", "resources/unsubscribe"].map((method) => message(method)),
        { jsonrpc: "2.0", method: "notifications/initialized" },
        { jsonrpc: "2.0", id: 1, result: {} },
        [message("ping"), { jsonrpc: "2.0", id: 1, error: { code: 1, message: "x" } }],
        call("free"),
      ];
      for (const body of free) {
        expect([body, (await stream(tenant, id, {}, body)).status]).toEqual([body, 200]);
      }
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(free.length);
      const paid: [unknown, string][] = [
        [call("cheap"), "10"],
        [call("other"), "1000"],
        [message("resources/read"), "1000"],
        [{ jsonrpc: "2.0", method: "tools/call", params: { name: "cheap" } }, "10"],
        [message("tasks/result"), "1000"],
        [[call("cheap"), message("ping"), call("other"), call("free"), message("prompts/get")], "2010"],
      ];
      for (const [body, price] of paid) {
        const asked = await stream(tenant, id, {}, body);
        expect([body, asked.status, asked.body.accepts?.[0]?.maxAmountRequired]).toEqual([body, 402, price]);
        const { headers } = await pay({ value: BigInt(price) });
        expect((await stream(tenant, id, headers, body)).status).toBe(200);
      }
      expect(route.seen.length).toBe(free.length + paid.length);
    });
  },
  { TOLLGATE_CA_FILE: caFile, TOLLGATE_SETTLE_WAIT_MS: "2000" },
);
