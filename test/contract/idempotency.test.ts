// Idempotency keys of polled calls.
import { describe, expect, test } from "bun:test";
import { type Answer, contract, expectError, PRICING, type Sending, unique } from "./contract.ts";

contract((at) => {
  describe("Idempotency-Key", () => {
    const send = (tenant: ReturnType<typeof at.tenant>, id: string, key: string, sending: Sending = { body: "a" }) =>
      tenant.send("POST", `/v1/proxy/${id}`, { ...sending, headers: { "idempotency-key": key } });

    test("leads with the same body to the first invocation, and with another body to 409", async () => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await tenant.agent({ upstream_url: route.url });
      const first = await send(tenant, id, "key");
      expect(first.status).toBe(202);
      const { invocation_id } = first.body;
      await tenant.ended(id, invocation_id);
      const again = await send(tenant, id, "key");
      expect([again.status, again.body]).toEqual([202, first.body]);
      expect(again.headers.get("x-service-invocation-id")).toBe(invocation_id);
      expect(again.headers.get("location")).toBe(first.headers.get("location"));
      expectError(await send(tenant, id, "key", { body: "b" }), 409);
      expectError(await send(tenant, id, "key", {}), 409);
      expect(route.seen.length).toBe(1);
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
    });

    test("is one of its tenant, user and agent", async () => {
      const [tenant, stranger] = [at.tenant(), at.tenant()];
      const { url: upstream_url } = at.upstream();
      const [a, b] = [await tenant.agent({ upstream_url }), await tenant.agent({ upstream_url })];
      const foreign = await stranger.agent({ upstream_url });
      const answers: Answer[] = [
        await send(tenant, a.id, "key"),
        await send(tenant, b.id, "key"),
        await send(tenant, a.id, "key", { body: "a", user: "bob" }),
        await send(tenant, a.id, "KEY"),
        await send(stranger, foreign.id, "key"),
      ];
      expect(new Set(answers.map(({ body }) => body.invocation_id)).size).toBe(5);
    });

    test("has all of several calls at once get one invocation, and the upstream one call", async () => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await tenant.agent({ upstream_url: route.url });
      const answers = await Promise.all(Array.from({ length: 12 }, () => send(tenant, id, "key")));
      const ids = new Set(answers.map(({ status, body }) => `${status} ${body.invocation_id}`));
      expect(ids.size).toBe(1);
      await tenant.ended(id, answers[0]!.body.invocation_id);
      expect(route.seen.length).toBe(1);
    });

    test("has up to 255 visible ASCII characters, and no others", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const visible = Array.from({ length: 94 }, (_, i) => String.fromCharCode(33 + i)).join("");
      for (const key of [visible, "k".repeat(255)]) expect((await send(tenant, id, key)).status).toBe(202);
      for (const key of ["", "k".repeat(256), "two words", "ä", "a\tb"])
        expectError(await send(tenant, id, key), 400, "Idempotency-Key");
    });

    test("goes on to the upstream, and a priced retry needs no second payment check of its own", async () => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await tenant.agent({ upstream_url: route.url });
      const key = unique("key");
      const first = await send(tenant, id, key);
      await tenant.ended(id, first.body.invocation_id);
      expect(route.seen[0]?.headers.get("idempotency-key")).toBe(key);
      await tenant.patch(id, { pricing: PRICING });
      expect((await send(tenant, id, key)).body).toEqual(first.body);
    });
  });
});
