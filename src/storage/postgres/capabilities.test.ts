// What the store finds out about its server before it uses it.
import { describe, expect, test } from "bun:test";
import { missingPgBouncer, startPgBouncer } from "../../../test/support/stores/pgbouncer.ts";
import { startPostgres } from "../../../test/support/stores/postgres.ts";
import { POSTGRES_KINDS } from "../../../test/support/stores/postgres-kinds.ts";
import { clock, postgresPlace, shown } from "../../../test/support/stores/stores.ts";
import type { Log } from "../../core/log.ts";
import { StartupProblem } from "../../core/startup.ts";
import { openPostgres } from "./store.ts";

/** What is logged when a store is opened there. */
async function logged(databaseUrl: string, options: { callMsMax?: number } = {}): Promise<[string, unknown][]> {
  const lines: [string, unknown][] = [];
  const note = (event: string, fields: unknown) => void lines.push([event, fields]);
  const log: Log = { debug: note, info: note, warn: note, error: note };
  await (await openPostgres({ databaseUrl, clock, log, ...options })).close();
  return lines;
}

const ALL = {
  default_isolation: "read committed",
  pooled: false,
  prepared_statements: true,
};

const DIFFERENCES: Readonly<Record<string, object>> = {
  "postgres 15": { server: expect.stringMatching(/^15\./) },
  "postgres 18 through PgBouncer": { pooled: true, prepared_statements: false },
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

describe("a server that can't be used is refused", () => {
  /** A real server whose functions answer as those of another server. */
  async function pretending(answer: string, options: { callMsMax?: number } = {}): Promise<unknown> {
    const place = await postgresPlace();
    await place.execute(answer);
    await place.execute(`alter database ${new URL(place.url).pathname.slice(1)} set search_path = public, pg_catalog`);
    return logged(place.url, options).catch((thrown) => thrown);
  }

  test.each([
    [
      "an old one, by its number",
      "when 'server_version_num' then '120022' when 'server_version' then '12.22'",
      "must have version 13 or newer, and has 12.22",
    ],
    [
      "one with another encoding",
      "when 'server_encoding' then 'SQL_ASCII'",
      "must have the encoding UTF8, and has SQL_ASCII",
    ],
  ])("%s", async (_name, answer, told) => {
    const refused = await pretending(
      `create function current_setting(text) returns text language sql as
         $$ select case $1 ${answer} else pg_catalog.current_setting($1) end $$`,
    );
    expect(refused).toBeInstanceOf(StartupProblem);
    expect(shown(refused)).toContain(told);
  });

  test("one that does not come to an answer, in the time that a call has", async () => {
    const slow = "create function current_setting(text) returns text language sql as $$ select pg_sleep(100)::text $$";
    const refused = await pretending(slow, { callMsMax: 300 });
    expect(refused).toBeInstanceOf(StartupProblem);
    expect(shown(refused)).toContain("does not answer");
  });
});
