// The rows of the first version, as they are after the migration that gives accounts several certificates.
import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { SQL } from "bun";
import { startPostgres } from "../../test/support/stores/postgres.ts";
import { clock } from "../../test/support/stores/stores.ts";
import { silentLog } from "../core/log.ts";
import { accountOf, listAccounts } from "../facilitator/accounts.ts";
import { usedOn } from "../facilitator/payments/daily-limits.ts";
import { claimedPayment, findPayment, markSent, recordFailed } from "../facilitator/payments/payments.ts";
import { openStore } from "./open.ts";
import type { Store } from "./store.ts";

const OLDER = /^000[1-4]_/;
const [ALICE, BOB] = ["a".repeat(64), "b".repeat(64)];
const PAYER = `0x${"c".repeat(40)}` as const;
const TOKEN = `0x${"d".repeat(40)}` as const;
const NONCE = `0x${"e".repeat(64)}` as const;

function statements(dialect: "sqlite" | "postgres"): string[] {
  const dir = join(import.meta.dir, "../../db", dialect);
  const files = readdirSync(dir).filter((name) => OLDER.test(name));
  const [yes, no] = dialect === "sqlite" ? ["1", "0"] : ["true", "false"];
  return [
    "create table schema_migrations (version integer not null primary key, applied_at bigint not null)",
    ...files.sort().map((name) => readFileSync(join(dir, name), "utf8")),
    "insert into schema_migrations values (1, 1), (2, 1), (3, 1), (4, 1)",
    `insert into facilitator_accounts
       (name, fingerprint, enabled, max_per_transaction, daily_ceiling, created_at, updated_at)
     values ('alice', '${ALICE}', ${yes}, null, '7', 1, 2), ('bob', '${BOB}', ${no}, '9', null, 3, 4)`,
    "insert into facilitator_days (account, day, reserved) values ('alice', '2025-11-21', '1000')",
    `insert into facilitator_payments (chain_id, token, payer, nonce, account, status, pay_to, value, valid_after,
       valid_before, signature, requirements, day, attempts, created_at, updated_at)
     values (8453, '${TOKEN}', '${PAYER}', '${NONCE}', 'alice', 'claimed', '${PAYER}', '1000', '0', '9', '0xab', '{}',
       '2025-11-21', 1, 5, 5)`,
  ];
}

async function check(store: Store): Promise<void> {
  expect(await listAccounts(store.read)).toEqual([
    {
      name: "alice",
      enabled: true,
      max_per_transaction: null,
      daily_ceiling: "7",
      created_at: 1,
      updated_at: 2,
      fingerprints: [ALICE],
    },
    {
      name: "bob",
      enabled: false,
      max_per_transaction: "9",
      daily_ceiling: null,
      created_at: 3,
      updated_at: 4,
      fingerprints: [BOB],
    },
  ]);
  expect(await accountOf(store.read, ALICE)).toMatchObject({ name: "alice", dailyCeiling: 7n });
  expect(await accountOf(store.read, BOB)).toBeNull();
  const day = { account: "alice", day: "2025-11-21" };
  expect(await usedOn(store.read, day)).toEqual({ reserved: 1_000n, gasBurned: 0n, gasUsed: 0n });
  const key = { chain_id: 8453, token: TOKEN, payer: PAYER, nonce: NONCE };
  const row = await findPayment(store.read, key);
  if (row === null) throw new Error("the payment is gone");
  // What the last version had claimed is sent by this one, and ends as any other.
  expect(await store.write((tx) => markSent(tx, claimedPayment(row), NONCE, 6))).toBe(true);
  const failure = { reason: "expired", foreign_transaction: null, gas_burned: null };
  expect(await store.write((tx) => recordFailed(tx, key, failure, { was: "sent", day: day.day, now: 7 }))).toBe(true);
  expect(await usedOn(store.read, day)).toEqual({ reserved: 0n, gasBurned: 0n, gasUsed: 0n });
}

test("on SQLite accounts, payments and days of the first version are as they were", async () => {
  const dataDir = mkdtempSync(join(tmpdir(), "tollgate-migrate-"));
  const database = new Database(join(dataDir, "tollgate.db"));
  for (const statement of statements("sqlite")) database.run(statement);
  database.close();
  const store = await openStore({ databaseUrl: null, dataDir, log: silentLog, clock });
  await check(store);
  await store.close();
  rmSync(dataDir, { recursive: true });
});

test("on Postgres accounts, payments and days of the first version are as they were", async () => {
  const databaseUrl = await (await startPostgres()).freshDatabase();
  const client = new SQL(databaseUrl, { max: 1 });
  for (const statement of statements("postgres")) await client.unsafe(statement);
  await client.close();
  const store = await openStore({ databaseUrl, dataDir: "/nowhere", log: silentLog, clock });
  await check(store);
  await store.close();
}, 30_000);
