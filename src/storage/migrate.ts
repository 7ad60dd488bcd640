// Brings a schema up to date: its versions (schema-versions.ts) are applied in order and recorded in schema_versions. All
// that is pending is applied in one transaction, so a database is never between two.
import type { Database } from "bun:sqlite";
import type { SQL } from "bun";
import type { Clock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { sqlState } from "./failures.ts";
import { requireFit, schemaOf, type VersionRow, versionsOnPostgres, versionsOnSqlite } from "./schema-fit.ts";
import { SCHEMA_VERSIONS } from "./schema-versions.ts";

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
/** While it waits for a table whoever comes after it waits too, so it gives up soon, undoes all, and tries again. */
const TABLE_LOCK_WAIT = "500ms";
const PAUSE_MS = 1_000;
/** A lock that was not had, or not in time, and two that wait for each other. */
const HELD_UP = /^(55P03|40P01)$/;
/**
 * How often the server checks that its client is still there. Without this, the statement of a killed client would run to
 * its end and hold the locks that the next one waits for.
 */
const STILL_THERE_EVERY = "1s";

/** No version, but the row that whoever migrates holds. */
const LOCK_ROW = "insert into schema_versions (version, applied_at, floor) values (0, 0, 0) on conflict do nothing";
/**
 * Not waited for in the server: whoever waits for a row holds a lock of its table, and the one that migrates may have to
 * change that table. Each would wait for the other, and the migration be undone and begun again by turns.
 */
const TAKE_LOCK = "select version from schema_versions where version = 0 for update nowait";
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
        await versionsOnPostgres(tx);
        await tx.unsafe(VERSIONS_TABLE);
        await tx.unsafe(LOCK_ROW);
      });
      return;
    } catch (error) {
      if (tries === MAKING_MAX || !MADE_MEANWHILE.test(sqlState(error) ?? "")) throw error;
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
    await Bun.sleep(PAUSE_MS);
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
