// How many agents and credentials a tenant may have: exactly so many, however they are asked for.
import { expect, test } from "bun:test";
import { type Answer, contract, expectError, type Json, PUBLIC_URL, type Tenant, unique } from "./contract.ts";

const AGENTS_MAX = 5;
const CREDENTIALS_MAX = 3;
const AT_ONCE = 20;

interface Kind {
  readonly path: string;
  readonly max: number;
  /** What the error says that is counted. */
  readonly counted: string;
  fields(): Json;
  total(tenant: Tenant): Promise<number>;
}

const KINDS: readonly Kind[] = [
  {
    path: "/v1/agents",
    max: AGENTS_MAX,
    counted: `${AGENTS_MAX} agents, deleted ones not counted`,
    fields: () => ({ name: unique("agent"), upstream_url: PUBLIC_URL, tags: ["red"] }),
    total: async (tenant) => (await tenant.send("GET", "/v1/agents")).body.total,
  },
  {
    path: "/v1/credentials",
    max: CREDENTIALS_MAX,
    counted: `${CREDENTIALS_MAX} credentials`,
    fields: () => ({
      name: unique("key"),
      auth_type: "bearer",
      source: "managed",
      plaintext: "s3cret-value",
    }),
    total: async (tenant) => (await tenant.send("GET", "/v1/credentials")).body.credentials.length,
  },
];

contract(
  (at) => {
    for (const { path, max, counted, fields, total } of KINDS) {
      const create = (tenant: Tenant, json: Json = fields()) => tenant.send("POST", path, { json });
      const fill = async (tenant: Tenant, count = max) => {
        const made: Json[] = [];
        while (made.length < count) made.push((await create(tenant)).body);
        return made;
      };

      function expectRefused(answer: Answer): void {
        expectError(answer, 429, counted);
        expect(answer.headers.has("retry-after")).toBe(false);
      }

      test(`one more by ${path} than the quota is refused, until one is deleted`, async () => {
        const [tenant, other] = [at.tenant(), at.tenant()];
        const made = await fill(tenant);
        expectRefused(await create(tenant));
        expect(await total(tenant)).toBe(max);
        expect((await create(other)).status).toBe(201);

        const [first] = made;
        expect((await tenant.send("DELETE", `${path}/${first.id}`)).status).toBe(204);
        // A second time it frees nothing.
        await tenant.send("DELETE", `${path}/${first.id}`);
        const again = fields();
        expect((await create(tenant, { ...again, name: first.name })).status).toBe(201);
        expectRefused(await create(tenant));
        expect(await total(tenant)).toBe(max);
      });

      test(`a request to ${path} that is refused for another reason takes no place of the quota`, async () => {
        const tenant = at.tenant();
        const [first] = await fill(tenant, max - 1);
        expectError(await create(tenant, { ...fields(), name: first.name }), 409, "name");
        expectError(await create(tenant, { ...fields(), name: "" }), 400, "name");
        expect((await create(tenant)).status).toBe(201);
        expectRefused(await create(tenant));
        expectError(await create(tenant, { ...fields(), name: 7 }), 400, "name");
      });

      test(`of many requests to ${path} at once for the last place of the quota one is made`, async () => {
        const tenant = at.tenant();
        await fill(tenant, max - 1);
        const answers = await Promise.all(Array.from({ length: AT_ONCE }, () => create(tenant)));
        const made = answers.filter(({ status }) => status === 201);
        expect(made).toHaveLength(1);
        for (const answer of answers) if (answer.status !== 201) expectRefused(answer);
        expect(await total(tenant)).toBe(max);
        // The same when places are given back and taken at once.
        const [{ body }] = made as [Answer];
        const turns = await Promise.all([
          tenant.send("DELETE", `${path}/${body.id}`),
          ...Array.from({ length: AT_ONCE }, () => create(tenant)),
        ]);
        const more = turns.filter(({ status }) => status === 201).length;
        expect(more).toBeLessThanOrEqual(1);
        expect(await total(tenant)).toBe(max - 1 + more);
      });
    }

    test("an agent that is changed keeps its place in the quota, suspended or without a URL too", async () => {
      const tenant = at.tenant();
      const agent = await tenant.agent();
      for (let i = 1; i < AGENTS_MAX; i++) await tenant.agent({ upstream_url: null });
      for (const fields of [{ suspended: true }, { upstream_url: null }, { tags: ["a", "b"] }, { name: "other" }]) {
        await tenant.patch(agent.id, fields);
        expectError(await tenant.send("POST", "/v1/agents", { json: { name: unique("agent") } }), 429);
      }
    });
  },
  {
    TOLLGATE_AGENTS_MAX: String(AGENTS_MAX),
    TOLLGATE_CREDENTIALS_MAX: String(CREDENTIALS_MAX),
  },
);
