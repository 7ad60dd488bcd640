// What was paid is served as it was accepted, whatever its agent has become since.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { contract, type Tenant } from "../contract/contract.ts";
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

    const changes: [string, (tenant: Tenant, id: string) => Promise<unknown>][] = [
      [
        "is of another protocol",
        (tenant, id) => tenant.patch(id, { protocol: "mcp", mcp_transport: "streamable_http" }),
      ],
      ["is free", (tenant, id) => tenant.patch(id, { pricing: null })],
      ["has no upstream", (tenant, id) => tenant.patch(id, { upstream_url: null })],
      ["has been deleted", (tenant, id) => tenant.send("DELETE", `/v1/agents/${id}`)],
    ];
    for (const [what, change] of changes) {
      test.concurrent(`a paid streamed call is served though its agent ${what} by now`, async () => {
        const tenant = at.tenant();
        await settleBy(tenant, facilitator.url);
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
        const { headers, authorization } = await pay();
        const send = () => tenant.send("POST", `/v1/proxy/${id}/stream`, { json: { n: 1 }, headers });
        facilitator.answer(authorization.nonce, () => new Response("away", { status: 500 }));
        const invocation = (await send()).headers.get("x-service-invocation-id") ?? "";
        facilitator.answer(authorization.nonce, collected);
        await eventually(
          () => tenant.detail(invocation),
          ({ settlement }) => settlement.status === "settled",
        );
        await change(tenant, id);
        const answer = await send();
        expect([answer.status, answer.headers.get("x-service-invocation-id"), route.seen.length]).toEqual([
          200,
          invocation,
          1,
        ]);
      });
    }
  },
  { TOLLGATE_CA_FILE: caFile, TOLLGATE_SETTLE_WAIT_MS: "2000" },
);
