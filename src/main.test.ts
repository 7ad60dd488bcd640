import { afterEach, beforeEach, expect, test } from "bun:test";
import { existsSync, mkdtempSync, realpathSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { decodeJwt, decodeProtectedHeader } from "jose";
import { onlyMasterKey } from "../test/support/keys.ts";
import { VARIABLES } from "./config.ts";
import { silentLog } from "./core/log.ts";
import { pathProblem } from "./core/startup.ts";
import { systemClock } from "./core/time.ts";
import { createIdentity } from "./gateway/identity/identity.ts";
import { openKeyring } from "./keys/keyring.ts";
import { loadMasterKey } from "./keys/master-keys.ts";
import { openStore } from "./storage/open.ts";

let dir: string;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), "main-"));
});
afterEach(() => rmSync(dir, { recursive: true }));

async function tollgate(words: string[], environment: Record<string, string> = {}) {
  const child = Bun.spawn([process.execPath, join(import.meta.dir, "main.ts"), ...words], {
    cwd: dir,
    env: { PATH: process.env["PATH"], ...environment },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: 20_000,
  });
  const [out, err] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  return { code: await child.exited, out, err };
}

test("--help names every variable, and --version the version", async () => {
  const help = await tollgate(["--help"]);
  expect(help).toMatchObject({ code: 0, err: "" });
  for (const name of Object.keys(VARIABLES)) expect(help.out).toContain(`  ${name}`);
  expect(await tollgate(["--version"])).toMatchObject({
    code: 0,
    out: expect.stringMatching(/^tollgate \d+\.\d+\.\d+\n$/),
  });
});

test("help prints a page of the manual, and refuses a topic that is none", async () => {
  const page = await tollgate(["help", "payments"]);
  expect(page).toMatchObject({ code: 0, err: "", out: expect.stringMatching(/^# Payments\n/) });
  const refused = await tollgate(["help", "paymets"]);
  expect(refused).toMatchObject({ code: 2, out: "" });
  expect(refused.err).toContain("paymets is neither a command nor a topic; did you mean payments?");
});

test("problems of flags and variables are told together, with status 2, and nothing is made", async () => {
  const { code, out, err } = await tollgate(["--mode", "gateway", "--prot", "1", "--host"], {
    TOLLGATE_WORKERS: "many",
    TOLLGATE_PROT: "8081",
  });
  expect({ code, out }).toEqual({ code: 2, out: "" });
  expect(err).toContain("--prot is not a flag of this command; did you mean --port?");
  expect(err).toContain("--host needs a value: --host H");
  expect(err).toContain("TOLLGATE_WORKERS must be a whole number from 1 to 64");
  expect(err).toContain("  - TOLLGATE_PROT is set but nothing reads it; did you mean TOLLGATE_PORT?\n");
  expect(existsSync(join(dir, "data"))).toBe(false);
});

test("an address that is not this machine's is told as such, by each port", async () => {
  // Of the addresses for documentation, which nobody has.
  const [host, port] = ["192.0.2.1", "0"];
  for (const metrics of ["", "0"]) {
    expect(
      await tollgate(["--mode", "gateway", "--host", host, "--port", port], { TOLLGATE_METRICS_PORT: metrics }),
    ).toEqual({
      code: 2,
      out: "",
      err: expect.stringContaining(
        "\n  - --host must be an address to listen on: 192.0.2.1 is not an address of this machine\n",
      ),
    });
  }
});

test("an unknown command is refused with a hint, and with nothing else", async () => {
  expect(await tollgate(["tokn"])).toEqual({
    code: 2,
    out: "",
    err: expect.stringMatching(
      /^tollgate: tokn is not a command; did you mean token\?\nSee .*bun.* \S+main\.ts help\.\n$/,
    ),
  });
});

test("a facilitator tells all that it lacks, and makes nothing", async () => {
  const { code, out, err } = await tollgate(["--mode", "facilitator"]);
  expect({ code, out }).toEqual({ code: 2, out: "" });
  for (const name of ["TLS_CERT_FILE", "TLS_KEY_FILE", "CLIENT_CA_FILE", "RPC_URLS", "SIGNER_KEY"]) {
    expect(err).toContain(`  - TOLLGATE_${name} must be set`);
  }
  expect(existsSync(join(dir, "data"))).toBe(false);
});

test("a token is made before the first start, and the gateway's identity takes it", async () => {
  const minted = await tollgate(["token", "--tenant", "acme", "--user", "alice", "--scope", "a b", "--ttl", "90s"]);
  // Else a token that was made in a mistyped directory is refused by a gateway elsewhere, and nobody knows why.
  expect(minted.err).toStartWith(
    `tollgate token has created a new database, ${join(realpathSync(dir), "data/tollgate.db")}: `,
  );
  expect([minted.code, minted.err.split("\n").length]).toEqual([0, 2]);
  const token = minted.out.trim();
  expect(minted.out).toBe(`${token}\n`);
  expect(decodeProtectedHeader(token).alg).toBe("EdDSA");
  const { iat = 0, exp, jti } = decodeJwt(token);
  expect([exp, typeof jti]).toEqual([iat + 90, "string"]);

  const dataDir = join(dir, "data");
  const { key } = loadMasterKey(null, dataDir, silentLog);
  const store = await openStore({ databaseUrl: null, dataDir, log: silentLog, clock: systemClock });
  try {
    const keyring = await openKeyring(store, onlyMasterKey(key), systemClock);
    const claims = { tenant: "tenant_id", user: "sub", scope: "scope" };
    const fetchJson = () => Promise.reject(new Error("not asked"));
    const identity = createIdentity({
      claims,
      oidc: null,
      keyring,
      fetchJson,
      clock: systemClock,
      log: silentLog,
    });
    const caller = { tenant: "acme", user: "alice", scopes: new Set(["a", "b"]) };
    expect(await identity.authenticate(`Bearer ${token}`)).toEqual(caller);
    // The store is open here, as a running gateway has it.
    const beside = await tollgate(["token", "--tenant", "acme", "--user", "alice", "--scope", "a b"]);
    expect(await identity.authenticate(`Bearer ${beside.out.trim()}`)).toEqual(caller);
    expect(beside.err).toBe("");
  } finally {
    await store.close();
  }
});

test("the claims have the configured names", async () => {
  const { out } = await tollgate(["token", "--tenant", "acme", "--user", "alice"], {
    TOLLGATE_TENANT_CLAIM: "https://acme.test/org",
    TOLLGATE_USER_CLAIM: "email",
  });
  expect(decodeJwt(out)).toMatchObject({
    "https://acme.test/org": "acme",
    email: "alice",
    iss: "tollgate",
    aud: "tollgate",
  });
});

test("a bad request for a token tells all its problems with status 2", async () => {
  const { code, out, err } = await tollgate(["token", "--tenant", "", "--ttl", "1w", "--scope", " a"], {
    TOLLGATE_OIDC_ISSUER: "https://issuer.test",
    TOLLGATE_OIDC_AUDIENCE: "gateway",
  });
  expect({ code, out }).toEqual({ code: 2, out: "" });
  for (const name of ["--tenant", "--ttl", "--scope", "TOLLGATE_OIDC_ISSUER"])
    expect(err).toContain(`  - ${name} must`);
  expect(err).toContain("  - --user is missing: ");
  for (const ttl of ["0s", "-1h", "366d", "1.5h", "12", "h", "999999999d"]) {
    expect((await tollgate(["token", "--tenant", "t", "--user", "u", `--ttl=${ttl}`])).err).toContain("--ttl must");
  }
});

test("another master key than the database's is told with status 2", async () => {
  await tollgate(["migrate"]);
  expect((await tollgate(["token", "--tenant", "t", "--user", "u"])).code).toBe(0);
  writeFileSync(join(dir, "data", "master.key"), `${Buffer.alloc(32).toString("base64")}\n`);
  const { code, out, err } = await tollgate(["token", "--tenant", "t", "--user", "u"]);
  expect({ code, out }).toEqual({ code: 2, out: "" });
  expect(err).toContain(`the master key (${join(dir, "data", "master.key")}) must be the key`);
});

test("migrate makes the database, which it tells, and ends well, again and again", async () => {
  const path = join(realpathSync(dir), "elsewhere/tollgate.db");
  for (const out of [`created a new database, ${path}\n`, `${path} is up to date\n`])
    expect(await tollgate(["migrate", "--data-dir", "elsewhere"])).toMatchObject({ code: 0, out });
  expect(existsSync(join(dir, "elsewhere", "tollgate.db"))).toBe(true);
});

test("a disk that is full or fails is no problem that the path's operator can put right", () => {
  const problem = (code: string) => pathProblem(Object.assign(new Error("no"), { code, path: "/data/tollgate.db" }));
  expect(["EACCES", "EISDIR", "EIO", "ENOSPC", "ENOENT"].map((code) => problem(code)?.message ?? null)).toEqual([
    "/data/tollgate.db must be readable and writable by this user (EACCES)",
    "/data/tollgate.db must be a file (EISDIR)",
    ...[null, null, null],
  ]);
});
