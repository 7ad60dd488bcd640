// How Postgres finds the payment that is changed. The plan that a connection makes of a statement stays, so it must be
// right from the first payment on, before anything has been measured.
import { expect, test } from "bun:test";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { missingPostgres, startPostgres } from "../../../test/support/stores/postgres.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { postgresClient, postgresQueries } from "../../storage/postgres/pool.ts";
import type { Tx } from "../../storage/store.ts";
import { closeIfUnsent, lease, markSending, type OpenPayment, postpone } from "./store.ts";

const OPEN: OpenPayment = {
  chain_id: 8453,
  token: "0xt",
  payer: "0xp",
  nonce: "0xn",
  tenant: "acme",
  invocation_id: "inv_1",
  agent_id: "agt_1",
  caller: "ada",
  body_sha256: "b",
  authorization_digest: "d",
  x402_version: 1,
  valid_before: 1,
  facilitator_url: "https://example.com",
  facilitator_credential_ref: "cred_1",
  call_credential_ref: null,
  settle_request: "{}",
  attempts: 1,
  unsent_attempts: 0,
  unknown_since: null,
  next_attempt_at: 5,
  final_at: null,
  sent_at: 3,
  asked_ms: 0,
  created_at: 1,
  updated_at: 1,
};

/** The statements of all changes, as the product writes them. */
async function changes(): Promise<[string, unknown[]][]> {
  const asked: [string, unknown[]][] = [];
  const db = postgresQueries(async (text, values) => {
    asked.push([text, values]);
    return [];
  });
  const tx = { db, tables: defineSchema(columns.postgres) } as unknown as Tx;
  await lease(tx, OPEN, 6, 7);
  await postpone(tx, OPEN, { at: 9, now: 8, outcome: "unknown" });
  await markSending(tx, OPEN, 8);
  await closeIfUnsent(tx, { tenant: OPEN.tenant, id: OPEN.invocation_id }, 8);
  return asked;
}

for (const version of [18, 15] as const) {
  const missing = missingPostgres(version);
  const name = `an open payment is changed by its key from the first on, on Postgres ${version}`;
  test.skipIf(missing !== null)(`${name}${missing === null ? "" : `: not tried, since ${missing}`}`, async () => {
    const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
    await (await place.open()).close();
    await using client = postgresClient(place.url);
    for (const [text, values] of await changes()) {
      for (const mode of ["force_generic_plan", "force_custom_plan"]) {
        await client.unsafe(`set plan_cache_mode = ${mode}`);
        await client.unsafe(`prepare asked as ${text}`);
        const given = values.map((value) =>
          typeof value === "number" ? value : value === null ? "null" : `'${value}'`,
        );
        const plan = (await client.unsafe(`explain (costs off) execute asked (${given})`).values()).join("\n");
        await client.unsafe("deallocate asked");
        expect(plan).toMatch(/Index Scan using payments_(invocation|pkey) on payments/);
      }
    }
  });
}
