// How the databases find the payment that is changed, and the facilitators of the open ones. The plan that a connection to
// Postgres makes of a statement stays, so it must be right from the first payment on, before anything has been measured.
import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { rmSync } from "node:fs";
import { join } from "node:path";
import { drizzle } from "drizzle-orm/bun-sqlite";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { missingPostgres, startPostgres } from "../../../test/support/stores/postgres.ts";
import { places, postgresPlace, sqlitePlace } from "../../../test/support/stores/stores.ts";
import { SCHEMA_VERSIONS, type SchemaVersion } from "../../storage/migrate.ts";
import { BEGIN_READ, BEGIN_WRITE, postgresClient, postgresQueries } from "../../storage/postgres/pool.ts";
import type { Reader, Store, Tx } from "../../storage/store.ts";
import { agentsOfCredential } from "../agents/service.ts";
import { settlementsOfCredential } from "./config.ts";
import {
  closeIfUnsent,
  confirmingOf,
  dueOf,
  facilitatorsWithOpen,
  lease,
  makeDue,
  markSending,
  type OpenPayment,
  type PaymentRow,
  paidCallsOfCredential,
  postpone,
  tenantsWithOpen,
} from "./store.ts";

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

const OF = { tenant: "acme", credentialId: "cred_1" };

/** A payment of its own. */
const payment = (facilitator_url: string, more: Partial<PaymentRow> = {}): PaymentRow => {
  const own = crypto.randomUUID();
  return { ...OPEN, nonce: `0x${own}`, invocation_id: own, facilitator_url, ...more };
};

/** The statement that finds what is looked for first, as the product writes it. */
async function lookedFor(look: (reader: Reader) => Promise<unknown>): Promise<[string, unknown[]]> {
  const asked: [string, unknown[]][] = [];
  const db = postgresQueries(async (text, values) => {
    asked.push([text, values]);
    return [];
  });
  await look({ db, tables: defineSchema(columns.postgres) } as unknown as Reader);
  const [first] = asked;
  if (first === undefined) throw new Error("nothing was asked");
  return first;
}

test.each(Object.entries(places))(
  "on %s the facilitators of open payments are listed in pages, each once",
  async (_, make) => {
    const place = await make();
    const store = await place.open();
    const rows = [
      ...["https://b", "https://a", "https://c", "https://b", "https://a"].map((url) => payment(url)),
      payment("https://0", { facilitator_credential_ref: "cred_2" }),
      payment("https://0", { tenant: "rival" }),
      payment("https://0", { final_at: 9 }),
      payment("https://0", { next_attempt_at: null, settle_request: null }),
    ];
    await store.write(({ db, tables: { payments: t } }) => db.insert(t).values(rows));
    const page = async (after: string) =>
      (await settlementsOfCredential(store.read, OF, after, 2)).map(({ id, url }) => [id, url]);
    expect(await page("")).toEqual([
      ["https://a", "https://a"],
      ["https://b", "https://b"],
    ]);
    expect(await page("https://b")).toEqual([["https://c", "https://c"]]);
    await store.close();
    place.remove();
  },
);

/** An address of the greatest length, of characters that a database stores in three bytes each. */
const LONG_URL = `https://example.com/${Array.from({ length: 2_028 }, (_, n) => String.fromCodePoint(0x4e00 + ((n * 7_919) % 20_000))).join("")}`;

test.each(Object.entries(places))(
  "on %s a payment to a facilitator with a long address neither stops the upgrade nor is refused",
  async (name, make) => {
    const place = await make();
    await (await place.open()).close();
    if (name === "postgres") await place.execute("drop schema public cascade; create schema public");
    else rmSync(join((place as ReturnType<typeof sqlitePlace>).dir, "tollgate.db"));
    const versions = SCHEMA_VERSIONS as SchemaVersion[];
    const newer = versions.splice(3);
    const tenant = "\u{10000}".repeat(128);
    const open = payment(LONG_URL, { tenant });
    const insert = (store: Store, row: PaymentRow) =>
      store.write(({ db, tables: { payments: t } }) => db.insert(t).values(row));
    try {
      const old = await place.open();
      await insert(old, open);
      await old.close();
    } finally {
      versions.push(...newer);
    }
    const store = await place.open();
    await insert(store, payment(LONG_URL, { tenant }));
    await insert(store, payment("https://other.example", { tenant }));
    const page = (after: string) => settlementsOfCredential(store.read, { ...OF, tenant }, after, 1);
    const [first] = await page("");
    expect(first?.url).toBe(LONG_URL);
    expect((await page(first?.id ?? "")).map(({ url }) => url)).toEqual(["https://other.example"]);
    await store.close();
    place.remove();
  },
);

/** How SQLite finds what is looked for: each step of each statement, as the product writes them. */
async function sqliteSteps(looks: readonly ((reader: Reader) => Promise<unknown>)[]): Promise<string[]> {
  const place = sqlitePlace();
  await (await place.open()).close();
  const database = new Database(join(place.dir, "tollgate.db"));
  const asked: string[] = [];
  const db = drizzle(database, { logger: { logQuery: (text) => void asked.push(text) } });
  for (const look of looks) await look({ db, tables: defineSchema(columns.sqlite) } as unknown as Reader);
  const steps = asked.flatMap((text) => database.query<{ detail: string }, []>(`explain query plan ${text}`).all());
  database.close();
  place.remove();
  return steps.map(({ detail }) => detail);
}

test("on SQLite the uses of a credential are found by seeks, in their order", async () => {
  const uses = [settlementsOfCredential, agentsOfCredential, paidCallsOfCredential];
  expect(await sqliteSteps(uses.map((use) => (reader) => use(reader, OF, "", 1)))).toEqual([
    "SEARCH payments USING INDEX payments_credential (tenant=? AND facilitator_credential_ref=? AND <expr>>?)",
    "SEARCH agents USING INDEX agents_live_credential (tenant=? AND credential_ref=? AND id>?)",
    "SEARCH payments USING COVERING INDEX payments_call_credential (tenant=? AND call_credential_ref=? AND invocation_id>?)",
    "SEARCH open_invocations USING INDEX sqlite_autoindex_open_invocations_1 (id=?) LEFT-JOIN",
  ]);
});

test("on SQLite a request for receipts reads the payments that await their confirmation, and no others", async () => {
  const [first] = await sqliteSteps([(reader) => confirmingOf(reader, "acme", null, 64)]);
  expect(first).toBe("SEARCH payments USING INDEX payments_confirming (tenant=? AND invocation_id>?)");
});

const AT = { tenant: "acme", facilitator: "https://5" };
const nextTenant = (reader: Reader) => tenantsWithOpen(reader, "aaa").next();
const nextFacilitator = (reader: Reader) => facilitatorsWithOpen(reader, "acme", "https://4", 1);
const due = (reader: Reader) => dueOf(reader, AT, 20_000, 32);
const farOff = (reader: Reader) => makeDue({ read: reader } as Store, 5, 30_000, AT);

test("on SQLite a settler finds tenants, their facilitators and what is due there by seeks", async () => {
  const seek = (condition: string) => `SEARCH payments USING INDEX payments_due (${condition})`;
  const [tenant, , facilitator, , ...payments] = await sqliteSteps([nextTenant, nextFacilitator, due, farOff]);
  expect([tenant, facilitator, ...payments]).toEqual([
    "SEARCH payments USING COVERING INDEX payments_due (tenant>?)",
    seek("tenant=? AND <expr>>?").replace("INDEX", "COVERING INDEX"),
    seek("tenant=? AND <expr>=? AND next_attempt_at>? AND next_attempt_at<?"),
    seek("tenant=? AND <expr>=? AND next_attempt_at>?").replace("INDEX", "COVERING INDEX"),
  ]);
});

/** 20,000 payments, half of them open, which few facilitators collect, and as many agents. */
const MANY = [
  `insert into payments (chain_id, token, payer, nonce, tenant, invocation_id, agent_id, caller, body_sha256,
    authorization_digest, x402_version, valid_before, facilitator_url, facilitator_credential_ref, call_credential_ref,
    settle_request, attempts, next_attempt_at, created_at, updated_at)
  select 1, 't', 'p', n::text, 'acme', n::text, 'a', 'c', 'b', 'd', 1, 1, 'https://' || n % 10, 'cred_1',
    case when n % 100 = 0 then 'cred_1' end, case when n % 2 = 0 then '{}' end, 1, case when n % 2 = 0 then n end, 1, 1
  from generate_series(1, 20000) n`,
  `insert into agents (tenant, id, name, description, metadata, suspended, emit_receipts, capture_body, protocol, created_by,
    created_at, updated_at, rate_revision, credential_ref, deleted_at)
  select 'acme', 'agt_' || n, n::text, '', '{}', false, false, true, 'http', 'ada', 1, 1, 0, 'cred_1',
    case when n % 100 <> 0 then 1 end
  from generate_series(1, 20000) n`,
];

/** What is looked for page by page, the index that leads to a page, and the conditions that it is sought by. */
const LOOKS: Record<string, readonly [(reader: Reader) => Promise<unknown>, string, RegExp]> = {
  "the next facilitator of a credential's open payments": [
    (reader) => settlementsOfCredential(reader, OF, "", 1),
    "payments_credential on payments",
    /tenant = .*facilitator_credential_ref = .*substr\(facilitator_url, 1, 300\) > /,
  ],
  "the paid calls of a credential": [
    (reader) => paidCallsOfCredential(reader, OF, "", 32),
    "payments_call_credential on payments",
    /tenant = .*call_credential_ref = .*invocation_id > /,
  ],
  "the next tenant with open payments": [nextTenant, "payments_due on payments", /tenant > /],
  "the next facilitator of a tenant's open payments": [
    nextFacilitator,
    "payments_due on payments",
    /tenant = .*substr\(facilitator_url, 1, 300\) > /,
  ],
  "the due payments at a facilitator": [
    due,
    "payments_due on payments",
    /tenant = .*substr\(facilitator_url, 1, 300\) = .*next_attempt_at <= /,
  ],
  "the payments at a facilitator that are due in far too long": [
    farOff,
    "payments_due on payments",
    /tenant = .*substr\(facilitator_url, 1, 300\) = .*next_attempt_at > /,
  ],
  "the agents of a credential": [
    (reader) => agentsOfCredential(reader, OF, "", 32),
    "agents_live_credential on agents",
    /tenant = .*credential_ref = .*id > /,
  ],
};

for (const version of [18, 15] as const) {
  const missing = missingPostgres(version);
  const why = missing === null ? "" : `: not tried, since ${missing}`;
  test.skipIf(missing !== null)(
    `what is looked for page by page is sought in its order, on Postgres ${version}${why}`,
    async () => {
      const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
      await (await place.open()).close();
      await using client = postgresClient(place.url);
      const looks = await Promise.all(
        Object.entries(LOOKS).map(async ([what, [look, ...wanted]], n) => {
          const [text, values] = await lookedFor(look);
          await client.unsafe(`prepare asked${n} as ${text}`);
          const given = values.map((value) => (typeof value === "number" ? value : `'${value}'`));
          return [what, `asked${n} (${given})`, ...wanted] as const;
        }),
      );
      const expectSeek = async (when: string) => {
        for (const begin of [
          BEGIN_READ,
          BEGIN_WRITE,
          `${BEGIN_WRITE}; set local plan_cache_mode = force_generic_plan`,
        ]) {
          for (const [what, asked, index, conditions] of looks) {
            await client.unsafe(begin);
            const plan: string[] = (await client.unsafe(`explain (costs off) execute ${asked}`).values()).flat();
            await client.unsafe("rollback");
            const at = plan.findIndex((step) => / Scan using (payments|agents)/.test(step));
            expect([when, what, ...plan.slice(at, at + 2)]).toEqual([
              when,
              what,
              expect.stringMatching(new RegExp(`Index (Only )?Scan using ${index}`)),
              expect.stringMatching(conditions),
            ]);
            expect(plan.filter((step) => /Sort|Scan on (payments|agents)/.test(step))).toEqual([]);
            expect(plan[at + 2] ?? "").not.toMatch(/Filter/);
          }
        }
      };
      await expectSeek("empty");
      await client.unsafe("vacuum analyze");
      for (const statement of MANY) await client.unsafe(statement);
      await expectSeek("full, with the statistics of an empty database");
      await client.unsafe("analyze");
      await expectSeek("full");
    },
  );
}

for (const version of [18, 15] as const) {
  const missing = missingPostgres(version);
  const name = `a request for receipts reads the payments that await their confirmation, and no others, on Postgres ${version}`;
  test.skipIf(missing !== null)(`${name}${missing === null ? "" : `: not tried, since ${missing}`}`, async () => {
    const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
    await (await place.open()).close();
    await using client = postgresClient(place.url);
    const [text, values] = await lookedFor((reader) => confirmingOf(reader, "acme", null, 64));
    await client.unsafe(`prepare asked as ${text}`);
    const given = values.map((value) => (typeof value === "number" ? value : `'${value}'`));
    const expectFew = async () => {
      const plan = await client.unsafe(`explain (costs off) execute asked (${given})`).values();
      expect(plan.join("\n")).toMatch(/Scan (using|on) payments_confirming\b/);
    };
    await expectFew();
    await client.unsafe("vacuum analyze");
    for (const statement of MANY) await client.unsafe(statement);
    await expectFew();
    await client.unsafe("analyze");
    await expectFew();
  });
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
