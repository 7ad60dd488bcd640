// The schema's versions: numbered SQL per database, embedded in the binary, applied in order and recorded in
// schema_migrations. All that is pending is applied in one transaction, so a database is never between two.
import type { Database } from "bun:sqlite";
import type { SQL } from "bun";
import postgres0001 from "../../db/postgres/0001_initial.sql" with { type: "text" };
import postgres0002 from "../../db/postgres/0002_payments.sql" with { type: "text" };
import postgres0003 from "../../db/postgres/0003_policy.sql" with { type: "text" };
import postgres0004 from "../../db/postgres/0004_receipts.sql" with { type: "text" };
import postgres0005 from "../../db/postgres/0005_claims.sql" with { type: "text" };
import postgres0006 from "../../db/postgres/0006_facilitator_accounts.sql" with { type: "text" };
import postgres0007 from "../../db/postgres/0007_agent_lists.sql" with { type: "text" };
import postgres0008 from "../../db/postgres/0008_credential_hosts.sql" with { type: "text" };
import postgres0009 from "../../db/postgres/0009_shared_transactions.sql" with { type: "text" };
import postgres0010 from "../../db/postgres/0010_locks.sql" with { type: "text" };
import postgres0011 from "../../db/postgres/0011_open_invocations.sql" with { type: "text" };
import sqlite0001 from "../../db/sqlite/0001_initial.sql" with { type: "text" };
import sqlite0002 from "../../db/sqlite/0002_payments.sql" with { type: "text" };
import sqlite0003 from "../../db/sqlite/0003_policy.sql" with { type: "text" };
import sqlite0004 from "../../db/sqlite/0004_receipts.sql" with { type: "text" };
import sqlite0005 from "../../db/sqlite/0005_claims.sql" with { type: "text" };
import sqlite0006 from "../../db/sqlite/0006_facilitator_accounts.sql" with { type: "text" };
import sqlite0007 from "../../db/sqlite/0007_agent_lists.sql" with { type: "text" };
import sqlite0008 from "../../db/sqlite/0008_credential_hosts.sql" with { type: "text" };
import sqlite0009 from "../../db/sqlite/0009_shared_transactions.sql" with { type: "text" };
import sqlite0010 from "../../db/sqlite/0010_locks.sql" with { type: "text" };
import sqlite0011 from "../../db/sqlite/0011_open_invocations.sql" with { type: "text" };
import type { Clock } from "../core/clock.ts";
import { StartupProblem } from "../core/startup.ts";
import { sqlState } from "./failures.ts";

/** Version n stands at index n − 1. */
const SQLITE_MIGRATIONS: readonly string[] = [
  sqlite0001,
  sqlite0002,
  sqlite0003,
  sqlite0004,
  sqlite0005,
  sqlite0006,
  sqlite0007,
  sqlite0008,
  sqlite0009,
  sqlite0010,
  sqlite0011,
];
const POSTGRES_MIGRATIONS: readonly string[] = [
  postgres0001,
  postgres0002,
  postgres0003,
  postgres0004,
  postgres0005,
  postgres0006,
  postgres0007,
  postgres0008,
  postgres0009,
  postgres0010,
  postgres0011,
];

const VERSIONS_TABLE = `create table if not exists schema_migrations (
  version integer not null primary key,
  applied_at bigint not null
)`;
const NEWEST = "select coalesce(max(version), 0) as newest from schema_migrations";

interface Migration {
  readonly version: number;
  readonly sql: string;
}

/** @throws StartupProblem when the database was written by a newer program. */
function pending(newest: number, migrations: readonly string[]): Migration[] {
  if (newest > migrations.length) {
    throw new StartupProblem(
      `the database has schema version ${newest}, and this program knows versions up to ${migrations.length}: ` +
        "start a newer tollgate, or restore a backup",
    );
  }
  return migrations.slice(newest).map((sql, index) => ({ version: newest + index + 1, sql }));
}

/** Applies what is missing. Another process that opens the same file waits for the end of it. */
export function migrateSqlite(connection: Database, clock: Clock): void {
  const apply = connection.transaction(() => {
    connection.run(VERSIONS_TABLE);
    const { newest } = connection.prepare<{ newest: number }, []>(NEWEST).get() ?? { newest: 0 };
    for (const { version, sql } of pending(newest, SQLITE_MIGRATIONS)) {
      connection.run(sql);
      connection.run("insert into schema_migrations (version, applied_at) values (?, ?)", [version, clock.now()]);
    }
  });
  apply.immediate();
}

/** Another replica may be at a long migration. */
const MIGRATION_LOCK_WAIT = "5min";
/**
 * How often the server checks that its client is still there. Without this, the statement of a killed client would run to
 * its end and hold the locks that the next one waits for.
 */
const STILL_THERE_EVERY = "1s";

/** No version, but the row that whoever migrates holds. */
const LOCK_ROW = "insert into schema_migrations (version, applied_at) values (0, 0) on conflict do nothing";
const TAKE_LOCK = "update schema_migrations set applied_at = applied_at where version = 0";
/** Two that make one table at once: one of them is told so in one of these ways, and finds the table the next time. */
const MADE_MEANWHILE = /^(23505|42P07)$/;
const MAKING_MAX = 5;

/**
 * A transaction that may take long, as one that is killed with its program. It is read committed, whatever the database's
 * default: who has waited for the lock must see what the one before has done.
 */
async function patiently(client: SQL, work: (tx: SQL) => Promise<void>): Promise<void> {
  await client.begin("isolation level read committed", async (tx) => {
    await tx.unsafe(`set local statement_timeout = 0; set local lock_timeout = '${MIGRATION_LOCK_WAIT}'`);
    // Servers before version 14, and those on some systems, can't check. They just go without.
    const look = (part: SQL) => part.unsafe(`set local client_connection_check_interval = '${STILL_THERE_EVERY}'`);
    await tx.savepoint(look).catch(() => {});
    await work(tx);
  });
}

async function makeLockRow(client: SQL): Promise<void> {
  for (let tries = 1; ; tries += 1) {
    try {
      await patiently(client, async (tx) => {
        await tx.unsafe(VERSIONS_TABLE);
        await tx.unsafe(LOCK_ROW);
      });
      return;
    } catch (error) {
      if (tries === MAKING_MAX || !MADE_MEANWHILE.test(sqlState(error) ?? "")) throw error;
    }
  }
}

/** Applies what is missing. Replicas that start at once queue on a row; the first one does the work. */
export async function migratePostgres(client: SQL, clock: Clock): Promise<void> {
  await makeLockRow(client);
  await patiently(client, async (tx) => {
    await tx.unsafe(TAKE_LOCK);
    const rows: { newest: number }[] = await tx.unsafe(NEWEST);
    for (const { version, sql } of pending(rows[0]?.newest ?? 0, POSTGRES_MIGRATIONS)) {
      await tx.unsafe(sql);
      await tx.unsafe("insert into schema_migrations (version, applied_at) values ($1, $2)", [version, clock.now()]);
    }
  });
}
