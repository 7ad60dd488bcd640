import { describe, expect, test } from "bun:test";
import { fresh, openCatalog, PRICING, UPSTREAM_URL } from "../../../test/support/stores/catalog.ts";
import { startPostgres } from "../../../test/support/stores/postgres.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { postgresClient } from "../../storage/postgres/pool.ts";
import { findAgent, type InvocableAgent } from "./store.ts";

const databases = {
  sqlite: async () => null,
  postgres: async () => (await startPostgres()).freshDatabase(),
};

/** How many transactions of clients have ended in the database so far. */
async function transactions(url: string): Promise<number> {
  await using client = postgresClient(url);
  await client.unsafe("select pg_stat_force_next_flush()");
  const [row] = await client.unsafe("select xact_commit from pg_stat_database where datname = current_database()");
  return Number(row.xact_commit);
}

for (const [name, database] of Object.entries(databases)) {
  describe(`agents that are looked up together, on ${name}`, () => {
    test("each is its own tenant's, as it is stored, and those that are not there are null", async () => {
      await using catalog = await openCatalog(await database());
      const { send, store } = catalog;
      const fields = { upstream_url: UPSTREAM_URL, capture_body: false, emit_receipts: true, pricing: PRICING };
      const ids: string[] = [];
      for (const tenant of ["acme", "rival"]) {
        ids.push((await send("POST", "/v1/agents", fresh(fields), tenant)).body.id);
      }
      const [own = "", other = ""] = ids;
      const rate = { invocation_rate_limit: 0.5, invocation_burst: 3, suspended: true };
      await send("PATCH", `/v1/agents/${own}`, rate);
      const asked = [own, other, own, "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f", "agt_none"];
      const found = await Promise.all(asked.map((id) => findAgent(store, "acme", id)));
      const stored: InvocableAgent = {
        id: own,
        upstream_url: UPSTREAM_URL,
        credential_ref: null,
        ...rate,
        rate_revision: 1,
        emit_receipts: true,
        capture_body: false,
        protocol: "http",
        mcp_protocol_version: null,
        pricing: found[0]?.pricing ?? "none",
        deleted_at: null,
      };
      expect(found).toEqual([stored, null, stored, null, null]);
      expect(JSON.parse(stored.pricing ?? "")).toMatchObject({ amount: PRICING.amount });
      expect(await findAgent(store, "rival", other)).toMatchObject({ id: other, suspended: false });
    });
  });
}

test("a thousand agents that are looked up at once take few transactions", async () => {
  const url = await databases.postgres();
  await using catalog = await openCatalog(url);
  const agent = await catalog.send("POST", "/v1/agents", fresh());
  const store = await (await postgresPlace(url)).open();
  const before = await transactions(url);
  const found = await Promise.all(Array.from({ length: 1000 }, () => findAgent(store, "acme", agent.body.id)));
  expect(new Set(found.map((each) => each?.id))).toEqual(new Set([agent.body.id]));
  // What a connection has counted is there when it has ended.
  await store.close();
  expect((await transactions(url)) - before).toBeLessThan(50);
});
