import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { ALICE, OTHER_SERVER, SERVER, TEST_CA } from "../../test/support/http/certificates.ts";
import { BASE } from "../../test/support/network.ts";
import { issueCa } from "../cli/pki.ts";
import { loadConfig, type Purpose } from "../config.ts";

const dir = mkdtempSync(join(tmpdir(), "config-"));
afterAll(() => rmSync(dir, { recursive: true }));

function file(name: string, text: string): string {
  writeFileSync(join(dir, name), text);
  return join(dir, name);
}

const KEY = "11".repeat(32);
const OTHER_PEM = "is a PEM file, but holds something else";
const REQUIRED = {
  TOLLGATE_TLS_CERT_FILE: file("server.crt", SERVER.cert),
  TOLLGATE_TLS_KEY_FILE: file("server.key", SERVER.key),
  TOLLGATE_CLIENT_CA_FILE: file("ca.crt", TEST_CA),
  TOLLGATE_RPC_URLS: "http://127.0.0.1:8545",
  TOLLGATE_SIGNER_KEY: KEY,
};

function loadAs(purpose: Purpose, environment: Record<string, string>, flags: Record<string, string> = {}) {
  const settings = { TOLLGATE_MODE: "facilitator", TOLLGATE_DATA_DIR: join(dir, "data"), ...environment };
  return loadConfig(purpose, new Map(Object.entries(flags)), settings, false);
}

const load = (changed: Record<string, string> = {}, flags: Record<string, string> = {}) =>
  loadAs("serve", { ...REQUIRED, ...changed }, flags);

/** The names that the problems begin with. */
function blamed(changed: Record<string, string>, flags: Record<string, string> = {}): string[] {
  const { config, problems } = load(changed, flags);
  expect(config === null).toBe(problems.length > 0);
  return problems.map((problem) => problem.split(" ")[0]!);
}

test("settings that have no default are required, and all that miss are told at once", () => {
  expect(loadAs("serve", {}).problems).toEqual([
    "TOLLGATE_TLS_CERT_FILE must be set",
    "TOLLGATE_TLS_KEY_FILE must be set",
    "TOLLGATE_CLIENT_CA_FILE must be set",
    "TOLLGATE_RPC_URLS must be set",
    "TOLLGATE_SIGNER_KEY must be set (or TOLLGATE_REMOTE_SIGNER_URL)",
  ]);
});

test("every setting that is not required has a default", () => {
  const { config, problems, warnings } = load();
  expect([problems, warnings]).toEqual([[], []]);
  expect(config?.facilitator).toEqual({
    network: BASE,
    host: "127.0.0.1",
    port: 8443,
    openPort: 8081,
    dataDir: join(dir, "data"),
    databaseUrl: null,
    drainMs: 30_000,
    tracing: null,
    tls: { cert: SERVER.cert, key: SERVER.key, clientCa: TEST_CA },
    readTls: expect.any(Function),
    rpcUrls: ["http://127.0.0.1:8545"],
    signers: { kind: "local", keys: [`0x${KEY}`] },
    limits: {
      maxPerTransaction: 10_000_000n,
      dailyCeiling: 1_000_000_000n,
      dailyGasWei: 10n ** 15n,
      dailyGasAllWei: 0n,
      minValue: 100n,
      gasLowWaterWei: 10n ** 15n,
      inclusionTimeoutMs: 15_000,
      maxFee: 5n * 10n ** 9n,
      confirmations: 12,
      batch: 0,
    },
  });
  expect(readdirSync(dir)).not.toContain("data");
});

test("all problems are told at once, and none repeats a value", () => {
  const bad = {
    TOLLGATE_OPEN_PORT: "hunter2",
    TOLLGATE_TLS_CERT_FILE: "hunter2",
    TOLLGATE_TLS_KEY_FILE: file("bad.key", "hunter2"),
    TOLLGATE_CLIENT_CA_FILE: "hunter2",
    TOLLGATE_RPC_URLS: "https://u:hunter2@node.test",
    TOLLGATE_SIGNER_KEY: `${KEY},hunter2`,
    TOLLGATE_REMOTE_SIGNER_URL: "ws://hunter2",
    TOLLGATE_REMOTE_SIGNER_ADDRESS: "0xhunter2",
    TOLLGATE_MAX_PER_TRANSACTION: "1e6 hunter2",
    TOLLGATE_DAILY_CEILING: "-1",
    TOLLGATE_GAS_LOW_WATER_WEI: "0x10",
    TOLLGATE_INCLUSION_TIMEOUT_MS: "0",
    TOLLGATE_CONFIRMATIONS: "0",
    TOLLGATE_MAX_FEE_GWEI: "0",
    TOLLGATE_DAILY_GAS_WEI: "1e15",
  };
  expect(blamed(bad).sort()).toEqual(Object.keys(bad).sort());
  expect(load(bad).problems.join()).not.toContain("hunter2");
});

describe("the settings of each service", () => {
  test("what is set for the other service is not even looked at", () => {
    const gateway = {
      TOLLGATE_MODE: "gateway",
      TOLLGATE_OPEN_PORT: "x",
      TOLLGATE_TLS_KEY_FILE: "/nowhere",
    };
    expect(loadAs("serve", gateway).problems).toEqual([]);
    expect(loadAs("serve", gateway).config).toMatchObject({ port: 8080, facilitator: null });
    expect(blamed({ TOLLGATE_WORKERS: "x", TOLLGATE_SECRETS_DIR: "/nowhere", TOLLGATE_VAULT_TOKEN: "t" })).toEqual([]);
  });

  test("the facilitator keeps no secrets in the database: it needs no master key", () => {
    const DATABASE_URL = "postgres://u:p@h/d";
    expect(load({ DATABASE_URL, TOLLGATE_DATA_DIR: "/dev/null" }).config?.facilitator?.databaseUrl).toBe(DATABASE_URL);
    for (const purpose of ["migrate", "account"] as const) {
      expect(loadAs(purpose, { DATABASE_URL }).problems).toEqual([]);
    }
    expect(loadAs("migrate", { DATABASE_URL, TOLLGATE_MODE: "" }).problems[0]).toContain("TOLLGATE_MASTER_KEY");
  });

  test("the command for accounts needs neither service's variables", () => {
    const environment = { TOLLGATE_MODE: "", TOLLGATE_WORKERS: "x", TOLLGATE_RPC_URLS: "x" };
    expect(loadAs("account", environment).problems).toEqual([]);
    expect(loadAs("account", { TOLLGATE_DATA_DIR: "/dev/null" }).problems[0]).toContain("TOLLGATE_DATA_DIR");
  });
});

describe("the listeners", () => {
  test("the ports of the two listeners differ, unless both are free ones", () => {
    expect(blamed({ TOLLGATE_OPEN_PORT: "8443" })).toEqual(["TOLLGATE_OPEN_PORT"]);
    expect(blamed({}, { port: "8081" })).toEqual(["TOLLGATE_OPEN_PORT"]);
    expect(blamed({ TOLLGATE_METRICS_PORT: "8443" })).toEqual(["TOLLGATE_METRICS_PORT"]);
    expect(blamed({ TOLLGATE_METRICS_PORT: "8081" })).toEqual(["TOLLGATE_METRICS_PORT"]);
    expect(load({ TOLLGATE_METRICS_PORT: "0" }, { port: "0" }).config?.metricsPort).toBe(0);
    expect(load({ TOLLGATE_OPEN_PORT: "0" }, { port: "0" }).config?.facilitator).toMatchObject({
      port: 0,
      openPort: 0,
    });
  });
});

describe("the settings of TLS", () => {
  test("a file that is missing, can't be read, is no PEM or another PEM is told as such, by its variable and path", () => {
    const must = "must be the path of a readable file with PEM certificates";
    const cases = [
      ["TOLLGATE_TLS_CERT_FILE", `${must}: `, join(dir, "none.crt"), "does not exist"],
      ["TOLLGATE_TLS_CERT_FILE", `${must}: `, dir, "is a directory"],
      ["TOLLGATE_TLS_CERT_FILE", `${must}: `, file("text.crt", "hello"), "is not a PEM file"],
      ["TOLLGATE_CLIENT_CA_FILE", `${must} of a CA, and no others: `, REQUIRED.TOLLGATE_TLS_CERT_FILE, OTHER_PEM],
      ["TOLLGATE_TLS_KEY_FILE", "", REQUIRED.TOLLGATE_TLS_CERT_FILE, OTHER_PEM],
      ["TOLLGATE_SIGNER_KEY_FILE", "", join(dir, "none"), "does not exist"],
      ["TOLLGATE_SIGNER_KEY_FILE", "", file("empty", ""), "is empty"],
    ] as const;
    for (const [name, rule, path, problem] of cases) {
      const { problems } = load({
        ...(name === "TOLLGATE_SIGNER_KEY_FILE" && { TOLLGATE_SIGNER_KEY: "" }),
        [name]: path,
      });
      expect(problems[0]).toContain(`${name} ${rule}`);
      expect(problems[0]).toEndWith(`: ${path} ${problem}`);
    }
  });

  test("a secret that was set in the variable of its file is not taken for a path, and not shown", () => {
    for (const secret of [KEY, `${"Ab/".repeat(14)}A=`, SERVER.key]) {
      const { problems } = load({
        TOLLGATE_SIGNER_KEY: "",
        TOLLGATE_SIGNER_KEY_FILE: secret,
        TOLLGATE_TLS_KEY_FILE: secret,
      });
      expect(problems.filter((problem) => /: that file /.test(problem)).length).toBe(2);
      expect(problems.join("\n")).not.toContain(secret.slice(0, 20));
    }
  });

  test("the key has to belong to the first certificate", () => {
    const TOLLGATE_TLS_KEY_FILE = file("other.key", OTHER_SERVER.key);
    expect(blamed({ TOLLGATE_TLS_KEY_FILE })).toEqual(["TOLLGATE_TLS_KEY_FILE"]);
    const chain = file("chain.crt", `${OTHER_SERVER.cert}${SERVER.cert}`);
    expect(blamed({ TOLLGATE_TLS_CERT_FILE: chain })).toEqual(["TOLLGATE_TLS_KEY_FILE"]);
    expect(blamed({ TOLLGATE_TLS_CERT_FILE: chain, TOLLGATE_TLS_KEY_FILE })).toEqual([]);
  });

  test("certificate and key may be in one file", () => {
    const both = file("both.pem", `Bag Attributes\n${SERVER.cert}${SERVER.key}`);
    const tls = load({ TOLLGATE_TLS_CERT_FILE: both, TOLLGATE_TLS_KEY_FILE: both }).config?.facilitator?.tls;
    expect(tls).toMatchObject({ cert: SERVER.cert, key: SERVER.key });
  });

  test("keys may have every usual form, but not be locked by a passphrase", () => {
    const converted = (...options: string[]) => {
      const run = Bun.spawnSync(["openssl", ...options], {
        stdin: Buffer.from(SERVER.key),
        stderr: "ignore",
      });
      return file("converted.key", run.stdout.toString());
    };
    expect(blamed({ TOLLGATE_TLS_KEY_FILE: converted("ec") })).toEqual([]);
    const locked = converted("pkcs8", "-topk8", "-passout", "pass:x");
    expect(blamed({ TOLLGATE_TLS_KEY_FILE: locked })).toEqual(["TOLLGATE_TLS_KEY_FILE"]);
  });

  test("clients are vouched for by a CA, not by a certificate of their own", () => {
    for (const text of [ALICE.cert, `${TEST_CA}${ALICE.cert}`, "", "-----BEGIN CERTIFICATE-----"]) {
      expect(blamed({ TOLLGATE_CLIENT_CA_FILE: file("clients.crt", text) })).toEqual(["TOLLGATE_CLIENT_CA_FILE"]);
    }
    expect(blamed({ TOLLGATE_CLIENT_CA_FILE: file("clients.crt", `${TEST_CA}\n${TEST_CA}`) })).toEqual([]);
  });
});

test("certificates that do not hold, or not for long, are warned of", async () => {
  const day = 86_400_000;
  const at = async (daysAgo: number) => {
    const { cert, key } = await issueCa(Date.now() - daysAgo * day);
    const files = {
      TOLLGATE_TLS_CERT_FILE: file("aged.crt", cert),
      TOLLGATE_TLS_KEY_FILE: file("aged.key", key),
    };
    return load(files).warnings;
  };
  const holds = "TOLLGATE_TLS_CERT_FILE holds a certificate that";
  expect(await at(3652 - 15)).toEqual([]);
  expect(await at(3652 - 13)).toEqual([expect.stringContaining(`${holds} expires at 20`)]);
  expect(await at(3653)).toEqual([expect.stringContaining(`${holds} expired at `)]);
  expect(await at(-1)).toEqual([expect.stringContaining(`${holds} is not valid before `)]);
});

describe("the signer", () => {
  const REMOTE = {
    TOLLGATE_SIGNER_KEY: "",
    TOLLGATE_REMOTE_SIGNER_URL: "http://signer.test:9000",
    TOLLGATE_REMOTE_SIGNER_ADDRESS: `0x${"Ab".repeat(20)}`,
  };
  const keys = (TOLLGATE_SIGNER_KEY: string) => load({ TOLLGATE_SIGNER_KEY }).config?.facilitator?.signers;

  test("is remote or local, and never both", () => {
    expect(load(REMOTE).config?.facilitator?.signers).toEqual({
      kind: "remote",
      url: "http://signer.test:9000",
      address: `0x${"ab".repeat(20)}`,
    });
    expect(blamed({ ...REMOTE, TOLLGATE_SIGNER_KEY: KEY })).toEqual(["TOLLGATE_SIGNER_KEY"]);
    expect(blamed({ ...REMOTE, TOLLGATE_REMOTE_SIGNER_ADDRESS: "" })).toEqual(["TOLLGATE_REMOTE_SIGNER_ADDRESS"]);
    expect(blamed({ ...REMOTE, TOLLGATE_REMOTE_SIGNER_ADDRESS: `0x${"0".repeat(40)}` })).toEqual([
      "TOLLGATE_REMOTE_SIGNER_ADDRESS",
    ]);
    expect(blamed({ TOLLGATE_REMOTE_SIGNER_ADDRESS: REMOTE.TOLLGATE_REMOTE_SIGNER_ADDRESS })).toEqual([
      "TOLLGATE_REMOTE_SIGNER_ADDRESS",
    ]);
  });

  test("has one or several keys, from a file too", () => {
    const list = [`0x${"aB".repeat(32)}`, KEY];
    const expected = { kind: "local", keys: [`0x${"ab".repeat(32)}`, `0x${KEY}`] } as const;
    expect(keys(list.join(","))).toEqual(expected);
    const fromFile = {
      TOLLGATE_SIGNER_KEY: "",
      TOLLGATE_SIGNER_KEY_FILE: file("keys", `${list.join(",\n")},\n`),
    };
    expect(load(fromFile).config?.facilitator?.signers).toEqual(expected);
  });

  test("has keys of the curve only, each once", () => {
    const order = "fffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141";
    expect(keys(order.replace(/41$/, "40"))).toMatchObject({ keys: [`0x${order.replace(/41$/, "40")}`] });
    for (const bad of [
      order,
      "0".repeat(64),
      "f".repeat(64),
      KEY.slice(1),
      `${KEY}1`,
      `${KEY} ${KEY}`,
      `${KEY},0x${KEY}`,
      `${"ab".repeat(32)},${"AB".repeat(32)}`,
      ",",
    ]) {
      expect([bad, blamed({ TOLLGATE_SIGNER_KEY: bad })]).toEqual([bad, ["TOLLGATE_SIGNER_KEY"]]);
    }
  });
});

test("nodes are asked in the order of the list", () => {
  const urls = (TOLLGATE_RPC_URLS: string) => load({ TOLLGATE_RPC_URLS }).config?.facilitator?.rpcUrls;
  expect(urls(" https://a.test/v2/key?x=1 , http://b.test ,")).toEqual(["https://a.test/v2/key?x=1", "http://b.test"]);
  for (const bad of ["a.test", "wss://a.test", "http://a.test,b", "http://a.test,http://a.test", ","]) {
    expect([bad, urls(bad)]).toEqual([bad, undefined]);
  }
});

describe("amounts in settings", () => {
  test("are exact whole numbers of at most 256 bits", () => {
    const limit = (TOLLGATE_DAILY_CEILING: string) =>
      load({ TOLLGATE_DAILY_CEILING }).config?.facilitator?.limits.dailyCeiling;
    expect(limit("0")).toBe(0n);
    expect(limit("9007199254740993")).toBe(9_007_199_254_740_993n);
    expect(limit(String(2n ** 256n - 1n))).toBe(2n ** 256n - 1n);
    for (const bad of [String(2n ** 256n), "1e6", "1.0", "+1", "-1", " 1", "0x1", "1_000", "\u0661"]) {
      expect([bad, limit(bad)]).toEqual([bad, undefined]);
    }
  });

  test("may have decimals when they are of gwei, and are kept in wei", () => {
    const fee = (TOLLGATE_MAX_FEE_GWEI: string) => load({ TOLLGATE_MAX_FEE_GWEI }).config?.facilitator?.limits.maxFee;
    expect(["5", "0.5", "0.000000001", "1000.25"].map(fee)).toEqual([
      5n * 10n ** 9n,
      5n * 10n ** 8n,
      1n,
      100_025n * 10n ** 7n,
    ]);
    for (const bad of ["0", "0.0", ".5", "5.", "1e3", "-1", "0.0000000001", "1,5", "1234567"]) {
      expect([bad, fee(bad)]).toEqual([bad, undefined]);
    }
  });
});
