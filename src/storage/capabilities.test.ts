// What the store finds out about its server before it uses it.
import { describe, expect, test } from "bun:test";
import { missingPgBouncer, startPgBouncer } from "../../test/support/stores/pgbouncer.ts";
import { startPostgres } from "../../test/support/stores/postgres.ts";
import { POSTGRES_KINDS } from "../../test/support/stores/postgres-kinds.ts";
import { clock, postgresPlace, shown } from "../../test/support/stores/stores.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { refusedEngine } from "./capabilities.ts";
import { openPostgres } from "./postgres.ts";

/** What is logged when a store is opened there. */
async function logged(databaseUrl: string, options: { callMsMax?: number } = {}): Promise<[string, unknown][]> {
  const lines: [string, unknown][] = [];
  const note = (event: string, fields: unknown) => void lines.push([event, fields]);
  const log: Log = { debug: note, info: note, warn: note, error: note };
  await (await openPostgres({ databaseUrl, clock, log, ...options })).close();
  return lines;
}

const ALL = {
  skip_locked: true,
  advisory_locks: true,
  listen_notify: true,
  partitions: true,
  default_isolation: "read committed",
  pooled: false,
  prepared_statements: true,
};

const DIFFERENCES: Readonly<Record<string, object>> = {
  "postgres 15": { server: expect.stringMatching(/^15\./) },
  "postgres 18 through PgBouncer": { listen_notify: false, pooled: true, prepared_statements: false },
  "postgres 18, repeatable read": { default_isolation: "repeatable read" },
  "postgres 18, serializable": { default_isolation: "serializable" },
};

describe("what the server can do is logged in one line", () => {
  test("of Postgres 18", async () => {
    const lines = await logged(await (await startPostgres()).freshDatabase());
    expect(lines).toEqual([["database_capabilities", { ...ALL, server: expect.stringMatching(/^18\./) }]]);
  });
  for (const { name, missing, freshDatabase } of POSTGRES_KINDS) {
    test.skipIf(missing !== null)(`of ${name}${missing === null ? "" : `: not tried, since ${missing}`}`, async () => {
      const fields = { ...ALL, server: expect.stringMatching(/^18\./), ...DIFFERENCES[name] };
      expect(await logged(await freshDatabase())).toEqual([["database_capabilities", fields]]);
    });
  }
});

test.skipIf(missingPgBouncer() !== null)("prepared statements through a pooler are warned of", async () => {
  const server = await startPostgres();
  await using bouncer = await startPgBouncer(server.port);
  const prepared = bouncer.through(await server.freshDatabase()).replace("?prepare=false", "?prepare=true");
  const events = (await logged(prepared)).map(([event]) => event);
  expect(events).toEqual(["database_capabilities", "pooler_must_follow_prepared_statements"]);
});

test.skipIf(missingPgBouncer() !== null)("what a pooler says of its server is told at the start", async () => {
  const server = await startPostgres();
  await using bouncer = await startPgBouncer(server.port);
  const nowhere = bouncer.through(server.url("no_such_database"));
  const error = await logged(nowhere).catch((thrown) => thrown);
  expect(error).toBeInstanceOf(StartupProblem);
  expect(error.message).toMatch(/^the Postgres server of DATABASE_URL refuses: .*no_such_database/);
});

describe("an engine that only speaks like Postgres is refused", () => {
  test.each([
    "CockroachDB CCL v25.4.0 (x86_64-pc-linux-gnu, built 2025/11/03 15:11:24, go1.23.7)",
    "PostgreSQL 8.0.2 on i686-pc-linux-gnu, compiled by GCC gcc (GCC) 3.4.2 20041017, Redshift 1.0.12103",
    "PostgreSQL 15.12-YB-2025.2.0.0-b0 on x86_64-pc-linux-gnu, compiled by clang version 17.0.6, 64-bit",
    "PostgreSQL 12.12 (Greenplum Database 7.1.0 build commit:1) on x86_64-pc-linux-gnu, compiled by gcc, 64-bit",
    "PostgreSQL 16",
    "something else",
  ])("%s", (version) => expect(refusedEngine(version)).not.toBeNull());

  test.each([
    "PostgreSQL 15.18 (Debian 15.18-0+deb12u1) on x86_64-pc-linux-gnu, compiled by gcc (Debian 12.2.0-14) 12.2.0, 64-bit",
    "PostgreSQL 16.4 on aarch64-unknown-linux-gnu, compiled by aarch64-unknown-linux-gnu-gcc (GCC) 9.5.0, 64-bit",
    "PostgreSQL 16.1, compiled by Visual C++ build 1937, 64-bit",
  ])("and this is none: %s", (version) => expect(refusedEngine(version)).toBeNull());

  /** A real server whose functions answer as those of another one. */
  async function pretending(answer: string, options: { callMsMax?: number } = {}): Promise<unknown> {
    const place = await postgresPlace();
    await place.execute(answer);
    await place.execute(`alter database ${new URL(place.url).pathname.slice(1)} set search_path = public, pg_catalog`);
    return logged(place.url, options).catch((thrown) => thrown);
  }

  test("before anything is changed in it, and its reason is told", async () => {
    const answer = "create function version() returns text language sql as $$ select 'CockroachDB CCL v25.4.0' $$";
    const refused = await pretending(answer);
    expect(refused).toBeInstanceOf(StartupProblem);
    expect(shown(refused)).toContain("CockroachDB skips rows");
  });

  test("also an old server, by its number", async () => {
    const refused = await pretending(
      `create function current_setting(text) returns text language sql as
         $$ select case $1 when 'server_version_num' then '120022' when 'server_version' then '12.22'
            else pg_catalog.current_setting($1) end $$`,
    );
    expect(refused).toBeInstanceOf(StartupProblem);
    expect(shown(refused)).toContain("must have version 13 or newer, and has 12.22");
  });

  test("also one that does not come to an answer, in the time that a call has", async () => {
    const slow = "create function version() returns text language sql as $$ select pg_sleep(100)::text $$";
    const refused = await pretending(slow, { callMsMax: 300 });
    expect(refused).toBeInstanceOf(StartupProblem);
    expect(shown(refused)).toContain("does not answer");
  });
});
