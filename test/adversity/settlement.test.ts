// Payments whose outcome is not known, against a facilitator that is away, in doubt, or late: what never left the
// gateway is never collected, what may have left is never taken for declined, and what is due is asked soon.
import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { type Answer, contract, expectError, type Json, type Tenant } from "../contract/contract.ts";
import { eventually, PRICING, pay, settleBy, writeCaFile } from "../contract/priced.ts";
import { collected, type FacilitatorStandIn, startFacilitatorStandIn } from "../support/chain/facilitator-stand-in.ts";
import { startRelay } from "../support/http/relay.ts";
import { runSql } from "../support/stores/database-faults.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const HOUR_MS = 3_600_000;
/**
 * "Delayed by no more than a few seconds": the pause that is due, and some for a busy machine. What is put off wrongly comes
 * after a minute, or an hour.
 */
const SOON_MS = 30_000;
/** Of what an official client may sign: the time that is asked for, and ten minutes for clocks and retries. */
const WINDOW_SECONDS_MAX = 60 + 600;
const caFile = writeCaFile();

const paths = [
  ["polled", "", 202],
  ["streamed", "/stream", 503],
] as const;
const idOf = (answer: Answer) => answer.headers.get("x-service-invocation-id") ?? "";
const away = () => new Response("away", { status: 502 });

contract(
  (at) => {
    let facilitator: FacilitatorStandIn;
    beforeAll(() => {
      facilitator = startFacilitatorStandIn();
    });
    afterAll(() => facilitator?.stop());

    interface Opening {
      readonly url?: string;
      readonly fields?: object;
      readonly suffix?: string;
    }

    /** A call whose first attempt to settle has left its payment unknown. */
    async function openUnknown({ url = facilitator.url, fields = {}, suffix = "" }: Opening = {}) {
      const tenant = at.tenant();
      await settleBy(tenant, url);
      const route = at.upstream();
      const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING, ...fields });
      const { headers, authorization } = await pay();
      const { nonce } = authorization;
      facilitator.answer(nonce, away);
      const send = () => tenant.send("POST", `/v1/proxy/${id}${suffix}`, { json: { n: 1 }, headers });
      const answer = await send();
      const invocation = idOf(answer);
      const settlement = async () => (await tenant.detail(invocation)).settlement;
      return { tenant, route, id, nonce, answer, invocation, settlement, send };
    }
    const ofPayment = (nonce: string) => `nonce = '${nonce.toLowerCase()}'`;
    /** The authorization is too old to be collected, whatever was signed. */
    const expire = (nonce: string) =>
      runSql(at, `update payments set valid_before = valid_before - 3600 where ${ofPayment(nonce)}`);
    const closed = ({ status }: Json) => status !== "pending";
    const cancel = (tenant: Tenant, id: string, invocation: string) =>
      tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`);

    describe("while nobody listens where the facilitator should be", () => {
      const gone = async (suffix: string) => {
        const relay = startRelay(Number(new URL(facilitator.url).port));
        relay.refuse();
        return { relay, ...(await openUnknown({ url: `https://127.0.0.1:${relay.port}`, suffix })) };
      };

      for (const [name, suffix, status] of paths) {
        test.concurrent(`a cancelled ${name} call is never collected`, async () => {
          const { relay, tenant, route, id, nonce, answer, invocation, settlement } = await gone(suffix);
          try {
            expect(answer.status).toBe(status);
            const cancelled = await cancel(tenant, id, invocation);
            expect([cancelled.status, cancelled.body.error_class]).toEqual([200, "cancelled"]);
            facilitator.answer(nonce, collected);
            relay.restore();
            const { status: end } = await eventually(settlement, closed);
            expect([end, facilitator.of(nonce).length, route.seen.length]).toEqual(["settlement_failed", 0, 0]);
          } finally {
            relay.stop();
          }
        });

        test.concurrent(`a ${name} call ends soon after its authorization`, async () => {
          const { relay, tenant, route, nonce, invocation, settlement } = await gone(suffix);
          try {
            await expire(nonce);
            const until = performance.now() + SOON_MS;
            const end = await eventually(settlement, (view) => closed(view) || performance.now() > until);
            expect(end.status).toBe("settlement_failed");
            expect(await tenant.detail(invocation)).toMatchObject({ status: "failed", error_class: null });
            expect([facilitator.of(nonce).length, route.seen.length]).toEqual([0, 0]);
          } finally {
            relay.stop();
          }
        });
      }
    });

    test.concurrent("a cancelled call is never collected by a facilitator whose name leads nowhere", async () => {
      const { tenant, id, invocation, settlement } = await openUnknown({
        url: "https://facilitator.invalid",
      });
      expect((await cancel(tenant, id, invocation)).status).toBe(200);
      const until = performance.now() + SOON_MS;
      const end = await eventually(settlement, (view) => closed(view) || performance.now() > until);
      expect(end.status).toBe("settlement_failed");
    });

    describe("a payment whose call is cancelled", () => {
      const expectLost = async (nonce: string, settlement: () => Promise<Json>) => {
        facilitator.answer(nonce, collected);
        expect((await eventually(settlement, closed)).status).toBe("settled_upstream_failed");
      };

      test.concurrent("is collected when its first attempt is under way", async () => {
        const tenant = at.tenant();
        await settleBy(tenant, facilitator.url);
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
        const { headers, authorization } = await pay();
        const { nonce } = authorization;
        const held = Promise.withResolvers<void>();
        facilitator.answer(nonce, async (call) => {
          await held.promise;
          return collected(call);
        });
        const sent = tenant.send("POST", `/v1/proxy/${id}`, { json: { n: 1 }, headers });
        await facilitator.arrival(nonce);
        const { body } = await tenant.send("GET", "/v1/invocations");
        const { id: invocation } = body.data[0];
        expect((await cancel(tenant, id, invocation)).status).toBe(200);
        held.resolve();
        await expectLost(nonce, async () => (await tenant.detail(invocation)).settlement);
        await sent;
        expect(route.seen.length).toBe(0);
      });

      test.concurrent("is collected after an attempt that left, and one before that did not", async () => {
        const relay = startRelay(Number(new URL(facilitator.url).port));
        relay.refuse();
        try {
          const url = `https://127.0.0.1:${relay.port}`;
          const { tenant, id, nonce, invocation, settlement } = await openUnknown({ url });
          relay.restore();
          await facilitator.arrival(nonce);
          expect((await cancel(tenant, id, invocation)).status).toBe(200);
          await expectLost(nonce, settlement);
        } finally {
          relay.stop();
        }
      });
    });

    describe("after a settlement attempt whose outcome nobody knows", () => {
      for (const refusal of [400, 403, 429]) {
        test.concurrent(`the answer ${refusal} is no outcome, however late, and what was collected is served`, async () => {
          const { tenant, route, id, nonce, invocation, settlement } = await openUnknown();
          facilitator.answer(nonce, () => new Response("SSL certificate error", { status: refusal }));
          await expire(nonce);
          // One attempt may have begun before; the one after it is as late as it can be.
          const wanted = facilitator.of(nonce).length + 2;
          const view = await eventually(settlement, (now) => closed(now) || facilitator.of(nonce).length >= wanted);
          expect(view.status).toBe("pending");
          facilitator.answer(nonce, collected);
          expect(await eventually(settlement, closed)).toMatchObject({ status: "settled" });
          expect((await tenant.ended(id, invocation)).status).toBe("succeeded");
          expect(route.seen.length).toBe(1);
        });
      }

      test.concurrent("the next attempt is made soon, though a clock that has been set back makes it late", async () => {
        const { nonce } = await openUnknown();
        const seen = facilitator.of(nonce).length;
        await runSql(
          at,
          `update payments set next_attempt_at = next_attempt_at + ${HOUR_MS} where ${ofPayment(nonce)}`,
        );
        const next = await Promise.race([facilitator.arrival(nonce, seen + 1), Bun.sleep(SOON_MS)]);
        expect(next).toBeDefined();
      });

      test.concurrent("the upstream's credential stays as long as the call may be made", async () => {
        const tenant = at.tenant();
        const { id: credential_ref } = await tenant.credential({ plaintext: "upstream-secret-0001" });
        await settleBy(tenant, facilitator.url);
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING, credential_ref });
        const { headers, authorization } = await pay();
        facilitator.answer(authorization.nonce, away);
        const answer = await tenant.send("POST", `/v1/proxy/${id}`, { json: { n: 1 }, headers });
        await tenant.patch(id, { credential_ref: null });
        expectError(await tenant.send("DELETE", `/v1/credentials/${credential_ref}`), 409);
        facilitator.answer(authorization.nonce, collected);
        // Held until the call has ended, its settlement included.
        const view = await eventually(
          () => tenant.poll(id, idOf(answer)),
          ({ status }) => status === "succeeded" || status === "failed",
        );
        expect([view.status, view.settlement.status]).toEqual(["succeeded", "settled"]);
        expect(route.seen[0]?.headers.get("authorization")).toBe("Bearer upstream-secret-0001");
        const gone = await tenant.send("DELETE", `/v1/credentials/${credential_ref}`);
        expect(gone.status).toBe(204);
      });
    });

    describe("an authorization", () => {
      for (const [name, suffix] of paths) {
        test.concurrent(`is refused when it is good for longer than the window: ${name}`, async () => {
          const tenant = at.tenant();
          const route = at.upstream();
          const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
          const send = (headers: Record<string, string>) =>
            tenant.send("POST", `/v1/proxy/${id}${suffix}`, { json: { n: 1 }, headers });
          const now = Math.floor(Date.now() / 1000);
          for (const beyond of [10, 86_400, 2 ** 40]) {
            const payment = await pay({ validBefore: now + WINDOW_SECONDS_MAX + beyond });
            expectError(await send(payment.headers), 402);
            expectError(await send(payment.version2Headers), 402);
          }
          expect(route.seen.length).toBe(0);
          const atTheBound = await pay({ validBefore: now + WINDOW_SECONDS_MAX });
          expect((await send(atTheBound.headers)).status).toBe(suffix === "" ? 202 : 200);
        });
      }
    });
  },
  { TOLLGATE_CA_FILE: caFile, TOLLGATE_SETTLE_WAIT_MS: "2000" },
);
