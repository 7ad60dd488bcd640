// The agent is the one of now: a caller that sends the head of its call and withholds the body keeps neither a price
// nor an access that the agent had when the head came.
import { expect, setDefaultTimeout, test } from "bun:test";
import { contract, type Json, type Tenant } from "../contract/contract.ts";
import { PRICING, pay } from "../contract/priced.ts";
import { connect } from "../contract/wire.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const BODY = JSON.stringify({ n: 1 });
const hasHead = (text: string) => text.includes("\r\n\r\n");

contract((at) => {
  /** Sends all of a paid call but the end of its body. Gives what sends that, and then the status. */
  async function openHalf(tenant: Tenant, path: string) {
    const { header } = await pay();
    const wire = await connect(at.gateway.url);
    const head = [
      `POST ${path} HTTP/1.1`,
      "host: localhost",
      "connection: close",
      `authorization: Bearer ${await tenant.token()}`,
      "content-type: application/json",
      `content-length: ${BODY.length}`,
      `x-payment: ${header}`,
    ];
    await wire.send(`${head.join("\r\n")}\r\n\r\n${BODY.slice(0, 3)}`);
    return async () => {
      await wire.send(BODY.slice(3));
      const text = await wire.received(hasHead);
      wire.close();
      return Number(text.split(" ")[1]);
    };
  }

  const dearer = { pricing: { ...PRICING, amount: "5000" } };
  const changes: [string, number, (tenant: Tenant, id: string) => Promise<Json>][] = [
    ["is dearer", 402, (tenant, id) => tenant.patch(id, dearer)],
    ["is suspended", 422, (tenant, id) => tenant.patch(id, { suspended: true })],
    ["has no URL", 422, (tenant, id) => tenant.patch(id, { upstream_url: null })],
    ["is deleted", 422, (tenant, id) => tenant.send("DELETE", `/v1/agents/${id}`)],
  ];

  for (const [path, suffix] of [
    ["polled", ""],
    ["streamed", "/stream"],
  ] as const) {
    for (const [what, status, change] of changes) {
      test.concurrent(`a ${path} call whose agent ${what} before its body is whole`, async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
        const complete = await openHalf(tenant, `/v1/proxy/${id}${suffix}`);
        // Another call, from its head to its answer, is behind that head.
        expect((await tenant.send("POST", `/v1/proxy/${id}${suffix}`, { json: {} })).status).toBe(402);
        await change(tenant, id);
        expect([await complete(), route.seen.length]).toEqual([status, 0]);
      });
    }

    test.concurrent(`a ${path} call whose agent moves before its body is whole goes to its new place`, async () => {
      const tenant = at.tenant();
      const [before, after] = [at.upstream(), at.upstream()];
      const { id } = await tenant.agent({ upstream_url: before.url, pricing: PRICING });
      const complete = await openHalf(tenant, `/v1/proxy/${id}${suffix}`);
      expect((await tenant.send("POST", `/v1/proxy/${id}${suffix}`, { json: {} })).status).toBe(402);
      await tenant.patch(id, { upstream_url: after.url });
      expect(await complete()).toBe(suffix === "" ? 202 : 200);
      await Promise.race([after.arrival(), before.arrival()]);
      expect([before.seen.length, after.seen.length]).toEqual([0, 1]);
    });
  }
});
