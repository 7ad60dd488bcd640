// Copies of a live SQLite database: what one holds, what the restore of one gives back, and what is not taken for one.
import { Database } from "bun:sqlite";
import { afterEach, beforeEach, expect, setDefaultTimeout, test } from "bun:test";
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { agentWithSecret, ask, SECRET, secretUpstream } from "./support/gateway/api.ts";
import { startGateway } from "./support/gateway/gateway.ts";
import { runCommand, temporaryRoot } from "./support/gateway/process.ts";

setDefaultTimeout(120_000);

const ALICE = { tenant: "acme", user: "alice" };

let dir: string;
beforeEach(() => {
  dir = mkdtempSync(join(temporaryRoot(), "backup-"));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

/** As an operator does it: the copy and the key, alone in a directory. */
function restored(backup: string, masterKey: string): string {
  const data = join(dir, "restored");
  mkdirSync(data, { mode: 0o700 });
  copyFileSync(backup, join(data, "tollgate.db"));
  writeFileSync(join(data, "master.key"), masterKey, { mode: 0o600 });
  return data;
}

test("a backup under load gives back every call that was acknowledged before it began, and the secrets", async () => {
  using echo = secretUpstream();
  await using gateway = await startGateway();
  const token = await gateway.token(ALICE);
  const agent = await agentWithSecret(gateway, token, echo.url, "echo");
  const acknowledged: string[] = [];
  let isLoaded = true;
  const call = async () => {
    const response = await ask(gateway, token, `/v1/proxy/${agent}`, { n: acknowledged.length });
    expect(response.status).toBe(202);
    acknowledged.push(((await response.json()) as { invocation_id: string }).invocation_id);
  };
  const caller = async () => {
    while (isLoaded) await call();
  };
  for (let n = 0; n < 50; n++) await call();
  const load = Promise.all(Array.from({ length: 16 }, caller));
  const backup = join(dir, "backup.db");
  const [before, made] = await Promise.all([[...acknowledged], gateway.run("backup", backup, "--verify")]).finally(
    () => {
      isLoaded = false;
    },
  );
  await load;
  expect(made).toEqual({
    code: 0,
    stdout: expect.stringMatching(
      /^wrote \S+backup\.db and verified it: \d+ bytes, schema version \d+, all \d keys open\n$/,
    ),
    stderr: "",
  });
  expect(statSync(backup).mode & 0o777).toBe(0o600);
  expect(acknowledged.length).toBeGreaterThan(before.length);

  const masterKey = readFileSync(join(gateway.dataDir, "master.key"), "utf8");
  await using again = await startGateway({ env: { TOLLGATE_DATA_DIR: restored(backup, masterKey) } });
  for (const id of before) {
    const polled = await ask(again, token, `/v1/invocations/${id}`);
    expect([id, polled.status]).toEqual([id, 200]);
  }
  const poll = (await ask(again, token, `/v1/proxy/${agent}`, {})).headers.get("location");
  const headers = { authorization: `Bearer ${await again.token(ALICE)}`, prefer: "wait=30" };
  const ended = (await (await fetch(`${again.url}${poll}`, { headers })).json()) as Record<string, string>;
  expect([ended["status"], Buffer.from(ended["response_body_b64"] ?? "", "base64").toString()]).toEqual([
    "succeeded",
    `Bearer ${SECRET}`,
  ]);
});

test("a backup replaces no file, and leaves none behind when it can't be made", async () => {
  await using gateway = await startGateway();
  const there = join(dir, "there.db");
  writeFileSync(there, "mine");
  const refused = (text: string) => ({ code: 2, stdout: "", stderr: expect.stringContaining(text) });
  expect(await gateway.run("backup", there)).toEqual(
    refused(
      `${there} already exists, and a backup never overwrites a file; if it is a copy, tollgate backup --verify ${there} checks it`,
    ),
  );
  expect(readFileSync(there, "utf8")).toBe("mine");
  const nowhere = join(dir, "nowhere", "b.db");
  expect(await gateway.run("backup", nowhere)).toEqual(refused(`the directory ${join(dir, "nowhere")} does not exist`));
  expect(await gateway.run("backup")).toEqual(refused("FILE is missing"));
  const empty = await gateway.run("backup", join(dir, "b.db"), "--data-dir", dir);
  expect(empty).toEqual(refused(`there is no database at ${join(dir, "tollgate.db")}`));
  expect([...new Bun.Glob("**").scanSync({ cwd: dir })]).toEqual(["there.db"]);
  // It has no room for anything.
  expect(await gateway.run("backup", "/proc/b.db")).toEqual(refused("/proc must have "));
  // What a first start leaves that was cut short, and what is no database at all.
  for (const [text, why] of [
    ["", "tollgate.db is empty"],
    ["no database", "can't be read as a database: "],
  ] as const) {
    writeFileSync(join(dir, "tollgate.db"), text);
    expect(await gateway.run("backup", join(dir, "b.db"), "--data-dir", dir)).toEqual(refused(why));
  }
  expect([...new Bun.Glob("b.db*").scanSync({ cwd: dir })]).toEqual([]);
});

test("a check tells a whole copy from a damaged one, from one of another key, and from what is no copy", async () => {
  await using gateway = await startGateway();
  await gateway.token(ALICE);
  const backup = join(dir, "backup.db");
  expect(await gateway.run("backup", backup)).toEqual({ code: 0, stdout: `wrote ${backup}\n`, stderr: "" });
  const check = (file: string, ...rest: string[]) => gateway.run("backup", "--verify", file, ...rest);
  const fails = (why: string) => ({ code: 1, stdout: "", stderr: expect.stringContaining(why) });
  expect(await check(backup)).toMatchObject({ code: 0, stdout: expect.stringContaining(`${backup} is complete: `) });
  const bytes = readFileSync(backup);

  const damaged = join(dir, "damaged.db");
  writeFileSync(damaged, Buffer.concat([bytes.subarray(0, 8192), Buffer.alloc(4096, 7), bytes.subarray(12_288)]));
  expect(await check(damaged)).toEqual(fails("damaged.db can't be restored: it is"));
  writeFileSync(damaged, bytes.subarray(0, bytes.length - 4096));
  expect(await check(damaged)).toEqual(fails("damaged.db can't be restored: it is"));
  writeFileSync(damaged, "no database at all");
  expect(await check(damaged)).toEqual(fails("it is not a complete tollgate database"));
  expect(await check(join(dir, "missing.db"))).toEqual(fails("there is no such file"));

  const other = new Database(join(dir, "other.db"));
  other.run("create table notes (text)");
  other.close();
  expect(await check(join(dir, "other.db"))).toEqual(fails("it is not a complete tollgate database"));
  expect(await check(backup, "--data-dir", dir)).toEqual(
    fails("keys can't be opened: set TOLLGATE_MASTER_KEY, or put master.key into the data directory"),
  );
  const foreign = join(dir, "foreign");
  mkdirSync(foreign);
  writeFileSync(join(foreign, "master.key"), `${Buffer.alloc(32, 5).toString("base64")}\n`, { mode: 0o600 });
  expect(await check(backup, "--data-dir", foreign)).toEqual(
    fails(`keys do not open with the master key (${join(foreign, "master.key")})`),
  );
});

test("a database whose log holds a part of it is not taken for a copy, nor is the database itself", async () => {
  await using gateway = await startGateway();
  const token = await gateway.token(ALICE);
  const agents = () => {
    using file = new Database(database);
    return file.query("select count(*) as agents from agents").get();
  };
  const [database, raw] = [join(gateway.dataDir, "tollgate.db"), join(dir, "tollgate.db")];
  const backup = join(dir, "backup.db");
  expect(await gateway.run("backup", backup)).toMatchObject({ code: 0 });
  expect((await ask(gateway, token, "/v1/agents", { name: "late" })).status).toBe(201);
  await gateway.kill9();
  for (const part of ["", "-wal"]) copyFileSync(`${database}${part}`, `${raw}${part}`);
  const refused = (text: string) => ({ code: 2, stdout: "", stderr: expect.stringContaining(text) });
  const why = `a part of it is in ${raw}-wal, and a restore takes one file: copy it with tollgate backup first`;
  const verified = await gateway.run("backup", "--verify", raw);
  expect(verified).toEqual({ code: 1, stdout: "", stderr: `${raw} can't be restored: ${why}\n` });
  expect(await gateway.run("restore", raw)).toEqual(refused(`${raw} can't be restored: ${why}`));
  expect(await gateway.run("restore", database)).toEqual(refused(`${database} is the database itself: name a copy`));
  expect(agents()).toEqual({ agents: 1 });
  // As the sentence advises.
  const whole = join(dir, "whole.db");
  expect(await gateway.run("backup", whole, "--data-dir", dir)).toMatchObject({ code: 0 });
  expect(await gateway.run("restore", whole)).toMatchObject({ code: 0 });
  expect(agents()).toEqual({ agents: 1 });
});

test("a database that can't be read is kept, and its log is not read with the copy", async () => {
  await using gateway = await startGateway();
  await gateway.token(ALICE);
  const backup = join(dir, "backup.db");
  expect(await gateway.run("backup", backup)).toMatchObject({ code: 0 });
  await gateway.stop();
  const database = join(gateway.dataDir, "tollgate.db");
  const broken = "no database".padEnd(8192);
  for (const part of ["", "-wal", "-shm"]) writeFileSync(database + part, broken);
  const restored = await gateway.run("restore", backup);
  const kept = /^the previous database is (\S+) now$/m.exec(restored.stdout)?.[1] ?? "";
  expect(restored).toMatchObject({ code: 0 });
  expect(readFileSync(kept, "utf8")).toBe(broken);
  expect(await gateway.run("backup", "--verify", database)).toMatchObject({ code: 0 });
  await gateway.restart();
});

test("a backup of Postgres is left to its own tools", async () => {
  const env = { DATABASE_URL: "postgres://127.0.0.1:1/none" };
  expect(await runCommand(["backup", join(dir, "b.db")], { cwd: dir, env })).toEqual({
    code: 2,
    stdout: "",
    stderr: expect.stringContaining("DATABASE_URL must be unset: Postgres is backed up by its own tools"),
  });
});
