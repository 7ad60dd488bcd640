import { expect, test } from "bun:test";
import type { Outbound } from "../../http/client/outbound.ts";
import { createFacilitatorClient } from "./facilitator-client.ts";

test("a payment is sent to the facilitator for its tenant, whose connections it uses", async () => {
  const tenants: (string | undefined)[] = [];
  const outbound: Outbound = {
    async request(_, { tenant }) {
      tenants.push(tenant);
      return Response.json({});
    },
  };
  const openSecret = async () => ({ secret: "no bundle", header: () => null });
  const client = createFacilitatorClient({ outbound, timeoutMs: 5_000, openSecret });
  const attempt = {
    facilitator_url: "http://facilitator.test",
    facilitator_credential_ref: "cred_1",
    settle_request: "{}",
    expected: { payer: "0x1", amount: 1n } as const,
    span: null,
    mayLeave: async () => true,
  };
  for (const tenant of ["acme", "rival"]) {
    await client.settle({ ...attempt, tenant }, new AbortController().signal);
  }
  expect(tenants).toEqual(["acme", "rival"]);
});
