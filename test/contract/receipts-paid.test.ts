// The receipts of paid calls: what was paid, and what became of it. A receipt comes only when that is final.
import { afterAll, beforeAll, expect, test } from "bun:test";
import {
  collected,
  type FacilitatorStandIn,
  notCollected,
  startFacilitatorStandIn,
} from "../support/chain/facilitator-stand-in.ts";
import { until } from "../support/until.ts";
import { contract, expectError, type Json, type Tenant } from "./contract.ts";
import { PRICING, pay, settleBy, writeCaFile } from "./priced.ts";

const caFile = writeCaFile();

contract(
  (at) => {
    let facilitator: FacilitatorStandIn;
    beforeAll(() => {
      facilitator = startFacilitatorStandIn();
    });
    afterAll(() => facilitator?.stop());

    async function open(facilitatorUrl: string | null = facilitator.url) {
      const tenant = at.tenant();
      if (facilitatorUrl !== null) await settleBy(tenant, facilitatorUrl);
      const route = at.upstream(() => new Response("no", { status: 500 }));
      const good = await tenant.agent({
        upstream_url: at.upstream().url,
        pricing: PRICING,
        emit_receipts: true,
      });
      const bad = await tenant.agent({ upstream_url: route.url, pricing: PRICING, emit_receipts: true });
      return { tenant, good: good.id as string, bad: bad.id as string };
    }
    const find = (tenant: Tenant, id: string) => tenant.send("GET", `/v1/invocations/${id}/receipt`);
    async function claimsOf(tenant: Tenant, id: string): Promise<Json> {
      const { status, body } = await find(tenant, id);
      expect(status).toBe(200);
      return JSON.parse(Buffer.from(body.receipt.split(".")[1], "base64url").toString());
    }
    const paymentOf = ({ authorization }: Awaited<ReturnType<typeof pay>>) => ({
      network: "base",
      asset: "USDC",
      amount: "1000",
      payer: authorization.from.toLowerCase(),
      nonce: authorization.nonce.toLowerCase(),
    });

    test("a paid call that was collected has a receipt that says so, whether it went well or not", async () => {
      const { tenant, good, bad } = await open();
      for (const [agent, status] of [
        [good, "settled"],
        [bad, "settled_upstream_failed"],
      ] as const) {
        const payment = await pay();
        const view = await tenant.invoke(agent, { json: {}, headers: payment.headers });
        const claims = await claimsOf(tenant, view.invocation_id);
        expect(claims.payment).toEqual(paymentOf(payment));
        expect(claims.settlement).toEqual(view.settlement);
        expect(claims.settlement).toMatchObject({ status, settled_amount: "1000", attempts: 1 });
      }
    });

    test("a call that was declined and not made has a receipt too", async () => {
      const { tenant, good } = await open();
      const payment = await pay();
      facilitator.answer(payment.authorization.nonce, () => notCollected());
      expectError(await tenant.send("POST", `/v1/proxy/${good}`, { json: {}, headers: payment.headers }), 402);
      const [{ id }] = (await tenant.send("GET", "/v1/invocations")).body.data;
      expect(await claimsOf(tenant, id)).toMatchObject({
        status: "failed",
        error_class: null,
        upstream_status: null,
        latency_ms: null,
        resp_sha256: null,
        payment: paymentOf(payment),
        settlement: { status: "settlement_failed", reason: "declined", attempts: 1 },
      });
    });

    test("a cancelled call has no receipt before its payment has landed", async () => {
      const { tenant, good } = await open();
      const payment = await pay();
      const { nonce } = payment.authorization;
      const landed = Promise.withResolvers<void>();
      let attempts = 0;
      facilitator.answer(nonce, async (call) => {
        attempts += 1;
        if (attempts === 1) return new Response("away", { status: 503 });
        await landed.promise;
        return collected(call);
      });
      const id = await tenant.call(good, { json: {}, headers: payment.headers });
      await facilitator.arrival(nonce, 2);
      const cancelled = await tenant.send("POST", `/v1/proxy/${good}/invocations/${id}/cancel`);
      expect(cancelled.body).toMatchObject({ status: "failed", settlement: { status: "pending" } });
      expectError(await find(tenant, id), 404);
      expect((await tenant.send("GET", "/v1/receipts")).text).toBe("");
      landed.resolve();
      await until(async () => (await find(tenant, id)).status === 200);
      expect(await claimsOf(tenant, id)).toMatchObject({
        error_class: "cancelled",
        settlement: { status: "settled_upstream_failed", attempts: 2 },
      });
    });

    test("a call whose payment was only verified has a receipt without a settlement", async () => {
      const { tenant, good } = await open(null);
      const payment = await pay();
      const view = await tenant.invoke(good, { json: {}, headers: payment.headers });
      const claims = await claimsOf(tenant, view.invocation_id);
      expect([claims.payment, claims.settlement]).toEqual([paymentOf(payment), null]);
    });
  },
  { TOLLGATE_CA_FILE: caFile, TOLLGATE_SETTLE_WAIT_MS: "1500" },
);
