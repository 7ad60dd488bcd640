// The schema's versions: numbered SQL per database, embedded in the binary, applied in order and recorded in
// schema_migrations. All that is pending is applied in one transaction, so a database is never between two.
// In one file, since most of it is the list.
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
import postgres0012 from "../../db/postgres/0012_periods.sql" with { type: "text" };
import postgres0013 from "../../db/postgres/0013_totals_log.sql" with { type: "text" };
import postgres0014 from "../../db/postgres/0014_body_parts.sql" with { type: "text" };
import postgres0015 from "../../db/postgres/0015_body_rows.sql" with { type: "text" };
import postgres0016 from "../../db/postgres/0016_open_batches.sql" with { type: "text" };
import postgres0017 from "../../db/postgres/0017_open_rows.sql" with { type: "text" };
import postgres0018 from "../../db/postgres/0018_key_rotation.sql" with { type: "text" };
import postgres0019 from "../../db/postgres/0019_shared_rates.sql" with { type: "text" };
import postgres0020 from "../../db/postgres/0020_shared_limits.sql" with { type: "text" };
import postgres0021 from "../../db/postgres/0021_wallet_leases.sql" with { type: "text" };
import postgres0022 from "../../db/postgres/0022_restoration.sql" with { type: "text" };
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
import sqlite0012 from "../../db/sqlite/0012_periods.sql" with { type: "text" };
import sqlite0013 from "../../db/sqlite/0013_totals_log.sql" with { type: "text" };
import sqlite0014 from "../../db/sqlite/0014_body_parts.sql" with { type: "text" };
import sqlite0015 from "../../db/sqlite/0015_body_rows.sql" with { type: "text" };
import sqlite0016 from "../../db/sqlite/0016_open_batches.sql" with { type: "text" };
import sqlite0017 from "../../db/sqlite/0017_open_rows.sql" with { type: "text" };
import sqlite0018 from "../../db/sqlite/0018_key_rotation.sql" with { type: "text" };
import sqlite0019 from "../../db/sqlite/0019_shared_rates.sql" with { type: "text" };
import sqlite0020 from "../../db/sqlite/0020_shared_limits.sql" with { type: "text" };
import sqlite0021 from "../../db/sqlite/0021_wallet_leases.sql" with { type: "text" };
import sqlite0022 from "../../db/sqlite/0022_restoration.sql" with { type: "text" };
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
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
  sqlite0012,
  sqlite0013,
  sqlite0014,
  sqlite0015,
  sqlite0016,
  sqlite0017,
  sqlite0018,
  sqlite0019,
  sqlite0020,
  sqlite0021,
  sqlite0022,
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
  postgres0012,
  postgres0013,
  postgres0014,
  postgres0015,
  postgres0016,
  postgres0017,
  postgres0018,
  postgres0019,
  postgres0020,
  postgres0021,
  postgres0022,
];

export const NEWEST_SQLITE_VERSION = SQLITE_MIGRATIONS.length;
export const NEWEST_POSTGRES_VERSION = POSTGRES_MIGRATIONS.length;

const VERSIONS_TABLE = `create table if not exists schema_migrations (
  version integer not null primary key,
  applied_at bigint not null
)`;
const NEWEST = "select coalesce(max(version), 0) as newest from schema_migrations";

interface Migration {
  readonly version: number;
  readonly sql: string;
}

/** What a version does to the rows that are there, where that can take long. */
interface Work {
  /** Gives the rows that it moves, and the bytes that it writes anew with them. It must not read the history itself. */
  readonly query: string;
  /** As measured on two busy cores, with every commit on the disk. */
  readonly msPerRow: number;
  readonly msPerByte: number;
}

/** Those of the last 24 hours. */
const KEYS = `select count(*) as "rows", 0 as bytes from idempotency_keys`;

/**
 * By version. On SQLite the large bodies of open calls are written anew where they are, since their call goes from beside
 * them; the statistics that come with the schema let it find the open calls along an index.
 */
const SQLITE_WORK: Readonly<Record<number, Work>> = {
  11: {
    query: `select count(*) as "rows", coalesce(sum(case when req_size > 8192 then req_size end), 0) as bytes
      from invocations where status in ('pending', 'running')`,
    msPerRow: 0.06,
    msPerByte: 1.7e-5,
  },
  12: { query: KEYS, msPerRow: 0.025, msPerByte: 0 },
  14: {
    query: `select count(*) as "rows", coalesce(sum(req_size), 0) as bytes from open_invocations where request is null`,
    msPerRow: 0.06,
    msPerByte: 1.7e-5,
  },
  15: {
    query: `select count(*) as "rows", coalesce(sum(length(bytes)), 0) as bytes from body_parts`,
    msPerRow: 0.06,
    msPerByte: 1.7e-5,
  },
  16: { query: `select count(*) as "rows", 0 as bytes from open_invocations`, msPerRow: 0.005, msPerByte: 0 },
};
const POSTGRES_WORK: Readonly<Record<number, Work>> = {
  11: {
    query: `select coalesce(sum(count), 0) as "rows", 0 as bytes
      from invocation_counts where dimension = 'status' and value in ('pending', 'running')`,
    msPerRow: 0.11,
    msPerByte: 0,
  },
  12: { query: KEYS, msPerRow: 0.035, msPerByte: 0 },
  14: {
    query: `select count(*) as "rows", coalesce(sum(req_size), 0) as bytes from open_invocations where request is null`,
    msPerRow: 0.11,
    msPerByte: 1.7e-5,
  },
};

/** What takes no longer is not announced. */
const MOMENT_MS = 100;

interface WorkSize {
  readonly rows: number | string;
  readonly bytes: number | string;
}

/** Tells of long work before it begins, and of its end once that is committed. */
function announcer(log: Log) {
  let startedAt = 0;
  const announced: number[] = [];
  return {
    begins(version: number, { msPerRow, msPerByte }: Work, size: WorkSize | undefined): void {
      const [rows, bytes] = [Number(size?.rows), Number(size?.bytes)];
      const estimated_ms = Math.round(rows * msPerRow + bytes * msPerByte);
      if (!(estimated_ms > MOMENT_MS)) return;
      if (announced.push(version) === 1) startedAt = performance.now();
      log.info("migration_started", { version, rows, estimated_ms });
    },
    committed(): void {
      if (announced.length === 0) return;
      const duration_ms = Math.round(performance.now() - startedAt);
      log.info("migration_ended", { versions: announced, duration_ms });
    },
  };
}

interface MigrationTools {
  readonly clock: Clock;
  readonly log: Log;
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
export function migrateSqlite(connection: Database, { clock, log }: MigrationTools): void {
  const announce = announcer(log);
  const apply = connection.transaction(() => {
    connection.run(VERSIONS_TABLE);
    const { newest } = connection.prepare<{ newest: number }, []>(NEWEST).get() ?? { newest: 0 };
    for (const { version, sql } of pending(newest, SQLITE_MIGRATIONS)) {
      const work = SQLITE_WORK[version];
      if (work !== undefined) announce.begins(version, work, sizeOnSqlite(connection, work));
      connection.run(sql);
      connection.run("insert into schema_migrations (version, applied_at) values (?, ?)", [version, clock.now()]);
    }
  });
  apply.immediate();
  announce.committed();
}

function sizeOnSqlite(connection: Database, { query }: Work): WorkSize | undefined {
  // A statement that is not done with would keep tables from being changed.
  using statement = connection.prepare<WorkSize, []>(query);
  return statement.get() ?? undefined;
}

/** Another replica may be at a long migration, and a backup may be reading the tables. */
const WAIT_MINUTES = 5;
const MIGRATION_LOCK_WAIT = `${WAIT_MINUTES}min`;
/** While it waits for a table whoever comes after it waits too, so it gives up soon, undoes all, and tries again. */
const TABLE_LOCK_WAIT = "500ms";
const TABLE_PAUSE_MS = 1_000;
/** A lock that was not had in time, and two that wait for each other. */
const HELD_UP = /^(55P03|40P01)$/;
/**
 * How often the server checks that its client is still there. Without this, the statement of a killed client would run to
 * its end and hold the locks that the next one waits for.
 */
const STILL_THERE_EVERY = "1s";

/** No version, but the row that whoever migrates holds. */
const LOCK_ROW = "insert into schema_migrations (version, applied_at) values (0, 0) on conflict do nothing";
const TAKE_LOCK = "update schema_migrations set applied_at = applied_at where version = 0";
/** Two that make one table at once: one of them is told so in one of these ways, and finds the table the next time. */
const MADE_MEANWHILE = /^(23505|42P07|42710)$/;
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
export async function migratePostgres(client: SQL, tools: MigrationTools): Promise<void> {
  await makeLockRow(client);
  const until = performance.now() + WAIT_MINUTES * 60_000;
  for (;;) {
    try {
      return await applyPending(client, tools);
    } catch (error) {
      if (!HELD_UP.test(sqlState(error) ?? "") || performance.now() > until) throw error;
    }
    await Bun.sleep(TABLE_PAUSE_MS);
  }
}

async function applyPending(client: SQL, { clock, log }: MigrationTools): Promise<void> {
  const announce = announcer(log);
  await patiently(client, async (tx) => {
    await tx.unsafe(TAKE_LOCK);
    await tx.unsafe(`set local lock_timeout = '${TABLE_LOCK_WAIT}'`);
    const rows: { newest: number }[] = await tx.unsafe(NEWEST);
    for (const { version, sql } of pending(rows[0]?.newest ?? 0, POSTGRES_MIGRATIONS)) {
      const work = POSTGRES_WORK[version];
      if (work !== undefined) {
        const [size]: WorkSize[] = await tx.unsafe(work.query);
        announce.begins(version, work, size);
      }
      await tx.unsafe(sql);
      await tx.unsafe("insert into schema_migrations (version, applied_at) values ($1, $2)", [version, clock.now()]);
    }
  });
  announce.committed();
}
