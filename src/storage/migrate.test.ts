// Migrations, by a version that only tests know: beside replicas and a backup, and by programs that are killed.
import { expect, test } from "bun:test";
import { mkdtempSync } from "node:fs";
import { join } from "node:path";
import { SQL } from "bun";
import { temporaryRoot } from "../../test/support/gateway/process.ts";
import { becomeNextVersion, NEXT_VERSION, nextVersion } from "../../test/support/stores/next-version.ts";
import { eachStore } from "../../test/support/stores/one-store.ts";
import { startPostgres } from "../../test/support/stores/postgres.ts";
import { addAgent, agentIds, type Place, postgresPlace } from "../../test/support/stores/stores.ts";
import { until } from "../../test/support/until.ts";
import { type LogFields, silentLog } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { inspectPostgres } from "./postgres/inspect.ts";
import { checkSqliteCopy } from "./sqlite/backup.ts";
import { inspectSqlite } from "./sqlite/inspect.ts";

const MAIN = join(import.meta.dir, "../main.ts");
/** The server looks every second; so much more for a busy machine. */
const GONE_MS_MAX = 10_000;

/** The first table that a migration makes keeps the server computing for a minute. */
const LONG = [
  `create function work() returns event_trigger language plpgsql as $$
     declare until timestamptz := clock_timestamp() + interval '1 minute';
     begin while clock_timestamp() < until loop perform count(*) from generate_series(1, 10000); end loop; end $$`,
  "create event trigger slow on ddl_command_start when tag in ('CREATE TABLE') execute function work()",
];

function startMigration(databaseUrl: string, program: readonly string[] = [process.execPath, MAIN]) {
  const command = ["setpriv", "--pdeathsig", "KILL", "--", ...program, "migrate"];
  const env = {
    DATABASE_URL: databaseUrl,
    TOLLGATE_DATA_DIR: mkdtempSync(join(temporaryRoot(), "migrate-")),
    TOLLGATE_MASTER_KEY: Buffer.alloc(32, 7).toString("base64"),
  };
  return Bun.spawn(command, { env, stdio: ["ignore", "ignore", "ignore"] });
}

/** As an operator creates it. The databases of tests have the schema. */
async function withoutSchema<P extends Place>(place: P): Promise<P> {
  if ("url" in place) await place.execute("drop schema public cascade; create schema public");
  return place;
}

test("a migration that is killed leaves the server neither at work nor locked", async () => {
  const place = await withoutSchema(await postgresPlace());
  for (const statement of LONG) await place.execute(statement);
  await using watcher = new SQL((await startPostgres()).url("postgres"), { max: 1, database: "postgres" });
  const atWork = async () => {
    const rows = await watcher`select pid from pg_stat_activity
      where datname = ${new URL(place.url).pathname.slice(1)} and state = 'active' and query ilike 'create table%'`;
    return rows.length > 0;
  };
  const migration = startMigration(place.url);
  while (!(await atWork())) {
    expect(migration.exitCode).toBeNull();
    await Bun.sleep(20);
  }
  migration.kill("SIGKILL");
  await migration.exited;
  const killedAt = performance.now();
  while (await atWork()) {
    expect(performance.now() - killedAt).toBeLessThan(GONE_MS_MAX);
    await Bun.sleep(20);
  }

  await place.execute("drop event trigger slow");
  await (await place.open()).close();
});

/** Each transaction that makes an index is counted, even one that is undone, and takes two seconds longer. */
const COUNTED = [
  "create sequence attempts",
  `create function take() returns event_trigger language plpgsql as $$
     begin
       if coalesce(current_setting('test.begun', true), '') = '' then
         perform set_config('test.begun', 'yes', true), nextval('attempts'), pg_sleep(2);
       end if;
     end $$`,
  "create event trigger counted on ddl_command_start when tag in ('CREATE INDEX') execute function take()",
];

test("programs that start at once wait for the one that migrates, and do not undo its work", async () => {
  const place = await withoutSchema(await postgresPlace());
  for (const statement of COUNTED) await place.execute(statement);
  const programs = [startMigration(place.url), startMigration(place.url), startMigration(place.url)];
  expect(await Promise.all(programs.map(({ exited }) => exited))).toEqual([0, 0, 0]);
  await using watcher = new SQL(place.url, { max: 1 });
  const [row] = await watcher`select last_value::int as attempts from attempts`;
  // Once, but for a program that is held up on a busy machine while it looks.
  expect(row?.attempts).toBeWithin(1, 3);
});

/** What a server of the version before goes on doing, and what it may take on a busy machine. */
const RENEWAL =
  "insert into processes (id, kind, lease_until) values ('rep_old', 'gateway', 1) on conflict (id) do update set lease_until = 2";
const RENEWED_MS_MAX = 5_000;

test("a backup under way delays a migration, which keeps nobody else waiting meanwhile", async () => {
  const place = await postgresPlace();
  expect(await startMigration(place.url).exited).toBe(0);
  const database = new URL(place.url).pathname.slice(1);
  await using watcher = new SQL((await startPostgres()).url("postgres"), { max: 1, database: "postgres" });
  const isHeldUp = async () => {
    const rows = await watcher`select 1 from pg_stat_activity where datname = ${database}
      and wait_event_type = 'Lock' and query ilike '%alter table%'`;
    return rows.length > 0;
  };
  await using backup = new SQL(place.url, { max: 1 });
  const dump = await backup.reserve();
  await dump.unsafe("begin; lock table processes in access share mode");
  const migration = startMigration(place.url, nextVersion());
  try {
    await until(async () => migration.exitCode !== null || (await isHeldUp()));
    await place.execute(`set statement_timeout = ${RENEWED_MS_MAX}; ${RENEWAL}`);
    expect(migration.exitCode).toBeNull();
  } finally {
    await dump.unsafe("rollback");
    dump.release();
  }
  expect(await migration.exited).toBe(0);
});

/** Of a program that is killed when it has done all of a migration and not yet committed it. */
const KILLED = `
  import { becomeNextVersion } from ${JSON.stringify(join(import.meta.dir, "../../test/support/stores/next-version.ts"))};
  import { openStore } from ${JSON.stringify(join(import.meta.dir, "open.ts"))};
  import { silentLog } from ${JSON.stringify(join(import.meta.dir, "../core/log.ts"))};
  becomeNextVersion();
  let isMigrating = false;
  const log = { ...silentLog, info: (event) => { isMigrating ||= event === "migration_started"; } };
  const now = () => (isMigrating ? process.kill(process.pid, "SIGKILL") : 1);
  await openStore({ ...JSON.parse(process.argv[1]), log, clock: { now } });`;

eachStore((makePlace, dialect) => {
  const optionsOf = (place: Place) => ({
    databaseUrl: "url" in place ? String(place.url) : null,
    dataDir: "dir" in place ? String(place.dir) : "/nowhere",
  });
  const versionOf = async (place: Place) => {
    const options = optionsOf(place);
    const local = options.databaseUrl === null ? inspectSqlite(join(options.dataDir, "tollgate.db")) : null;
    const found = local ?? (await inspectPostgres(options.databaseUrl ?? ""));
    await found.close();
    return found.schema.version;
  };

  test("a next version is applied once, told in the log, to what is there, and the version before runs on it", async () => {
    const place = await makePlace();
    const before = await place.open();
    await before.write((tx) => addAgent(tx, "agt_1"));
    const events: [string, LogFields | undefined][] = [];
    const log = { ...silentLog, info: (event: string, fields?: LogFields) => void events.push([event, fields]) };
    const told = () => events.splice(0).filter(([event]) => event.startsWith("migration_"));
    {
      using _ = becomeNextVersion();
      await (await place.open(log)).close();
      expect(told()).toEqual([
        ["migration_started", { versions: [NEXT_VERSION] }],
        ["migration_ended", { versions: [NEXT_VERSION], duration_ms: expect.any(Number) }],
      ]);
      await (await place.open(log)).close();
    }
    await before.write((tx) => addAgent(tx, "agt_2"));
    await before.close();
    const older = await place.open(log);
    expect(await agentIds(older)).toEqual(["agt_1", "agt_2"]);
    await older.close();
    expect(told()).toEqual([]);
    expect(await versionOf(place)).toBe(NEXT_VERSION);
    // What the migration has filled in is there.
    await expect(place.execute("insert into colors (agent) values ('agt_1')")).rejects.toThrow();
    await place.execute("insert into colors (agent) values ('agt_2')");
    place.remove();
  });

  test("a program that is killed at a migration leaves all as it was, and the next one does the migration", async () => {
    const place = await makePlace();
    await (await place.open()).close();
    const command = [process.execPath, "-e", KILLED, JSON.stringify(optionsOf(place))];
    const child = Bun.spawn(command, { stdio: ["ignore", "ignore", "inherit"] });
    await child.exited;
    expect(child.signalCode).toBe("SIGKILL");
    expect(await versionOf(place)).toBe(NEXT_VERSION - 1);
    await expect(place.execute("select color from processes")).rejects.toThrow();
    using _ = becomeNextVersion();
    await (await place.open()).close();
    await place.execute("select color from processes");
    place.remove();
  });

  test("a database of a program from before the first release is refused, and nothing in it is changed", async () => {
    const place = await withoutSchema(await makePlace());
    for (const statement of [
      "create table schema_migrations (version integer not null primary key, applied_at bigint not null)",
      "insert into schema_migrations (version, applied_at) values (1, 0)",
      "create table tenant_keys (tenant text not null primary key)",
    ]) {
      await place.execute(statement);
    }
    for (const refused of [
      await place.open().catch((error) => error),
      await versionOf(place).catch((error) => error),
    ]) {
      expect(refused).toBeInstanceOf(StartupProblem);
      expect(refused.message).toContain("before the first release, and nothing brings it up to date: start on a new");
    }
    await expect(place.execute("select 1 from schema_versions")).rejects.toThrow();
    if (dialect === "sqlite") {
      const { problem } = checkSqliteCopy(join(optionsOf(place).dataDir, "tollgate.db"));
      expect(problem).toContain("before the first release");
    }
    place.remove();
  });
});
