// The schema's versions: numbered SQL for each database, embedded in the binary; which programs may run on each; and how a
// database is brought up to date. Versions are applied in order and recorded in `schema_versions`, all that is pending in one
// transaction, so a database is never between two. Each leaves there what an older program needs to judge a schema that is
// newer than all that it knows.
import type { Database } from "bun:sqlite";
import type { SQL } from "bun";
import postgres0001 from "../../db/postgres/0001_initial.sql" with { type: "text" };
import postgres0002 from "../../db/postgres/0002_settlement_confirmation.sql" with { type: "text" };
import sqlite0001 from "../../db/sqlite/0001_initial.sql" with { type: "text" };
import sqlite0002 from "../../db/sqlite/0002_settlement_confirmation.sql" with { type: "text" };
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import type { Clock } from "../core/time.ts";
import { sqlState } from "./failures.ts";

export interface SchemaVersion {
  readonly sqlite: string;
  readonly postgres: string;
  /**
   * The oldest program that may start and run on a database that has this version, told by the newest version that it knows
   * itself. What only expands leaves it as it is: all that such a program reads and writes is still there and means the
   * same, and no harm comes of what it does not know. What contracts raises it.
   */
  readonly floor: number;
}

/** Version n stands at index n − 1. */
export const SCHEMA_VERSIONS: readonly SchemaVersion[] = [
  { sqlite: sqlite0001, postgres: postgres0001, floor: 1 },
  // The first version would close a payment that is still to be confirmed, and its call would have no receipt.
  { sqlite: sqlite0002, postgres: postgres0002, floor: 2 },
];

/** What this program brings a schema to. */
export const newestVersion = (): number => SCHEMA_VERSIONS.length;

export interface VersionRow {
  readonly version: number;
  readonly floor: number;
}

/** Of a database; 0 and 0 where there is none yet. */
export interface Schema {
  readonly version: number;
  /** The oldest program that may run on it: see `SchemaVersion`. */
  readonly floor: number;
}

const READ_VERSIONS = "select version, floor from schema_versions";
/** Of a database that has tables, of which `tenant_keys` is one in every schema, but not the table of the versions. */
const OUTDATED =
  "the database was made by a program from before the first release, and nothing brings it up to date: " +
  "start on a new database (an empty one, or a data directory without tollgate.db)";

/** @throws StartupProblem when no released program has made the tables that are there */
export function versionsOnSqlite(connection: Database): VersionRow[] {
  // A statement that is not done with would keep tables from being changed.
  using tables = connection.prepare<{ name: string }, []>(
    "select name from sqlite_schema where name in ('schema_versions', 'tenant_keys')",
  );
  const names = tables.all().map(({ name }) => name);
  if (names.includes("schema_versions")) {
    using versions = connection.prepare<VersionRow, []>(READ_VERSIONS);
    return versions.all();
  }
  if (names.length > 0) throw new StartupProblem(OUTDATED);
  return [];
}

/** @throws StartupProblem when no released program has made the tables that are there */
export async function versionsOnPostgres(client: SQL): Promise<VersionRow[]> {
  const [tables] = await client.unsafe<{ keys: string | null; versions: string | null }[]>(
    "select to_regclass('tenant_keys')::text as keys, to_regclass('schema_versions')::text as versions",
  );
  if (tables?.versions != null) return client.unsafe<VersionRow[]>(READ_VERSIONS);
  if (tables?.keys != null) throw new StartupProblem(OUTDATED);
  return [];
}

/** Each version may have raised the floor, and none lowers what another has raised. */
export function schemaOf(rows: readonly VersionRow[]): Schema {
  return {
    version: Math.max(0, ...rows.map(({ version }) => version)),
    floor: Math.max(0, ...rows.map(({ floor }) => floor)),
  };
}

/** Of a schema to a program: what is older is brought up to date, and of what is newer only some may be used. */
type SchemaFit = "none" | "older" | "same" | "newer" | "too new";

/** @param newest that the program knows */
export function fitOf({ version, floor }: Schema, newest = newestVersion()): SchemaFit {
  if (version === 0) return "none";
  if (version <= newest) return version === newest ? "same" : "older";
  return floor <= newest ? "newer" : "too new";
}

/** For what fits. */
export function schemaText(schema: Schema): string {
  const text = `schema version ${schema.version}`;
  return fitOf(schema) === "newer"
    ? `${text} (this program knows versions up to ${newestVersion()}, and may use it)`
    : text;
}

/** For what is too new. */
export function tooNewText({ version, floor }: Schema): string {
  return (
    `schema version ${version}, on which only programs that know version ${floor} may run, ` +
    `and this program knows versions up to ${newestVersion()}`
  );
}

export const TOO_NEW_ADVICE = "start a newer tollgate, or restore a backup";

/**
 * Tells the log of a newer schema, on which this program runs all the same.
 *
 * @throws StartupProblem when it must not
 */
function requireFit(schema: Schema, log: Log): void {
  const fit = fitOf(schema);
  if (fit === "too new") throw new StartupProblem(`the database has ${tooNewText(schema)}: ${TOO_NEW_ADVICE}`);
  if (fit !== "newer") return;
  const hint = "see Going back in tollgate help upgrades";
  log.warn("database_is_newer", { schema_version: schema.version, known_version: newestVersion(), hint });
}

const VERSIONS_TABLE = `create table if not exists schema_versions (
  version integer not null primary key,
  applied_at bigint not null,
  floor integer not null
)`;

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

/** Tells the log of a migration before it begins, and of its end once that is committed; of a new database nothing. */
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

/** Applies what is missing. Another process that opens the same file waits for the end of it. */
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

/** Another replica may be at a long migration, and a backup may be reading the tables. */
const WAIT_MINUTES = 5;
const MIGRATION_LOCK_WAIT = `${WAIT_MINUTES}min`;
/** While it waits for a table all that come after it wait too, so it gives up soon, undoes all, and tries again. */
const TABLE_LOCK_WAIT = "500ms";
/** A lock that was not had, or not in time, and two that wait for each other. */
const HELD_UP = /^(55P03|40P01)$/;
/**
 * How often the server checks that its client is still there. Without this, the statement of a killed client would run to
 * its end and hold the locks that the next one waits for.
 */
const STILL_THERE_EVERY = "1s";

/** No version, but the row that the process holds which migrates. */
const LOCK_ROW = "insert into schema_versions (version, applied_at, floor) values (0, 0, 0) on conflict do nothing";
/**
 * Not waited for in the server: a process that waits for a row holds a lock of its table, and the one that migrates may have to
 * change that table. Each would wait for the other, and the migration be undone and begun again by turns.
 */
const TAKE_LOCK = "select version from schema_versions where version = 0 for update nowait";
/** Two that make one table at once: one of them is told so in one of these ways, and finds the table the next time. */
const MADE_MEANWHILE = /^(23505|42P07|42710)$/;

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
        await versionsOnPostgres(tx);
        await tx.unsafe(VERSIONS_TABLE);
        await tx.unsafe(LOCK_ROW);
      });
      return;
    } catch (error) {
      if (tries === 5 || !MADE_MEANWHILE.test(sqlState(error) ?? "")) throw error;
    }
  }
}

/** Applies what is missing. Of replicas that start at once the one that has the row does the work, and the others wait. */
export async function migratePostgres(client: SQL, tools: MigrationTools): Promise<void> {
  await makeLockRow(client);
  const announce = announcer(tools.log);
  const until = performance.now() + WAIT_MINUTES * 60_000;
  for (;;) {
    try {
      await applyPending(client, announce, tools);
      return announce.committed();
    } catch (error) {
      if (!HELD_UP.test(sqlState(error) ?? "") || performance.now() > until) throw error;
    }
    await Bun.sleep(1_000);
  }
}

async function applyPending(
  client: SQL,
  announce: ReturnType<typeof announcer>,
  { clock, log }: MigrationTools,
): Promise<void> {
  await patiently(client, async (tx) => {
    // Most starts find nothing to do, and wait for nobody.
    if (pending(await versionsOnPostgres(tx), log).length === 0) return;
    await tx.unsafe(TAKE_LOCK);
    await tx.unsafe(`set local lock_timeout = '${TABLE_LOCK_WAIT}'`);
    const migrations = pending(await versionsOnPostgres(tx), log);
    announce.begins(migrations);
    for (const { version, floor, postgres } of migrations) {
      await tx.unsafe(postgres);
      const values = [version, clock.now(), floor];
      await tx.unsafe("insert into schema_versions (version, applied_at, floor) values ($1, $2, $3)", values);
    }
  });
}
