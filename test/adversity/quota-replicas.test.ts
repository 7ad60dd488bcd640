// Two gateways on one Postgres database, and one last place.

import { expect, test } from "bun:test";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { newMasterKey } from "../support/keys.ts";
import { startPostgres } from "../support/stores/postgres.ts";

const MAX = 4;
const AT_ONCE = 20;
const ROUNDS = 5;

test("of many at once at two replicas, as many are made as the quota has places", async () => {
  const env = {
    DATABASE_URL: await (await startPostgres()).freshDatabase(),
    TOLLGATE_MASTER_KEY: newMasterKey(),
    TOLLGATE_AGENTS_MAX: String(MAX),
    TOLLGATE_CREDENTIALS_MAX: String(MAX),
  };
  await using first = await startGateway({ env });
  await using second = await startGateway({ env });
  const create = async (gateway: Gateway, tenant: string, path: string, fields: object) => {
    const headers = {
      authorization: `Bearer ${await gateway.token({ tenant, user: "ada" })}`,
      "content-type": "application/json",
    };
    const body = JSON.stringify({ name: crypto.randomUUID(), ...fields });
    return (await fetch(`${gateway.url}${path}`, { method: "POST", headers, body })).status;
  };
  const kinds = {
    "/v1/agents": { tags: ["one", "two"] },
    "/v1/credentials": { auth_type: "bearer", source: "vault", vault_ref: "a/b" },
  };
  for (let round = 0; round < ROUNDS; round++) {
    for (const [path, fields] of Object.entries(kinds)) {
      const statuses = await Promise.all(
        Array.from({ length: AT_ONCE }, (_, i) =>
          create(i % 2 === 0 ? first : second, `tenant ${round}`, path, fields),
        ),
      );
      expect([path, statuses.sort()]).toEqual([path, [...Array(MAX).fill(201), ...Array(AT_ONCE - MAX).fill(429)]]);
    }
  }
}, 120_000);
