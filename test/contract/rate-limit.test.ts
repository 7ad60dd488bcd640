// The rate limit of an agent, as its callers see it.
import { describe, expect, test } from "bun:test";
import { type Answer, contract, expectError, type Json } from "./contract.ts";

contract((at) => {
  describe("the rate limit", () => {
    const burst = async (tenant: ReturnType<typeof at.tenant>, id: string, calls: number): Promise<Answer[]> =>
      Promise.all(Array.from({ length: calls }, () => tenant.send("POST", `/v1/proxy/${id}`, { json: {} })));
    const accepted = (answers: Answer[]) => answers.filter(({ status }) => status === 202).length;

    test.each([
      ["nothing set", {}, 40],
      ["only the rate", { invocation_rate_limit: 0.001 }, 20],
      ["both", { invocation_rate_limit: 0.001, invocation_burst: 3 }, 3],
      ["a burst of one", { invocation_rate_limit: 0.001, invocation_burst: 1 }, 1],
    ])("lets a burst through with %s", async (_, fields: Json, allowed) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      await tenant.patch(id, fields);
      const answers = await burst(tenant, id, 40);
      expect(accepted(answers)).toBe(allowed);
      for (const answer of answers.filter(({ status }) => status !== 202)) {
        expectError(answer, 429);
        expect(answer.headers.get("retry-after")).toBe("60");
      }
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(allowed);
    });

    test("lets nothing but the burst through: one call a second after it", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const shown = await tenant.patch(id, { invocation_burst: 2 });
      expect(shown).toMatchObject({ invocation_burst: 2, invocation_rate_limit: null });
      const startedAt = performance.now();
      /** One more than may have been let through by now: on a busy machine a request takes its time. */
      const tooMany = () => 2 + Math.floor((performance.now() - startedAt) / 1_000) + 1;
      const answers = await burst(tenant, id, 4);
      expect(accepted(answers)).toBeWithin(2, tooMany());
      const refused = answers.find(({ status }) => status === 429);
      expect(refused?.headers.get("retry-after")).toBe("1");
      await Bun.sleep(1050);
      const later = await burst(tenant, id, 2);
      expect(accepted(later)).toBeGreaterThan(0);
      expect(accepted([...answers, ...later])).toBeWithin(3, tooMany());
    });

    test("says the whole seconds until the next token in Retry-After, rounded up", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      for (const [rate, seconds] of [
        [5, "1"],
        [0.35, "3"],
        [0.1, "10"],
        [1 / 61, "60"],
      ] as const) {
        await tenant.patch(id, { invocation_rate_limit: rate, invocation_burst: 1 });
        const refused = (await burst(tenant, id, 5)).find(({ status }) => status === 429);
        expect([rate, refused?.headers.get("retry-after")]).toEqual([rate, seconds]);
      }
    });

    test("has a full bucket after a PATCH of its fields, and not after another PATCH", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const fields = { invocation_rate_limit: 0.001, invocation_burst: 2 };
      await tenant.patch(id, fields);
      expect(accepted(await burst(tenant, id, 3))).toBe(2);
      await tenant.patch(id, { description: "x" });
      expect(accepted(await burst(tenant, id, 1))).toBe(0);
      await tenant.patch(id, fields);
      expect(accepted(await burst(tenant, id, 3))).toBe(2);
      await tenant.patch(id, { invocation_burst: 4 });
      expect(accepted(await burst(tenant, id, 5))).toBe(4);
      await tenant.patch(id, { invocation_rate_limit: null, invocation_burst: null });
      expect(accepted(await burst(tenant, id, 30))).toBe(30);
    });

    test("is of each agent alone", async () => {
      const tenant = at.tenant();
      const { url: upstream_url } = at.upstream();
      const [a, b] = [await tenant.agent({ upstream_url }), await tenant.agent({ upstream_url })];
      for (const { id } of [a, b]) await tenant.patch(id, { invocation_rate_limit: 0.01, invocation_burst: 1 });
      expect(accepted(await burst(tenant, a.id, 2))).toBe(1);
      expect(accepted(await burst(tenant, b.id, 2))).toBe(1);
    });
  });
});
