// What was paid is served: a call that is paid for and waits for its caller is let past the agent's places, its rate,
// the policy and a suspension when that caller comes back; and whoever comes back for a call that was given up is
// told so.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { type Answer, contract, expectError, type Tenant } from "../contract/contract.ts";
import { eventually, PRICING, pay, settleBy, writeCaFile } from "../contract/priced.ts";
import { collected, type FacilitatorStandIn, startFacilitatorStandIn } from "../support/chain/facilitator-stand-in.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const caFile = writeCaFile();

contract(
  (at) => {
    let facilitator: FacilitatorStandIn;
    beforeAll(() => {
      facilitator = startFacilitatorStandIn();
    });
    afterAll(() => facilitator?.stop());

    /** A streamed call that is paid for and has not been made, of an agent whose first other call is held. */
    async function openKept() {
      const tenant = at.tenant();
      await settleBy(tenant, facilitator.url);
      const busy = Promise.withResolvers<void>();
      const route = at.upstream(async ({ body }) => {
        if (new TextDecoder().decode(body).includes("busy")) await busy.promise;
        return Response.json({ hello: "world" });
      });
      const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
      const stream = (json: object, headers: Record<string, string>) =>
        tenant.send("POST", `/v1/proxy/${id}/stream`, { json, headers });
      const { headers, authorization } = await pay();
      facilitator.answer(authorization.nonce, () => new Response("away", { status: 500 }));
      const invocation = (await stream({ n: 1 }, headers)).headers.get("x-service-invocation-id") ?? "";
      facilitator.answer(authorization.nonce, collected);
      await eventually(
        () => tenant.detail(invocation),
        ({ settlement }) => settlement.status === "settled",
      );
      const comeBack = () => stream({ n: 1 }, headers);
      return { tenant, id, invocation, route, stream, comeBack, release: busy.resolve };
    }
    type Kept = Awaited<ReturnType<typeof openKept>>;

    async function expectServed({ tenant, invocation, comeBack }: Kept): Promise<void> {
      const answer: Answer = await comeBack();
      expect([answer.status, answer.headers.get("x-service-invocation-id")]).toEqual([200, invocation]);
      expect(await tenant.detail(invocation)).toMatchObject({
        status: "succeeded",
        settlement: { status: "settled" },
      });
    }

    test.concurrent("a call that was paid for is served though all places of the agent are taken", async () => {
      const kept = await openKept();
      const { headers } = await pay();
      const other = kept.stream({ busy: true }, headers);
      await kept.route.arrival();
      try {
        await expectServed(kept);
      } finally {
        kept.release();
        await other;
      }
    });

    const changes: [string, (tenant: Tenant, id: string) => Promise<unknown>][] = [
      ["the agent is suspended", (tenant, id) => tenant.patch(id, { suspended: true })],
      ["the policy denies it by now", (tenant) => denyAll(tenant)],
      ["the agent is dearer by now", (tenant, id) => tenant.patch(id, { pricing: { ...PRICING, amount: "5000" } })],
    ];
    for (const [what, change] of changes) {
      test.concurrent(`a call that was paid for is served though ${what}`, async () => {
        const kept = await openKept();
        await change(kept.tenant, kept.id);
        // Whoever has not paid for its call before is held to it.
        const { headers } = await pay();
        expect((await kept.stream({ n: 2 }, headers)).status).toBeOneOf([402, 403, 422]);
        await expectServed(kept);
        expect(kept.route.seen.length).toBe(1);
      });
    }

    test.concurrent("a call that was paid for is served though the agent's rate is used up", async () => {
      const kept = await openKept();
      await kept.tenant.patch(kept.id, { invocation_rate_limit: 0.001, invocation_burst: 1 });
      const [first, second] = [await pay(), await pay()];
      expect((await kept.stream({ n: 2 }, first.headers)).status).toBe(200);
      expectError(await kept.stream({ n: 2 }, second.headers), 429);
      await expectServed(kept);
    });

    test.concurrent("a call that was paid for and cancelled is told to be given up, and not to have been made", async () => {
      const { tenant, id, invocation, route, comeBack } = await openKept();
      const cancelled = await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`);
      expect(cancelled.body.error_class).toBe("cancelled");
      const answer = await comeBack();
      expectError(answer, 409);
      expect(answer.headers.get("x-service-invocation-id")).toBe(invocation);
      expect(answer.body.error).not.toContain("made already");
      expect(route.seen.length).toBe(0);
    });
  },
  { TOLLGATE_CA_FILE: caFile, TOLLGATE_SETTLE_WAIT_MS: "2000", TOLLGATE_AGENT_CONCURRENCY: "1" },
);

async function denyAll(tenant: Tenant): Promise<void> {
  const json = { default: "deny", on_error: "deny", rules: [] };
  const { status, text } = await tenant.send("PUT", "/v1/policy", { json });
  expect([status, text]).toEqual([200, expect.any(String)]);
}
