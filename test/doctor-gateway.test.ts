// `tollgate doctor --mode gateway`: all well beside a real gateway, on both databases, with a real issuer and a real
// facilitator; each thing that can be wrong of it provoked; and nothing changed by any of it.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, rmSync, statSync, writeFileSync } from "node:fs";
import { createServer } from "node:https";
import type { AddressInfo } from "node:net";
import { join } from "node:path";
import { issueCa, issueClient, issueServer } from "../src/cli/pki.ts";
import { startChain, type TestChain } from "./support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "./support/chain/facilitator.ts";
import { openPayingTenant } from "./support/chain/paying.ts";
import { ask, idOf } from "./support/gateway/api.ts";
import { type DoctorRun, runDoctor, snapshot } from "./support/gateway/doctor.ts";
import { eachDatabase, executeIn, type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { type Environment, runCommand, temporaryRoot } from "./support/gateway/process.ts";
import { type OidcServer, startOidc } from "./support/http/oidc.ts";
import { nextVersion } from "./support/stores/next-version.ts";

const DAY_MS = 86_400_000;
const SECRET = "hunter2-of-a-tenant";

let home: string;
let chain: TestChain;
let facilitator: Facilitator;
let oidc: OidcServer;

beforeAll(async () => {
  home = mkdtempSync(join(temporaryRoot(), "doctor-"));
  [chain, oidc] = await Promise.all([startChain(), startOidc()]);
  facilitator = await startFacilitator(chain);
});
afterAll(async () => {
  await Promise.all([facilitator[Symbol.asyncDispose](), oidc.stop()]);
  await chain.stop();
  rmSync(home, { recursive: true, force: true });
});

const says = (start: string) => expect.stringMatching(new RegExp(`^${start}`));

function doctor(env: Environment, program?: readonly string[]): Promise<DoctorRun> {
  return runDoctor(["--mode", "gateway"], { cwd: home, env, ...(program && { program }) });
}

async function found(env: Environment, program?: readonly string[]): Promise<[number, ...string[]]> {
  const { code, bad } = await doctor(env, program);
  return [code, ...bad];
}

/** A Vault or an issuer: it answers every path the same. */
function answering(status: number, body: unknown, headers: Readonly<Record<string, string>> = {}) {
  return Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => Response.json(body, { status, headers }) });
}

/** What a test may spoil of a facilitator that is a stand-in. */
interface Spoilt {
  readonly network?: string;
  readonly status?: number;
  readonly aheadMs?: number;
  /** When its certificate, or the tenant's, was issued. */
  readonly serverDaysAgo?: number;
  readonly clientDaysAgo?: number;
  readonly isForeign?: true;
}

/** Over mutual TLS, with a client of its own. */
async function standIn({ network = "base", status = 200, aheadMs = 0, ...certificates }: Spoilt) {
  const then = (days = 0) => Date.now() - days * DAY_MS;
  const { serverDaysAgo, clientDaysAgo, isForeign } = certificates;
  const [ca, other] = await Promise.all([issueCa(then(400)), issueCa(then(400))]);
  const server = await issueServer(ca, ["127.0.0.1"], then(serverDaysAgo));
  const client = await issueClient(ca, "tenant", then(clientDaysAgo));
  const tls = { ...server, ca: ca.cert, requestCert: true, rejectUnauthorized: true };
  const listener = createServer(tls, (_request, response) => {
    response.setHeader("date", new Date(Date.now() + aheadMs).toUTCString());
    response.writeHead(status, { "content-type": "application/json" });
    response.end(JSON.stringify({ kinds: [{ x402Version: 1, scheme: "exact", network }] }));
  });
  await new Promise<void>((resolve) => listener.listen(0, "127.0.0.1", resolve));
  return {
    url: `https://127.0.0.1:${(listener.address() as AddressInfo).port}`,
    client: { bundle: client.cert + client.key + (isForeign === undefined ? ca.cert : other.cert) },
    stop: () => void listener.close(),
  };
}

eachDatabase((database) => {
  let gateway: Gateway;
  let env: Environment;
  beforeAll(async () => {
    const own = { ...(await database.fresh()), TOLLGATE_ALLOW_HOSTS: "127.0.0.1" };
    gateway = await startGateway({ env: own });
    env = { ...own, TOLLGATE_DATA_DIR: gateway.dataDir };
    await openPayingTenant(gateway, facilitator);
  });
  afterAll(() => gateway[Symbol.asyncDispose]());

  /** Every row of the database, or every file of the data directory. */
  async function everything(): Promise<unknown> {
    const url = env["DATABASE_URL"];
    if (url === undefined) return snapshot(gateway.dataDir);
    await using client = new Bun.SQL(url, { max: 1, database: new URL(url).pathname.slice(1) });
    const tables = await client.unsafe<{ name: string }[]>(
      "select oid::regclass::text as name from pg_class where relkind in ('r', 'i', 'S') and relnamespace = 'public'::regnamespace order by 1",
    );
    const rows = tables.filter(({ name }) => !/_(idx|pkey|key)\b/.test(name));
    const all = await Promise.all(
      rows.map(({ name }) =>
        client
          .unsafe(`select '${name}', md5(string_agg(t::text, '|' order by t::text)) from ${name} t`)
          .catch(() => name),
      ),
    );
    return { names: tables.map(({ name }) => name), all };
  }

  const write = (statement: string) => executeIn(gateway, env, statement);

  test("all is well beside a running gateway, with an issuer, a vault and a facilitator", async () => {
    await using vault = answering(200, { data: { ttl: 0, id: "never shown" } });
    const { lines, stdout, ...rest } = await doctor({
      ...env,
      TOLLGATE_OIDC_ISSUER: oidc.issuer,
      TOLLGATE_OIDC_AUDIENCE: oidc.audience,
      TOLLGATE_VAULT_ADDR: vault.url.href,
      TOLLGATE_VAULT_TOKEN: "vault-token",
    });
    expect(rest).toEqual({ code: 0, bad: [], stderr: "" });
    expect(lines.map(({ what }) => what)).toEqual([
      "configuration",
      ...(database.name === "sqlite" ? ["data directory", "database"] : ["database", "database clock"]),
      "keys",
      "memory",
      "issuer",
      "vault",
      says(`facilitator ${facilitator.url} of tenant-\\d+$`),
    ]);
    expect(lines.find(({ what }) => what === "memory")?.text).toBe(
      "up to 1040 MiB on top of the program itself (see tollgate help operations)",
    );
    expect(lines.at(-1)?.text).toBe(
      "it answers and supports base; run `tollgate account list` at the facilitator to see whether the tenant has an account",
    );
    expect(stdout).not.toMatch(/vault-token|never shown|test-only/);
  });

  test("tenants that have a price and nobody who collects it are named, a few of them", async () => {
    const price = { amount: "1", asset: "USDC", network: "base", pay_to: `0x${"11".repeat(20)}` };
    const upstream = { upstream_url: "http://127.0.0.1:1/", pricing: price };
    const made: (readonly [token: string, id: string])[] = [];
    for (const [tenant, name] of [
      ["none-1", "a"],
      ["none-1", "b"],
      ["none-2", "a"],
      ["none-3", "a"],
      ["none-4", "a"],
    ]) {
      const token = await gateway.token({ tenant: tenant ?? "", user: "me" });
      made.push([token, await idOf(ask(gateway, token, "/v1/agents", { ...upstream, name }))]);
    }
    const [before, ...others] = (await found(env)).slice(1);
    expect(before).toBe(
      "warn facilitators: tenant none-1 has 2 priced agents and no facilitator: its calls are made and nothing is collected; tollgate settlement set names one",
    );
    expect(others).toEqual([
      says("warn facilitators: tenant none-2 has 1 priced agent and no facilitator"),
      says("warn facilitators: tenant none-3 has 1 priced agent and no facilitator"),
      says("warn facilitators: more tenants have priced agents and no facilitator"),
    ]);
    for (const [token, id] of made) {
      const headers = { authorization: `Bearer ${token}` };
      expect((await fetch(`${gateway.url}/v1/agents/${id}`, { method: "DELETE", headers })).ok).toBe(true);
    }
    expect(await found(env)).toEqual([0]);
  });

  test("another master key opens no key, and no credential", async () => {
    const other = Buffer.alloc(32, 7).toString("base64");
    expect(await found({ ...env, TOLLGATE_MASTER_KEY: other })).toEqual([
      1,
      says("fail keys: \\d of \\d keys do not open with the master key \\(tenant(-key:1)?:.*the key must be the one"),
      says(
        "fail facilitator \\S+ of tenant-\\d+: its credential can't be used: the stored secret can't be decrypted; ",
      ),
    ]);
  });

  test("a stopped gateway is left as it is, also one that was killed", async () => {
    if (database.name === "sqlite") {
      // It shows the same to the same facilitator as the first one. What it wrote is in the log alone.
      await openPayingTenant(gateway, facilitator);
      await gateway.kill9();
      const killed = snapshot(gateway.dataDir);
      expect(statSync(join(gateway.dataDir, "tollgate.db-wal")).size).toBeGreaterThan(0);
      const { code, bad, lines } = await doctor(env);
      expect([code, bad, lines.at(-1)?.what]).toEqual([
        0,
        [],
        says(`facilitator ${facilitator.url} of tenant-\\d+ and 1 more$`),
      ]);
      expect(snapshot(gateway.dataDir)).toEqual(killed);
      await gateway.restart();
    }
    await gateway.stop();
    const stopped = await everything();
    expect(await found(env)).toEqual([0]);
    expect(await everything()).toEqual(stopped);
  });

  test("an older schema warns, a newer one warns or fails, and none is migrated", async () => {
    await write("insert into schema_versions (version, applied_at, floor) values (1000, 0, 1)");
    const fitting = await everything();
    expect(await found(env)).toEqual([
      0,
      says(
        "warn database: it has schema version 1000; this program knows versions up to \\d+, and may still run on it",
      ),
    ]);
    expect(await everything()).toEqual(fitting);
    await write("update schema_versions set floor = 1000 where version = 1000");
    const newer = await everything();
    expect(await found(env)).toEqual([
      1,
      says(
        "fail database: it has schema version 1000, on which only programs that know version 1000 may run, and this",
      ),
      says("warn facilitators: not checked without a schema that fits"),
    ]);
    expect(await everything()).toEqual(newer);
    await write("delete from schema_versions where version = 1000");
    const older = await everything();
    expect(await found(env, nextVersion())).toEqual([
      0,
      says("warn database: it has schema version \\d+, and the next start of this program migrates it to \\d+; take a"),
      says("warn facilitators: not checked without a schema that fits"),
    ]);
    expect(await everything()).toEqual(older);
  });
});

describe("beside a gateway", () => {
  let gateway: Gateway;
  let env: Environment;
  beforeAll(async () => {
    gateway = await startGateway();
    env = { TOLLGATE_DATA_DIR: gateway.dataDir, TOLLGATE_ALLOW_HOSTS: "127.0.0.1" };
    await gateway.token({ tenant: "acme", user: "alice" });
  });
  afterAll(() => gateway[Symbol.asyncDispose]());

  test("an issuer must answer with keys that verify", async () => {
    const look = (issuer: string, more: Environment = {}) =>
      found({ ...env, TOLLGATE_OIDC_ISSUER: issuer, TOLLGATE_OIDC_AUDIENCE: "us", ...more });
    await using none = answering(200, { keys: [{ kty: "oct", k: SECRET }] });
    await using late = answering(
      200,
      { keys: [{ kty: "OKP", crv: "Ed25519", x: "A".repeat(43) }] },
      {
        date: new Date(Date.now() - 60_000).toUTCString(),
      },
    );
    const [dead, other, noKeys, skewed] = await Promise.all([
      look("http://127.0.0.1:1"),
      look(none.url.origin),
      look(none.url.origin, { TOLLGATE_JWKS_URL: none.url.href }),
      look(late.url.origin, { TOLLGATE_JWKS_URL: late.url.href }),
    ]);
    expect(dead).toEqual([1, says("fail issuer: 127.0.0.1:1: ECONNREFUSED; TOLLGATE_OIDC_ISSUER")]);
    expect(other).toEqual([1, says("fail issuer: \\S+: the discovery document names another issuer; ")]);
    expect(noKeys).toEqual([1, says("fail issuer: \\S+: the key set has no key that can verify a token; ")]);
    expect(skewed).toEqual([0, says("warn issuer: its clock is (59|6\\d) s behind this machine's clock; ")]);
  });

  test("a vault must be open and take the token", async () => {
    const look = (url: string) => found({ ...env, TOLLGATE_VAULT_ADDR: url, TOLLGATE_VAULT_TOKEN: SECRET });
    await using closed = answering(503, { errors: ["Vault is sealed"] });
    await using silent = answering(403, { errors: ["permission denied"] });
    await using refusing = answering(403, {
      errors: ["2 errors occurred:\n\t* permission denied\n\t* invalid token\n\n"],
    });
    const [sealed, refused, untold, dead] = await Promise.all([
      look(closed.url.href),
      look(refusing.url.href),
      look(silent.url.href),
      look("http://127.0.0.1:1"),
    ]);
    expect(sealed).toEqual([1, says("fail vault: it answers 503: it is sealed, or has no leader; unseal it")]);
    expect(refused).toEqual([1, says("fail vault: it does not know the token; TOLLGATE_VAULT_TOKEN must be valid")]);
    expect(untold).toEqual([
      0,
      says("warn vault: it does not say whether the token is valid; TOLLGATE_VAULT_TOKEN must be valid"),
    ]);
    expect(dead).toEqual([1, says("fail vault: 127.0.0.1:1: ECONNREFUSED; TOLLGATE_VAULT_ADDR must be")]);
  });

  test("each tenant's facilitator is asked with what the tenant shows it, and none of its secrets is told", async () => {
    const spoilt: readonly (readonly [Spoilt, ...string[]])[] = [
      [
        { aheadMs: 45_000, serverDaysAgo: 390, clientDaysAgo: 390 },
        "warn T: its clock is 4\\d s ahead of this machine's clock; ",
        "warn T: its certificate expires in 6 days, at .*; it must be renewed",
        "warn T: the tenant's client certificate expires in 6 days, at .*; the tenant must",
      ],
      [{ serverDaysAgo: 398 }, "fail T: 127.0.0.1:\\d+: CERT_HAS_EXPIRED; its certificate must be renewed"],
      [
        { clientDaysAgo: 398 },
        "fail T: 127.0.0.1:\\d+: \\w+; check the URL \\(tollgate settlement set\\), or tell its operator",
        "fail T: the tenant's client certificate expired at ",
      ],
      [{ network: "base-sepolia" }, "fail T: it does not settle on base; "],
      [{ status: 404 }, "warn T: it answers 404 to GET /supported; check the URL"],
      [
        { status: 503 },
        "fail T: it answers 503 to GET /supported; check the URL \\(tollgate settlement set\\), or tell its operator",
      ],
      [{ isForeign: true }, "fail T: 127.0.0.1:\\d+: (UNABLE_TO|SELF_SIGNED)_\\w+; name its CA in TOLLGATE_CA_FILE"],
    ];
    const opened = await Promise.all(
      spoilt.map(async ([how, ...lines]) => {
        const server = await standIn(how);
        const { name } = await openPayingTenant(gateway, server);
        return {
          server,
          name,
          expected: lines.map((line) => line.replace("T", `facilitator ${server.url} of ${name}`)),
        };
      }),
    );
    // Its credential is no bundle: a header, in the clear to whom it is for.
    const dead = await openPayingTenant(gateway, { url: "https://127.0.0.1:1", client: { bundle: SECRET } });
    const { code, bad, stdout, stderr } = await doctor(env);
    for (const { server } of opened) server.stop();
    expect(code).toBe(1);
    expect(bad.toSorted()).toEqual(
      [
        ...opened.flatMap(({ expected }) => expected),
        `fail facilitator https://127.0.0.1:1 of ${dead.name}: 127.0.0.1:1: ECONNREFUSED; check the URL`,
      ]
        .toSorted()
        .map(says),
    );
    const shown = stdout + stderr;
    expect(shown).not.toContain(SECRET);
    expect(shown).not.toContain("PRIVATE KEY");
    // Without the exemption, the host rules refuse them all, as they would refuse a settlement.
    const { bad: blocked } = await doctor({ ...env, TOLLGATE_ALLOW_HOSTS: "" });
    expect(blocked.filter((line) => / is not allowed; TOLLGATE_ALLOW_HOSTS exempts/.test(line))).toHaveLength(8);
  });
});

test("before the first start nothing is made, and what is there is left as it is", async () => {
  const data = join(home, "new");
  expect(await found({ TOLLGATE_DATA_DIR: join(data, "deep") })).toEqual([0]);
  expect(existsSync(data)).toBe(false);
  mkdirSync(data, { mode: 0o700 });
  writeFileSync(join(data, "master.key"), `${Buffer.alloc(32, 1).toString("base64")}\n`, { mode: 0o600 });
  const before = snapshot(home);
  expect(await found({ TOLLGATE_DATA_DIR: data })).toEqual([0]);
  expect(snapshot(home)).toEqual(before);
  writeFileSync(join(data, "tollgate.db"), "this is no database at all, whatever its name says");
  expect(await found({ TOLLGATE_DATA_DIR: data, TOLLGATE_MASTER_KEY: Buffer.alloc(32, 1).toString("base64") })).toEqual(
    [
      1,
      says("fail database: \\S+tollgate.db can't be read as a database \\(SQLITE_NOTADB\\); check the file"),
      says("warn keys: not checked without the database"),
      says("warn facilitators: not checked without the database"),
    ],
  );
});

test("the data directory of the other service is not good, although its database is", async () => {
  const [gateways, facilitators, keyed] = [join(home, "gateways"), join(home, "facilitators"), join(home, "keyed")];
  const made = [
    { words: ["token", "--tenant", "acme", "--user", "me"], dir: gateways },
    { words: ["account", "add", "a", "--cert", join(home, "other.crt")], dir: facilitators },
  ];
  const ca = await issueCa(Date.now());
  writeFileSync(join(home, "other.crt"), (await issueClient(ca, "other", Date.now())).cert);
  writeFileSync(join(home, "ca.crt"), ca.cert);
  const server = await issueServer(ca, ["127.0.0.1"], Date.now());
  writeFileSync(join(home, "server.pem"), server.cert + server.key);
  for (const { words, dir } of made)
    expect((await runCommand([...words, "--data-dir", dir], { cwd: home, env: {} })).code).toBe(0);
  mkdirSync(keyed, { mode: 0o700 });
  writeFileSync(join(keyed, "master.key"), `${Buffer.alloc(32, 1).toString("base64")}\n`, { mode: 0o600 });
  const own = (service: string, rest: string) =>
    says(
      `fail data directory: --data-dir \\(or TOLLGATE_DATA_DIR\\) must be the ${service}'s data directory: \\S+ ${rest}; name the ${service}'s own`,
    );
  const [code, ...bad] = await found({ TOLLGATE_DATA_DIR: facilitators });
  const unchecked = ["keys: not checked without the gateway's own data directory", "facilitators: not checked without"];
  expect([code, ...bad]).toEqual([
    1,
    own("gateway", "is a facilitator's"),
    ...unchecked.map((text) => says(`warn ${text}`)),
  ]);
  const env: Environment = {
    TOLLGATE_TLS_CERT_FILE: join(home, "server.pem"),
    TOLLGATE_TLS_KEY_FILE: join(home, "server.pem"),
    TOLLGATE_CLIENT_CA_FILE: join(home, "ca.crt"),
    TOLLGATE_RPC_URLS: chain.url,
    TOLLGATE_SIGNER_KEY: "5d".repeat(32),
  };
  const facilitatorIn = async (dir: string) => {
    const run = await runDoctor(["--mode", "facilitator", "--data-dir", dir], { cwd: home, env });
    return run.bad.filter((line) => line.includes("data"));
  };
  expect(await facilitatorIn(gateways)).toEqual([own("facilitator", "is a gateway's")]);
  expect(await facilitatorIn(keyed)).toEqual([own("facilitator", "holds a master.key, so it is a gateway's")]);
});
