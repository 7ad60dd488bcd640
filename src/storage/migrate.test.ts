// A migration whose program is killed: the server's work for it ends as well, and the next program finds it undone.
import { expect, test } from "bun:test";
import { mkdtempSync } from "node:fs";
import { join } from "node:path";
import { SQL } from "bun";
import { missingPreviousVersion, previousVersion } from "../../test/support/gateway/previous-version.ts";
import { temporaryRoot } from "../../test/support/gateway/process.ts";
import { startPostgres } from "../../test/support/stores/postgres.ts";
import { postgresPlace } from "../../test/support/stores/stores.ts";

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

test("a migration that is killed leaves the server neither at work nor locked", async () => {
  const place = await postgresPlace();
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
}, 60_000);

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
  const place = await postgresPlace();
  for (const statement of COUNTED) await place.execute(statement);
  const programs = [startMigration(place.url), startMigration(place.url), startMigration(place.url)];
  expect(await Promise.all(programs.map(({ exited }) => exited))).toEqual([0, 0, 0]);
  await using watcher = new SQL(place.url, { max: 1 });
  const [row] = await watcher`select last_value::int as attempts from attempts`;
  // Once, but for a program that is held up on a busy machine while it looks.
  expect(row?.attempts).toBeWithin(1, 3);
}, 30_000);

/** What a server of the version before goes on doing, and what it may take on a busy machine. */
const RENEWAL =
  "insert into replicas (id, lease_until) values ('rep_old', 1) on conflict (id) do update set lease_until = 2";
const RENEWED_MS_MAX = 5_000;

const older = missingPreviousVersion();
const why = older === null ? "" : ` (not tried, since ${older})`;

test.skipIf(older !== null)(
  `a backup under way delays a migration, which keeps nobody else waiting meanwhile${why}`,
  async () => {
    const place = await postgresPlace();
    expect(await startMigration(place.url, previousVersion()).exited).toBe(0);
    const database = new URL(place.url).pathname.slice(1);
    await using watcher = new SQL((await startPostgres()).url("postgres"), { max: 1, database: "postgres" });
    const isHeldUp = async () => {
      const rows = await watcher`select 1 from pg_stat_activity where datname = ${database}
        and wait_event_type = 'Lock' and query ilike '%alter table%'`;
      return rows.length > 0;
    };
    await using backup = new SQL(place.url, { max: 1 });
    const dump = await backup.reserve();
    await dump.unsafe("begin; lock table replicas, facilitator_payments in access share mode");
    const migration = startMigration(place.url);
    try {
      while (migration.exitCode === null && !(await isHeldUp())) await Bun.sleep(10);
      await place.execute(`set statement_timeout = ${RENEWED_MS_MAX}; ${RENEWAL}`);
      expect(migration.exitCode).toBeNull();
    } finally {
      await dump.unsafe("rollback");
      dump.release();
    }
    expect(await migration.exited).toBe(0);
  },
  60_000,
);
