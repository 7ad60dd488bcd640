// `tollgate keys rotate` and `tollgate token revoke` beside gateways under load: nothing is lost whenever the command is
// killed, and what was replaced or revoked is good for nothing any more.

import { expect, setDefaultTimeout, test } from "bun:test";
import { copyFileSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { decodeProtectedHeader } from "jose";
import { agentWithSecret, ask, idOf, SECRET, secretUpstream } from "./support/gateway/api.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { eachDatabase, type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { type Environment, runCommand, temporaryRoot } from "./support/gateway/process.ts";
import { newMasterKey } from "./support/keys.ts";
import { startPostgres } from "./support/stores/postgres.ts";
import { until } from "./support/until.ts";

setDefaultTimeout(150_000);

const ALICE = { tenant: "acme", user: "alice" };
/** After which a killed command has come to different places: it takes about a second and a half. */
const KILLED_AFTER_MS = [40, 110, 180, 300, 700, 1_000, 1_200, 1_300];
/** A token made now, unlike `gateway.token`. */
async function mint(gateway: Gateway, user = ALICE.user): Promise<string> {
  const { code, stdout, stderr } = await gateway.run("token", "--tenant", ALICE.tenant, "--user", user);
  expect([code, code === 0 ? "" : stderr]).toEqual([0, ""]);
  return stdout.trim();
}

const statusOf = async (gateway: Gateway, token: string) => (await ask(gateway, token, "/v1/agents")).status;

function pick<T>(list: readonly T[], at: number): T {
  const one = list[at % list.length];
  if (one === undefined) throw new Error("the list is empty");
  return one;
}

/** What the upstream got as the secret; null when the call was not made. */
async function called(gateway: Gateway, token: string, agent: string): Promise<string | null> {
  const accepted = await ask(gateway, token, `/v1/proxy/${agent}`, {});
  if (accepted.status !== 202) return `answered ${accepted.status}`;
  const headers = { authorization: `Bearer ${token}`, prefer: "wait=30" };
  const polled = await fetch(`${gateway.url}${accepted.headers.get("location")}`, { headers });
  const { response_body_b64: body } = (await polled.json()) as { response_body_b64?: string };
  return body === undefined ? null : Buffer.from(body, "base64").toString();
}

async function killedAfter(ms: number, env: Environment): Promise<void> {
  const command = ["setpriv", "--pdeathsig", "KILL", "--", tollgateBinary(), "keys", "rotate"];
  const child = Bun.spawn(command, { env: { PATH: "/usr/bin:/bin", ...env }, stdout: "ignore", stderr: "ignore" });
  await Bun.sleep(ms);
  child.kill("SIGKILL");
  await child.exited;
}

const publicKids = async (gateway: Gateway) => {
  const { keys } = (await (await fetch(`${gateway.url}/.well-known/jwks.json`)).json()) as { keys: { kid: string }[] };
  return keys.map(({ kid }) => kid);
};

eachDatabase((database) => {
  test.concurrent("keys rotate under load, killed again and again, and the old master key opens nothing", async () => {
    using echo = secretUpstream();
    const isSqlite = database.name === "sqlite";
    const old = await database.fresh();
    const env = isSqlite ? {} : { ...old, TOLLGATE_NEW_MASTER_KEY: newMasterKey() };
    await using gateway = await startGateway({ env });
    await using second = isSqlite ? null : await startGateway({ env });
    const gateways = second === null ? [gateway] : [gateway, second];
    const keyFile = join(gateway.dataDir, "master.key");
    const oldKey = isSqlite ? readFileSync(keyFile, "utf8") : "";
    const token = await mint(gateway);
    const agents = [await agentWithSecret(gateway, token, echo.url, "a0")];
    const outcomes = new Map<string | null, number>();
    let isLoaded = true;
    const caller = async (n: number) => {
      for (let at = n; isLoaded; at++) {
        const outcome = await called(pick(gateways, at), token, pick(agents, at >> 1));
        outcomes.set(outcome, (outcomes.get(outcome) ?? 0) + 1);
        // Enough that calls are under way at each moment.
        await Bun.sleep(100);
      }
    };
    const load = Promise.all(Array.from({ length: 8 }, (_, n) => caller(n)));
    const command = { TOLLGATE_DATA_DIR: gateway.dataDir, ...env };
    for (const [n, ms] of KILLED_AFTER_MS.entries()) {
      await killedAfter(ms, command);
      // What a gateway seals in the middle of a rotation is sealed for good too.
      agents.push(await agentWithSecret(pick(gateways, n), token, echo.url, `a${n + 1}`));
    }
    const finished = await gateway.run("keys", "rotate");
    isLoaded = false;
    await load;
    expect(finished).toMatchObject({ code: 0, stdout: expect.stringMatching(/^the keys are rotated /) });
    expect([...outcomes.keys()]).toEqual([`Bearer ${SECRET}`]);

    // Tokens from before go on, new ones are taken at once, and every receipt can be checked.
    const next = await mint(gateway);
    for (const each of gateways) expect([await statusOf(each, token), await statusOf(each, next)]).toEqual([200, 200]);
    const [oldKid, newKid] = [token, next].map((each) => decodeProtectedHeader(each).kid as string);
    expect(newKid).not.toBe(oldKid);
    await until(async () => (await publicKids(gateway)).includes(newKid as string));
    expect(await publicKids(gateway)).toContain(oldKid as string);
    for (const agent of agents) expect(await called(gateway, next, agent)).toBe(`Bearer ${SECRET}`);
    const file = join(mkdtempSync(join(temporaryRoot(), "keys-")), "receipts.jsonl");
    const lines: string[] = [];
    for (let page = "first"; page !== ""; lines.push(...page.split("\n").filter((line) => line !== ""))) {
      page = await (await ask(gateway, next, `/v1/receipts?limit=100&offset=${lines.length}`)).text();
    }
    writeFileSync(file, lines.map((line) => `${line}\n`).join(""));
    const kids = new Set(lines.map((line) => decodeProtectedHeader(line).kid));
    expect(kids.size).toBeGreaterThan(1);
    const jwks = `${gateway.url}/.well-known/jwks.json`;
    expect((await gateway.run("receipt", "verify", file, "--jwks", jwks)).code).toBe(0);

    if (isSqlite) {
      expect(readdirSync(gateway.dataDir).filter((name) => name === "master.key.new")).toEqual([]);
      const copy = mkdtempSync(join(temporaryRoot(), "keys-"));
      const backup = await gateway.run("backup", join(copy, "tollgate.db"), "--verify");
      expect([backup.code, backup.stdout]).toEqual([0, expect.stringContaining("keys open")]);
      writeFileSync(join(copy, "master.key"), oldKey, { mode: 0o600 });
      const check = await gateway.run("backup", "--verify", join(copy, "tollgate.db"), "--data-dir", copy);
      const [, closed, all] = /: (\d+) of its (\d+) keys do not open/.exec(check.stderr) ?? [];
      expect([check.code, closed]).toEqual([1, all]);
    }
    // With the old key alone nothing starts; after a restart with the new one everything is there.
    const withOld = isSqlite ? { TOLLGATE_MASTER_KEY: oldKey.trim() } : { ...old, TOLLGATE_NEW_MASTER_KEY: "" };
    await Promise.all(gateways.map((each) => each.stop()));
    await expect(gateway.restart(withOld)).rejects.toThrow("TOLLGATE_MASTER_KEY");
    await gateway.restart({
      TOLLGATE_NEW_MASTER_KEY: "",
      TOLLGATE_MASTER_KEY: isSqlite ? "" : (env as { TOLLGATE_NEW_MASTER_KEY: string }).TOLLGATE_NEW_MASTER_KEY,
    });
    for (const agent of agents) expect(await called(gateway, token, agent)).toBe(`Bearer ${SECRET}`);
  });

  test.concurrent("revoked tokens are refused and later ones taken, also those of the same second", async () => {
    await using gateway = await startGateway({ database });
    const [alice, bob] = [await mint(gateway), await mint(gateway, "bob")];
    expect([await statusOf(gateway, alice), await statusOf(gateway, bob)]).toEqual([200, 200]);
    const revoke = (...args: string[]) => gateway.run("token", "revoke", "--tenant", ALICE.tenant, ...args);
    expect(await revoke("--user", ALICE.user)).toMatchObject({
      code: 0,
      stdout: `all tokens issued so far to user ${ALICE.user} of tenant acme are refused within two seconds\n`,
      stderr: expect.stringContaining(
        "the tenant acme has no agent, credential or call here yet; check the spelling if it should",
      ),
    });
    const next = await mint(gateway);
    expect(await statusOf(gateway, next)).toBe(200);
    await until(async () => (await statusOf(gateway, alice)) === 401);
    expect([await statusOf(gateway, next), await statusOf(gateway, bob)]).toEqual([200, 200]);

    // Its second may be that of the revocation, and of the tokens that are refused.
    expect(await revoke()).toMatchObject({
      code: 0,
      stdout: expect.stringContaining(" so far to all users of tenant acme"),
    });
    const newest = await mint(gateway);
    expect(await statusOf(gateway, newest)).toBe(200);
    await until(async () => (await statusOf(gateway, bob)) === 401 && (await statusOf(gateway, next)) === 401);
    expect(await statusOf(gateway, newest)).toBe(200);
    await gateway.stop();
    await gateway.restart();
    const after = [alice, bob, next, newest].map((token) => statusOf(gateway, token));
    expect(await Promise.all(after)).toEqual([401, 401, 401, 200]);
    expect(await gateway.run("token", "revoke")).toMatchObject({
      code: 2,
      stderr: expect.stringContaining("--tenant"),
    });
    // What the issuer's key has signed is over with the key, whatever number it carries.
    const kid = decodeProtectedHeader(newest).kid as string;
    expect(await revoke("--all")).toMatchObject({
      code: 2,
      stderr: expect.stringContaining("--all can't be combined with"),
    });
    expect(await gateway.run("token", "revoke", "--all", "--yes")).toMatchObject({
      code: 0,
      stdout: "all tokens issued so far are refused within two seconds\n",
    });
    const last = await mint(gateway);
    expect(await statusOf(gateway, last)).toBe(200);
    await until(async () => (await statusOf(gateway, newest)) === 401);
    expect(await statusOf(gateway, last)).toBe(200);
    expect(await publicKids(gateway)).not.toContain(kid);
  });
});

test.concurrent("what is done to keys in another place than the gateway's is refused, and no key file is replaced", async () => {
  const home = mkdtempSync(join(temporaryRoot(), "keys-"));
  const file = join(home, "key");
  writeFileSync(file, `${newMasterKey()}\n`, { mode: 0o600 });
  const kept = readFileSync(file, "utf8");
  const DATABASE_URL = await (await startPostgres()).freshDatabase();
  const elsewhere = { TOLLGATE_MASTER_KEY_FILE: file, TOLLGATE_DATA_DIR: join(home, "elsewhere") };
  const commands = [
    ["keys", "rotate"],
    ["token", "revoke", "--tenant", "acme"],
    ["token", "revoke", "--all", "--yes"],
  ];
  for (const command of commands) {
    const [none, empty] = await Promise.all(
      [elsewhere, { ...elsewhere, DATABASE_URL }].map((env) => runCommand(command, { cwd: home, env })),
    );
    expect(none).toMatchObject({
      code: 2,
      stderr: expect.stringContaining("--data-dir (or TOLLGATE_DATA_DIR) must be the gateway's"),
    });
    expect(empty).toMatchObject({ code: 2, stderr: expect.stringContaining("DATABASE_URL must be the gateway's") });
  }
  expect([readdirSync(home), readFileSync(file, "utf8")]).toEqual([["key"], kept]);
});

test.concurrent("a command that the database does not answer ends, and says what to do", async () => {
  const DATABASE_URL = await (await startPostgres()).freshDatabase();
  const env = { DATABASE_URL, TOLLGATE_MASTER_KEY: newMasterKey() };
  const run = (...command: string[]) => runCommand(command, { cwd: temporaryRoot(), env });
  expect((await run("token", "--tenant", ALICE.tenant, "--user", ALICE.user)).code).toBe(0);
  await using client = new Bun.SQL(DATABASE_URL, { max: 1 });
  const ended = await client.begin(async (tx) => {
    await tx.unsafe("lock table signing_keys in access exclusive mode");
    return run("token", "revoke", "--all", "--yes");
  });
  expect(ended).toMatchObject({
    code: 1,
    stdout: "",
    stderr: expect.stringMatching(/^(.*\n)*tollgate token revoke was cut short: .*\. Run the command again later\.\n$/),
  });
});

test.concurrent("the same new key given twice leaves nothing that a later rotation would take for its own", async () => {
  await using gateway = await startGateway();
  const file = join(gateway.dataDir, "master.key");
  const [first, next] = [readFileSync(file, "utf8"), newMasterKey()];
  const env = { TOLLGATE_DATA_DIR: gateway.dataDir };
  const given = { cwd: gateway.dataDir, env: { ...env, TOLLGATE_NEW_MASTER_KEY: next } };
  expect((await runCommand(["keys", "rotate"], given)).stdout).toContain("the keys are rotated (");
  expect((await runCommand(["keys", "rotate"], given)).stdout).toContain("nothing was done");
  expect((await gateway.run("keys", "rotate")).stdout).toContain("the keys are rotated (");
  expect([`${next}\n`, first]).not.toContain(readFileSync(file, "utf8"));
});

test.concurrent("two gateways rotate only when both have the new key, which each finds in a file without a restart", async () => {
  const DATABASE_URL = await (await startPostgres()).freshDatabase();
  const homes = ["a", "b"].map((name) => {
    const dir = join(mkdtempSync(join(temporaryRoot(), "keys-")), name);
    mkdirSync(dir);
    return join(dir, "key");
  }) as [string, string];
  for (const file of homes) writeFileSync(file, "");
  const key = newMasterKey();
  for (const file of homes) writeFileSync(file, `${key}\n`, { mode: 0o600 });
  await using a = await startGateway({ env: { DATABASE_URL, TOLLGATE_MASTER_KEY_FILE: homes[0] } });
  await using b = await startGateway({ env: { DATABASE_URL, TOLLGATE_MASTER_KEY_FILE: homes[1] } });
  const token = await mint(a);
  const credential = { source: "managed", auth_type: "bearer", plaintext: SECRET };

  const rotating = a.run("keys", "rotate");
  await until(async () => readdirSync(join(homes[0], "..")).includes("key.new"));
  // Gateway b has not got it yet, so nothing is wrapped with it.
  await until(async () => b.log().includes("master_key_missing"));
  expect(await statusOf(b, token)).toBe(200);
  copyFileSync(`${homes[0]}.new`, `${homes[1]}.new`);
  expect(await rotating).toMatchObject({ code: 0 });
  expect(readFileSync(homes[0], "utf8")).toBe(readFileSync(`${homes[1]}.new`, "utf8"));
  const next = await mint(a);
  for (const gateway of [a, b]) {
    expect(await statusOf(gateway, next)).toBe(200);
    await idOf(ask(gateway, next, "/v1/credentials", { ...credential, name: `of ${gateway.url}` }));
  }
  // A new tenant, whose first key the other gateway opens.
  const other = await b.token({ tenant: "other", user: "bob" });
  await idOf(ask(b, other, "/v1/credentials", { ...credential, name: "c" }));
  await idOf(ask(a, other, "/v1/credentials", { ...credential, name: "d" }));

  // On both at once, also where the token is remembered.
  await a.run("token", "revoke", "--tenant", ALICE.tenant);
  for (const gateway of [a, b]) await until(async () => (await statusOf(gateway, next)) === 401);
  expect([await statusOf(a, other), await statusOf(b, other)]).toEqual([200, 200]);
});

test.concurrent("a gateway that was given the old key alone keeps a rotation from beginning", async () => {
  const shared = {
    DATABASE_URL: await (await startPostgres()).freshDatabase(),
    TOLLGATE_MASTER_KEY: newMasterKey(),
  };
  const given = { ...shared, TOLLGATE_NEW_MASTER_KEY: newMasterKey() };
  await using a = await startGateway({ env: given });
  await using b = await startGateway({ env: shared });
  expect(await b.run("keys", "rotate")).toMatchObject({
    code: 2,
    stderr: expect.stringContaining("TOLLGATE_NEW_MASTER_KEY must be set when TOLLGATE_MASTER_KEY is"),
  });
  const token = await mint(a);
  const refused = await a.run("keys", "rotate");
  expect(refused).toMatchObject({ code: 1, stdout: "", stderr: expect.stringContaining("nothing is rotated yet") });
  expect([await statusOf(a, token), await statusOf(b, token)]).toEqual([200, 200]);
  await b.stop();
  await b.restart(given);
  expect(await a.run("keys", "rotate")).toMatchObject({ code: 0 });
  expect([await statusOf(a, await mint(b)), await statusOf(b, token)]).toEqual([200, 200]);
  expect((await a.run("keys", "rotate")).stdout).toContain("rotated to that master key already");
});

test.concurrent("a gateway that was held up during a rotation to a key that it lacks takes no calls until it has the key", async () => {
  using echo = secretUpstream();
  const shared = {
    DATABASE_URL: await (await startPostgres()).freshDatabase(),
    TOLLGATE_MASTER_KEY: newMasterKey(),
  };
  await using a = await startGateway({ env: { ...shared, TOLLGATE_NEW_MASTER_KEY: newMasterKey() } });
  await using b = await startGateway({ env: shared });
  const token = await mint(a);
  const agent = await agentWithSecret(a, token, echo.url, "a");
  process.kill(b.pid, "SIGSTOP");
  // For longer than its lease, and so it counts as gone.
  const rotated = await a.run("keys", "rotate");
  process.kill(b.pid, "SIGCONT");
  expect(rotated).toMatchObject({ code: 0 });
  await until(async () => (await fetch(`${b.url}/readyz`)).status === 503);
  expect([await statusOf(b, token), b.log().includes("master_key_missing")]).toEqual([503, true]);
  expect(await Promise.all(Array.from({ length: 20 }, () => called(a, token, agent)))).toEqual(
    Array(20).fill(`Bearer ${SECRET}`),
  );
});
