// The step back: a gateway, and the commands beside it, on a database that a version of the future has brought up to date.
// It has stated there which programs may still run on it. And the step forward on the database of the other service, which nothing
// may take.
import { expect, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { newestVersion } from "../src/storage/migrate.ts";
import { agentWithSecret, ask, SECRET, secretUpstream } from "./support/gateway/api.ts";
import { type Database, eachDatabase, executeIn, startGateway } from "./support/gateway/gateway.ts";
import { type Finished, runCommand } from "./support/gateway/process.ts";
import { SERVER, TEST_CA } from "./support/http/certificates.ts";

const ALICE = { tenant: "acme", user: "alice" };
const TOO_NEW = `has schema version 999, on which only programs that know version ${newestVersion() + 1} may run, and this`;

/** Enough to be refused by the database alone. */
const FACILITATOR = {
  TOLLGATE_MODE: "facilitator",
  TOLLGATE_TLS_CERT_FILE: "CERT",
  TOLLGATE_TLS_KEY_FILE: "KEY",
  TOLLGATE_CLIENT_CA_FILE: "CA",
  TOLLGATE_RPC_URLS: "http://127.0.0.1:1",
  TOLLGATE_SIGNER_KEY: "5d".repeat(32),
  TOLLGATE_PORT: "0",
  TOLLGATE_OPEN_PORT: "0",
};

/** As a version of the future expands it. */
const EXPANDED = [
  "alter table agents add column color text",
  "create table colors (name text not null primary key)",
  `insert into schema_versions (version, applied_at, floor) values (998, 0, 1), (999, 0, ${newestVersion()})`,
];
const CONTRACTED = `update schema_versions set floor = ${newestVersion() + 1} where version = 998`;

async function started(database: Database) {
  const env = await database.fresh();
  const gateway = await startGateway({ env });
  const execute = (statement: string) => executeIn(gateway, env, statement);
  return { gateway, execute, isSqlite: database.name === "sqlite" };
}

eachDatabase((database) => {
  test("what a newer version has expanded serves an older one, and what it has contracted is refused", async () => {
    using upstream = secretUpstream();
    const { gateway, execute, isSqlite } = await started(database);
    await using _ = gateway;
    const token = await gateway.token(ALICE);
    const agent = await agentWithSecret(gateway, token, upstream.url, "before");
    await gateway.stop();
    for (const statement of EXPANDED) await execute(statement);

    await gateway.restart();
    const warned = gateway
      .log()
      .split("\n")
      .filter((line) => line.includes('"database_is_newer"'));
    expect(warned.map((line) => JSON.parse(line))).toMatchObject([
      { level: "warn", schema_version: 999, known_version: newestVersion() },
    ]);
    for (const id of [agent, await agentWithSecret(gateway, token, upstream.url, "after")]) {
      const called = await ask(gateway, token, `/v1/proxy/${id}`, {});
      const headers = { authorization: `Bearer ${token}`, prefer: "wait=30" };
      const ended = await (await fetch(`${gateway.url}${called.headers.get("location")}`, { headers })).json();
      expect(ended).toMatchObject({ status: "succeeded", response_body_b64: btoa(`Bearer ${SECRET}`) });
    }
    const says = { code: 0, stderr: expect.stringContaining('"database_is_newer","schema_version":999') };
    const beside = [["migrate"], ["token", "revoke", "--tenant", "acme", "--user", "carol"]];
    if (isSqlite) beside.push(["keys", "rotate"]);
    for (const words of beside) expect([words, await gateway.run(...words)]).toMatchObject([words, says]);
    const copy = join(gateway.dataDir, "..", "copy.db");
    const copied = isSqlite ? await gateway.run("backup", copy, "--verify") : null;
    await gateway.stop();
    if (isSqlite) {
      expect(copied).toMatchObject({ code: 0, stdout: expect.stringContaining("999 (this program knows versions up") });
      expect(await gateway.run("restore", copy)).toMatchObject(says);
    }

    await execute(CONTRACTED);
    const refused = { code: 2, stdout: "", stderr: expect.stringContaining(`${TOO_NEW} program knows versions up to`) };
    const all = [["--mode", "gateway", "--port", "0"], ["migrate"], ["token", "--tenant", "a", "--user", "b"]];
    if (isSqlite) all.push(["keys", "rotate"], ["restore"]);
    for (const words of all) expect([words, await gateway.run(...words)]).toEqual([words, refused]);
    if (!isSqlite) return;
    const contracted = await gateway.run("backup", `${copy}.2`, "--verify");
    expect(contracted).toMatchObject({ code: 1, stderr: expect.stringContaining(`can't be restored: it ${TOO_NEW}`) });
  });

  test("the database of the other service is refused before it is migrated", async () => {
    const env = await database.fresh();
    await using gateway = await startGateway({ env });
    const execute = (statement: string) => executeIn(gateway, env, statement);
    await gateway.stop();
    await execute("delete from schema_versions where version = 4");
    /** On Postgres both services may start on one database. */
    const starts = (...words: string[]) => (database.name === "sqlite" ? [words] : []);
    const refuses = async (whose: string, run: (...words: string[]) => Promise<Finished>, commands: string[][]) => {
      for (const words of commands) {
        const stderr = expect.stringMatching(new RegExp(`must be the ${whose}'s .* a (gateway|facilitator)'s`));
        expect([words, await run(...words)]).toMatchObject([words, { code: 2, stderr }]);
      }
      // It fails where the version is there again.
      await execute("insert into schema_versions (version, applied_at, floor) values (4, 0, 2)");
      await execute("delete from schema_versions where version = 4");
    };
    const files = { CERT: SERVER.cert, KEY: SERVER.key, CA: TEST_CA };
    for (const [name, text] of Object.entries(files)) writeFileSync(join(gateway.dataDir, "..", name), text);
    const asFacilitator = { ...FACILITATOR, ...env, TOLLGATE_DATA_DIR: gateway.dataDir };
    const run = (...words: string[]) => runCommand(words, { cwd: join(gateway.dataDir, ".."), env: asFacilitator });
    await refuses("facilitator", run, [["account", "list"], ["migrate"], ...starts("--mode", "facilitator")]);
    for (const table of ["signing_keys", "tenant_keys"]) await execute(`delete from ${table}`);
    await execute("insert into facilitator_accounts (name, enabled, created_at, updated_at) values ('a', '1', 0, 0)");
    const token = ["token", "--tenant", "acme", "--user", "me"];
    await refuses("gateway", gateway.run, [
      token,
      ["token", "revoke", "--tenant", "acme"],
      ["migrate"],
      ...starts("serve"),
    ]);
  });
});
