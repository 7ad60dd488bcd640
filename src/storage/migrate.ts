// Brings a schema up to date: its versions (schema-versions.ts) are applied in order and recorded in schema_migrations. All
// that is pending is applied in one transaction, so a database is never between two.
import type { Database } from "bun:sqlite";
import type { SQL } from "bun";
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { sqlState } from "./failures.ts";
import { READ_VERSIONS, requireFit, schemaOf, type VersionRow } from "./schema-fit.ts";
import { SCHEMA_VERSIONS } from "./schema-versions.ts";

const VERSIONS_TABLE = `create table if not exists schema_migrations (
  version integer not null primary key,
  applied_at bigint not null
)`;

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

/** @throws StartupProblem when this program must not run on the database */
function pending(rows: readonly VersionRow[], log: Log) {
  const schema = schemaOf(rows);
  requireFit(schema, log);
  const versions = SCHEMA_VERSIONS.map((one, index) => ({ ...one, version: index + 1 }));
  return versions.slice(schema.version);
}

/** Applies what is missing. Another process that opens the same file waits for the end of it. */
export function migrateSqlite(connection: Database, { clock, log }: MigrationTools): void {
  const announce = announcer(log);
  const apply = connection.transaction(() => {
    connection.run(VERSIONS_TABLE);
    const migrations = pending(versionsOnSqlite(connection), log);
    for (const { version, sqlite } of migrations) {
      const work = SQLITE_WORK[version];
      if (work !== undefined) announce.begins(version, work, sizeOnSqlite(connection, work));
      connection.run(sqlite);
    }
    // At last, since one of them makes the column.
    for (const { version, floor } of migrations) {
      const values = [version, clock.now(), floor];
      connection.run("insert into schema_migrations (version, applied_at, floor) values (?, ?, ?)", values);
    }
  });
  apply.immediate();
  announce.committed();
}

// A statement that is not done with would keep tables from being changed.
function versionsOnSqlite(connection: Database): VersionRow[] {
  using statement = connection.prepare<VersionRow, []>(READ_VERSIONS);
  return statement.all();
}

function sizeOnSqlite(connection: Database, { query }: Work): WorkSize | undefined {
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

/**
 * Only one at a time, for as long as its transaction. Whoever waits for this holds nothing of the table, so that a version may
 * change that too. Others read and write it meanwhile.
 */
const ALONE = "lock table schema_migrations in share update exclusive mode";
/** No version, but the row that whoever migrates holds too: versions up to 22 know nothing else. */
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
        await tx.unsafe(ALONE);
        await tx.unsafe(LOCK_ROW);
      });
      return;
    } catch (error) {
      if (tries === MAKING_MAX || !MADE_MEANWHILE.test(sqlState(error) ?? "")) throw error;
    }
  }
}

/** Applies what is missing. Replicas that start at once queue; the first one does the work. */
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
    await tx.unsafe(ALONE);
    await tx.unsafe(TAKE_LOCK);
    await tx.unsafe(`set local lock_timeout = '${TABLE_LOCK_WAIT}'`);
    const migrations = pending(await tx.unsafe<VersionRow[]>(READ_VERSIONS), log);
    for (const { version, postgres } of migrations) {
      const work = POSTGRES_WORK[version];
      if (work !== undefined) {
        const [size]: WorkSize[] = await tx.unsafe(work.query);
        announce.begins(version, work, size);
      }
      await tx.unsafe(postgres);
    }
    for (const { version, floor } of migrations) {
      const values = [version, clock.now(), floor];
      await tx.unsafe("insert into schema_migrations (version, applied_at, floor) values ($1, $2, $3)", values);
    }
  });
  announce.committed();
}
