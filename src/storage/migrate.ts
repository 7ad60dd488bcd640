// Schema versions: numbered migrations for each database, embedded in the binary, and how they are applied. All pending ones are
// applied in order in one transaction and recorded in `schema_versions`, so a database is never between two versions. Each
// records the oldest program that may run on it, so that an older program can judge a newer schema than it knows.
import type { Database } from "bun:sqlite";
import type { SQL } from "bun";
import postgres0001 from "../../db/postgres/0001_initial.sql" with { type: "text" };
import postgres0002 from "../../db/postgres/0002_settlement_confirmation.sql" with { type: "text" };
import postgres0003 from "../../db/postgres/0003_error_detail.sql" with { type: "text" };
import postgres0004 from "../../db/postgres/0004_open_facilitators.sql" with { type: "text" };
import sqlite0001 from "../../db/sqlite/0001_initial.sql" with { type: "text" };
import sqlite0002 from "../../db/sqlite/0002_settlement_confirmation.sql" with { type: "text" };
import sqlite0003 from "../../db/sqlite/0003_error_detail.sql" with { type: "text" };
import sqlite0004 from "../../db/sqlite/0004_open_facilitators.sql" with { type: "text" };
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { sqlState } from "./failures.ts";
import type { StoreTools } from "./store.ts";

export interface SchemaVersion {
  readonly sqlite: string;
  readonly postgres: string;
  /**
   * The oldest program that may run on a database of this version, identified by the newest version that it knows. A migration
   * that only expands keeps the floor: all that older programs read and write is still there with its old meaning, and what they
   * don't know does no harm. A migration that contracts raises it.
   */
  readonly floor: number;
}

/** Version n is at index n − 1. */
export const SCHEMA_VERSIONS: readonly SchemaVersion[] = [
  { sqlite: sqlite0001, postgres: postgres0001, floor: 1 },
  // A program of version 1 would close a payment that awaits confirmation, and its call would have no receipt.
  { sqlite: sqlite0002, postgres: postgres0002, floor: 2 },
  { sqlite: sqlite0003, postgres: postgres0003, floor: 2 },
  { sqlite: sqlite0004, postgres: postgres0004, floor: 2 },
];

export const newestVersion = (): number => SCHEMA_VERSIONS.length;

/** A database's schema, or one version of it; version and floor are 0 when there is none yet. */
export interface Schema {
  readonly version: number;
  /** The oldest program that may run on the schema: see `SchemaVersion`. */
  readonly floor: number;
}

const READ_VERSIONS = "select version, floor from schema_versions";
/** The problem of a database that has `tenant_keys`, a table of every schema, but no `schema_versions`. */
const OUTDATED =
  "the database was made by a program from before the first release, and nothing brings it up to date: " +
  "start on a new database (an empty one, or a data directory without tollgate.db)";

/** @throws StartupProblem when the tables were made by an unreleased program */
export function versionsOnSqlite(connection: Database): Schema[] {
  // An unfinalised statement would keep tables from being changed.
  using tables = connection.prepare<{ name: string }, []>(
    "select name from sqlite_schema where name in ('schema_versions', 'tenant_keys')",
  );
  const names = tables.all().map(({ name }) => name);
  if (names.includes("schema_versions")) {
    using versions = connection.prepare<Schema, []>(READ_VERSIONS);
    return versions.all();
  }
  if (names.length > 0) throw new StartupProblem(OUTDATED);
  return [];
}

/** @throws StartupProblem when the tables were made by an unreleased program */
export async function versionsOnPostgres(client: SQL): Promise<Schema[]> {
  const [tables] = await client.unsafe<{ keys: string | null; versions: string | null }[]>(
    "select to_regclass('tenant_keys')::text as keys, to_regclass('schema_versions')::text as versions",
  );
  if (tables?.versions != null) return client.unsafe<Schema[]>(READ_VERSIONS);
  if (tables?.keys != null) throw new StartupProblem(OUTDATED);
  return [];
}

/** The schema is at its highest version and has the highest floor of all versions. */
export function schemaOf(rows: readonly Schema[]): Schema {
  return {
    version: Math.max(0, ...rows.map(({ version }) => version)),
    floor: Math.max(0, ...rows.map(({ floor }) => floor)),
  };
}

/** How a schema relates to a program: an older one is migrated, `newer` may be used, `too new` may not. */
export function fitOf({ version, floor }: Schema, newest = newestVersion()) {
  if (version === 0) return "none";
  if (version <= newest) return version === newest ? "same" : "older";
  return floor <= newest ? "newer" : "too new";
}

/** Describes a schema on which this program may run. */
export function schemaText(schema: Schema): string {
  const text = `schema version ${schema.version}`;
  return fitOf(schema) === "newer"
    ? `${text} (this program knows versions up to ${newestVersion()}, and may use it)`
    : text;
}

export function tooNewText({ version, floor }: Schema): string {
  const known = `this program knows versions up to ${newestVersion()}`;
  return `schema version ${version}, on which only programs that know version ${floor} may run, and ${known}`;
}

export const TOO_NEW_ADVICE = "start a newer tollgate, or restore a backup";

const VERSIONS_TABLE = `create table if not exists schema_versions (
  version integer not null primary key,
  applied_at bigint not null,
  floor integer not null
)`;

type MigrationTools = Pick<StoreTools, "clock" | "log">;

/** Logs a newer schema on which this program may run. @throws StartupProblem when it may not run on the schema */
function pending(rows: readonly Schema[], log: Log) {
  const schema = schemaOf(rows);
  const fit = fitOf(schema);
  if (fit === "too new") throw new StartupProblem(`the database has ${tooNewText(schema)}: ${TOO_NEW_ADVICE}`);
  if (fit === "newer") {
    const hint = "see Going back in tollgate help upgrades";
    log.warn("database_is_newer", { schema_version: schema.version, known_version: newestVersion(), hint });
  }
  const versions = SCHEMA_VERSIONS.map((one, index) => ({ ...one, version: index + 1 }));
  return versions.slice(schema.version);
}

/** Logs a migration when it begins and when it is committed, but not the creation of a new database. */
function announcer(log: Log) {
  let versions: readonly number[] = [];
  let startedAt = 0;
  return {
    begins(migrations: readonly { readonly version: number }[]): void {
      if (versions.length > 0 || migrations.length === 0 || migrations[0]?.version === 1) return;
      versions = migrations.map(({ version }) => version);
      startedAt = performance.now();
      log.info("migration_started", { versions });
    },
    committed(): void {
      if (versions.length === 0) return;
      log.info("migration_ended", { versions, duration_ms: Math.round(performance.now() - startedAt) });
    },
  };
}

/** Applies pending migrations. Other processes that open the file wait meanwhile. */
export function migrateSqlite(connection: Database, { clock, log }: MigrationTools): void {
  const announce = announcer(log);
  const apply = connection.transaction(() => {
    const migrations = pending(versionsOnSqlite(connection), log);
    announce.begins(migrations);
    connection.run(VERSIONS_TABLE);
    for (const { version, floor, sqlite } of migrations) {
      connection.run(sqlite);
      const values = [version, clock.now(), floor];
      connection.run("insert into schema_versions (version, applied_at, floor) values (?, ?, ?)", values);
    }
  });
  apply.immediate();
  announce.committed();
}

/** How long to wait while another replica runs a long migration, or a backup reads the tables. */
const WAIT_MINUTES = 5;
/** While a migration waits for a table lock, all later users of the table wait too. So it soon rolls back, and retries. */
const TABLE_LOCK_WAIT = "500ms";
/** A lock that was not available in time; a deadlock. */
const LOCK_FAILED = /^(55P03|40P01)$/;
/**
 * How often the server checks that its client is still connected. Without the check the statement of a killed client would run
 * to its end, and hold locks for which the next migration waits.
 */
const CLIENT_CHECK_INTERVAL = "1s";

/**
 * Takes the lock of the process that migrates, until its transaction ends. The lock is not waited for in the server: a process
 * that waits there in a transaction holds locks on tables which the migration may have to change, and the two would deadlock.
 */
const TAKE_LOCK = "select pg_try_advisory_xact_lock(hashtext('tollgate ' || current_schema()))::int as is_taken";

/** Another process migrates the database. */
class MigratedElsewhere extends Error {}

/**
 * Runs a transaction that may take long, and that ends soon if its program is killed. It is read committed whatever the
 * database's default, since after waiting for the lock it must see what the previous holder has committed.
 */
async function longTransaction(client: SQL, work: (tx: SQL) => Promise<void>): Promise<void> {
  await client.begin("isolation level read committed", async (tx) => {
    await tx.unsafe(`set local statement_timeout = 0; set local lock_timeout = '${WAIT_MINUTES}min'`);
    // Servers before version 14, and those on some systems, can't check, and run without it.
    const setCheck = (part: SQL) =>
      part.unsafe(`set local client_connection_check_interval = '${CLIENT_CHECK_INTERVAL}'`);
    await tx.savepoint(setCheck).catch(() => {});
    await work(tx);
  });
}

/** Applies pending migrations. Among replicas that start together, the one with the lock migrates, and the others wait. */
export async function migratePostgres(client: SQL, tools: MigrationTools): Promise<void> {
  const announce = announcer(tools.log);
  const until = performance.now() + WAIT_MINUTES * 60_000;
  for (;;) {
    try {
      await applyPending(client, announce, tools);
      return announce.committed();
    } catch (error) {
      const isLocked = error instanceof MigratedElsewhere || LOCK_FAILED.test(sqlState(error) ?? "");
      if (!isLocked || performance.now() > until) throw error;
    }
    await Bun.sleep(1_000);
  }
}

async function applyPending(client: SQL, announce: ReturnType<typeof announcer>, { clock, log }: MigrationTools) {
  await longTransaction(client, async (tx) => {
    // Most starts have nothing to migrate, so they don't wait for the lock.
    if (pending(await versionsOnPostgres(tx), log).length === 0) return;
    const [lock] = await tx.unsafe<{ is_taken: number }[]>(TAKE_LOCK);
    if (lock?.is_taken !== 1) throw new MigratedElsewhere("another process migrates the database");
    await tx.unsafe(`set local lock_timeout = '${TABLE_LOCK_WAIT}'`);
    await tx.unsafe(VERSIONS_TABLE);
    const migrations = pending(await versionsOnPostgres(tx), log);
    announce.begins(migrations);
    for (const { version, floor, postgres } of migrations) {
      await tx.unsafe(postgres);
      const values = [version, clock.now(), floor];
      await tx.unsafe("insert into schema_versions (version, applied_at, floor) values ($1, $2, $3)", values);
    }
  });
}
