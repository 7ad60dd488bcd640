import { afterAll, describe, expect, test } from "bun:test";
import { chmodSync, mkdirSync, mkdtempSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openDataDir } from "./cli/open.ts";
import { loadConfig, VARIABLES, withEnvFile } from "./config.ts";
import { silentLog } from "./core/log.ts";

const dir = mkdtempSync(join(tmpdir(), "config-"));
afterAll(() => rmSync(dir, { recursive: true }));

const KEY = Buffer.alloc(32, 7).toString("base64");

function load(environment: Record<string, string>, flags: Record<string, string> = {}, terminal = false) {
  const settings = { TOLLGATE_MODE: "gateway", TOLLGATE_DATA_DIR: join(dir, "data"), ...environment };
  return loadConfig("serve", new Map(Object.entries(flags)), settings, terminal);
}

/** The names that the problems begin with. */
function blamed(environment: Record<string, string>, flags: Record<string, string> = {}): string[] {
  const { config, problems } = load(environment, flags);
  expect(config === null).toBe(problems.length > 0);
  return problems.map((problem) => problem.split(" ")[0]!);
}

function file(name: string, text: string): string {
  writeFileSync(join(dir, name), text);
  return join(dir, name);
}

test("nothing but the mode needs to be configured, and nothing is created", () => {
  const { config, problems, warnings } = load({});
  expect(problems).toEqual([]);
  expect(warnings).toEqual([]);
  expect(config).toMatchObject({
    host: "127.0.0.1",
    port: 8080,
    dataDir: join(dir, "data"),
    databaseUrl: null,
    masterKeys: { own: null, file: null, next: null, nextFile: null },
    log: { level: "info", format: "json" },
    blockedMs: 50,
    drainMs: 30_000,
    identity: { oidc: null, claims: { tenant: "tenant_id", user: "sub", scope: "scope" } },
    agentConcurrency: 64,
    publicUrl: null,
    settleWaitMs: 20_000,
    upstreamTimeoutMs: 300_000,
    facilitator: null,
    maxResponseBytes: 33_554_432,
    vault: null,
  });
  expect(readdirSync(dir)).not.toContain("data");
});

test("all problems are told at once, each by the name of its variable", () => {
  const bad = {
    TOLLGATE_MODE: "gatway",
    TOLLGATE_HOST: "a b",
    TOLLGATE_PORT: "65536",
    DATABASE_URL: "mysql://x",
    TOLLGATE_MASTER_KEY: "short",
    TOLLGATE_LOG_LEVEL: "loud",
    TOLLGATE_LOG_FORMAT: "xml",
    TOLLGATE_DRAIN_MS: "1e3",
    TOLLGATE_PUBLIC_URL: "https://gateway.test/?a=1",
    TOLLGATE_SETTLE_WAIT_MS: "0",
    TOLLGATE_OIDC_ISSUER: "ftp://x",
    TOLLGATE_JWKS_URL: "x",
    TOLLGATE_TENANT_CLAIM: "iss",
    TOLLGATE_ALLOW_HOSTS: "ok.test,10.0.0.0/33",
    TOLLGATE_CA_FILE: file("ca.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
    TOLLGATE_WORKERS: "0",
    TOLLGATE_UPSTREAM_TIMEOUT_MS: "-1",
    TOLLGATE_AGENT_CONCURRENCY: "0x10",
    TOLLGATE_MAX_RESPONSE_BYTES: "",
    TOLLGATE_BODY_RETENTION_DAYS: "1.5",
    TOLLGATE_HISTORY_RETENTION_DAYS: "forever",
    TOLLGATE_SECRETS_DIR: join(dir, "missing"),
    TOLLGATE_VAULT_ADDR: "http://user@vault",
    TOLLGATE_VAULT_TOKEN: "a\nb",
    TOLLGATE_VAULT_PREFIX: "secret/data/shared",
  };
  const expected = Object.keys(bad).filter((name) => name !== "TOLLGATE_MAX_RESPONSE_BYTES");
  expect(blamed(bad).sort()).toEqual(expected.sort());
});

test("no problem repeats a value: it may be a secret", () => {
  const bad = {
    TOLLGATE_MASTER_KEY: "hunter2",
    DATABASE_URL: "mysql://u:hunter2@h/d",
    TOLLGATE_VAULT_ADDR: "http://u:hunter2@v",
  };
  expect(load(bad).problems.join("\n")).not.toContain("hunter2");
});

test("a problem of a list names the entry, and shows only what looks like a host", () => {
  const secret = "hunter2".repeat(6);
  const { problems } = load({
    TOLLGATE_ALLOW_HOSTS: "ok.test,10.0.0.0/33",
    TOLLGATE_DENY_HOSTS: `ok.test,${secret}@,u:hunter2@h`,
    TOLLGATE_ALLOWED_ORIGINS: "https://a.test, ",
    TOLLGATE_RPC_URLS: "http://a.test,http://b.test,http://a.test",
    OTEL_EXPORTER_OTLP_HEADERS: "a=1,hunter2",
  });
  const whys = problems.map((problem) => `${problem.split(" ")[0]}: ${problem.slice(problem.lastIndexOf(": ") + 2)}`);
  expect(whys.sort()).toEqual([
    "OTEL_EXPORTER_OTLP_HEADERS: entry 2 of 2 is not valid",
    "TOLLGATE_ALLOWED_ORIGINS: entry 2 of 2 is not valid",
    "TOLLGATE_ALLOW_HOSTS: entry 2 of 2 (10.0.0.0/33) is not valid",
    'TOLLGATE_DENY_HOSTS: entry 2 of 3, with "@" in it, is not valid',
    "TOLLGATE_RPC_URLS: entry 3 of 3 equals entry 1",
  ]);
  expect(problems.join("\n")).not.toContain("hunter2");
  expect(load({ TOLLGATE_ALLOW_HOSTS: "a.test,".repeat(1001) }).problems).toEqual([
    expect.stringMatching(/: it has 1001 entries$/),
  ]);
});

describe("a file of variables", () => {
  const read = (text: string, environment: Record<string, string> = {}) =>
    withEnvFile(environment, file("some.env", text));

  test("holds one a line, with or without quotes, comments aside", () => {
    const text = `# A=1\r\n\n  B = no\nC=1=2 # all of it\r\nexport D="a # b"\nE='"'\nF=\n G= x \nC=last`;
    const { environment, problems } = read(text.replace("  B = no\n", ""));
    expect(problems).toEqual([]);
    expect(environment).toEqual({ C: "last", D: "a # b", E: '"', F: "", G: "x" });
    expect(read("")).toMatchObject({ environment: {}, problems: [] });
  });

  test("gives way to the environment, in whichever of two variables a secret stands there", () => {
    const text = "A=file\nB=file\nDATABASE_URL=file\nTOLLGATE_MASTER_KEY_FILE=file\n";
    const set = { A: "own", B: "", DATABASE_URL_FILE: "own", TOLLGATE_MASTER_KEY: "own" };
    expect(read(text, set).environment).toEqual({ ...set, B: "file" });
  });

  test("is refused with the number of each bad line, and without its text", () => {
    const lines = [
      "A=1",
      "hunter2",
      "A B=hunter2",
      "A='hunter2",
      `A="hunter2"x`,
      "=hunter2",
      "1A=hunter2",
      "A = hunter2",
    ];
    const { problems } = read(lines.join("\n"));
    expect(problems).toEqual(
      [2, 3, 4, 5, 6, 7, 8].map((line) => expect.stringContaining(`/some.env: line ${line} must be`)),
    );
    expect(problems.join("\n")).not.toContain("hunter2");
    expect(read("x\n".repeat(1000)).problems).toHaveLength(10);
  });
});

test("a flag overrides its variable, and is blamed by its own name", () => {
  expect(load({ TOLLGATE_PORT: "nonsense" }, { port: "0", host: "::1" }).config).toMatchObject({
    port: 0,
    host: "::1",
  });
  expect(blamed({ TOLLGATE_PORT: "1" }, { port: "x", host: "" })).toEqual(["--host", "--port"]);
});

test("an empty variable is as good as unset", () => {
  const empty = Object.fromEntries(Object.keys(VARIABLES).map((name) => [name, ""]));
  expect(load({ ...empty, TOLLGATE_MODE: "gateway", TOLLGATE_DATA_DIR: join(dir, "data") }).problems).toEqual([]);
});

test("the mode is required, but by commands that serve nobody", () => {
  expect(load({ TOLLGATE_MODE: "" }).problems).toEqual([
    "TOLLGATE_MODE must be gateway or facilitator (or give --mode)",
  ]);
  for (const purpose of ["token", "migrate", "account"] as const) {
    expect(loadConfig(purpose, new Map(), { TOLLGATE_DATA_DIR: dir }, false).problems).toEqual([]);
  }
});

test("without a mode the variables of both services are judged, as far as each goes by itself", () => {
  expect(blamed({ TOLLGATE_MODE: "both", TOLLGATE_WORKERS: "x", TOLLGATE_OPEN_PORT: "x" }).sort()).toEqual([
    "TOLLGATE_MODE",
    "TOLLGATE_OPEN_PORT",
    "TOLLGATE_WORKERS",
  ]);
});

test("the log is pretty on a terminal unless told otherwise", () => {
  expect(load({}, {}, true).config?.log.format).toBe("pretty");
  expect(load({ TOLLGATE_LOG_FORMAT: "json" }, {}, true).config?.log.format).toBe("json");
});

describe("secrets", () => {
  test("can come from a file, less one newline at its end", () => {
    expect(load({ TOLLGATE_MASTER_KEY_FILE: file("key", `${KEY}\n`) }).config?.masterKeys.own?.toString("base64")).toBe(
      KEY,
    );
    const DATABASE_URL_FILE = file("url", "postgres://u:p@h/d");
    expect(load({ DATABASE_URL_FILE, TOLLGATE_MASTER_KEY: KEY }).config?.databaseUrl).toBe("postgres://u:p@h/d");
    const TOLLGATE_LISTEN_URL = "postgres://u:p@h/d";
    expect(blamed({ TOLLGATE_LISTEN_URL })).toEqual(["TOLLGATE_LISTEN_URL"]);
    expect(load({ DATABASE_URL_FILE, TOLLGATE_LISTEN_URL, TOLLGATE_MASTER_KEY: KEY }).config?.listenUrl).toBe(
      TOLLGATE_LISTEN_URL,
    );
    expect(blamed({ TOLLGATE_MASTER_KEY_FILE: file("key", `${KEY}\n\n`) })).toEqual(["TOLLGATE_MASTER_KEY_FILE"]);
  });

  test("do not come from two places at once, nor from a file that is missing, empty or huge", () => {
    const good = file("key", KEY);
    expect(blamed({ TOLLGATE_MASTER_KEY: KEY, TOLLGATE_MASTER_KEY_FILE: good })).toEqual(["TOLLGATE_MASTER_KEY"]);
    for (const path of [join(dir, "missing"), dir, file("empty", ""), file("huge", "x".repeat(70_000))]) {
      expect(blamed({ TOLLGATE_MASTER_KEY_FILE: path })).toEqual(["TOLLGATE_MASTER_KEY_FILE"]);
    }
  });

  test("settings that are no secrets are not read from files", () => {
    const { config, unread } = load({ TOLLGATE_PORT_FILE: file("port", "1") });
    expect(config?.port).toBe(8080);
    expect(unread).toEqual(["TOLLGATE_PORT_FILE is set but nothing reads it"]);
  });
});

test("a misspelt variable is warned of, with the one that was meant", () => {
  const { unread, problems } = load({ TOLLGATE_PROT: "1", TOLLGATE_NONSENSE: "1", OTHER: "1" });
  expect(problems).toEqual([]);
  expect(unread).toEqual([
    "TOLLGATE_PROT is set but nothing reads it; did you mean TOLLGATE_PORT?",
    "TOLLGATE_NONSENSE is set but nothing reads it",
  ]);
});

describe("settings that belong together", () => {
  const OIDC = { TOLLGATE_OIDC_ISSUER: "https://issuer.test", TOLLGATE_OIDC_AUDIENCE: "gateway" };

  test("Postgres needs the shared master key, and no data directory", () => {
    const DATABASE_URL = "postgres://u:p@h/d";
    expect(blamed({ DATABASE_URL })).toEqual(["TOLLGATE_MASTER_KEY"]);
    expect(blamed({ DATABASE_URL, TOLLGATE_MASTER_KEY: "bad" })).toEqual(["TOLLGATE_MASTER_KEY"]);
    expect(blamed({ DATABASE_URL, TOLLGATE_MASTER_KEY: KEY, TOLLGATE_DATA_DIR: "/dev/null/x" })).toEqual([]);
  });

  test("issuer and audience come together, and keys of an issuer only with it", () => {
    expect(load({ ...OIDC, TOLLGATE_JWKS_URL: "https://j.test/?a=1" }).config?.identity.oidc).toEqual({
      issuer: "https://issuer.test",
      audience: "gateway",
      jwksUrl: "https://j.test/?a=1",
    });
    expect(blamed({ TOLLGATE_OIDC_ISSUER: OIDC.TOLLGATE_OIDC_ISSUER })).toEqual(["TOLLGATE_OIDC_AUDIENCE"]);
    expect(blamed({ TOLLGATE_OIDC_AUDIENCE: "gateway" })).toEqual(["TOLLGATE_OIDC_AUDIENCE"]);
    expect(blamed({ TOLLGATE_JWKS_URL: "https://j.test" })).toEqual(["TOLLGATE_JWKS_URL"]);
    expect(blamed({ ...OIDC, TOLLGATE_OIDC_ISSUER: "bad" })).toEqual(["TOLLGATE_OIDC_ISSUER"]);
  });

  test("one claim of a token can't be two things", () => {
    expect(blamed({ TOLLGATE_TENANT_CLAIM: "sub" })).toEqual(["TOLLGATE_USER_CLAIM"]);
    expect(blamed({ TOLLGATE_SCOPE_CLAIM: "sub" })).toEqual(["TOLLGATE_SCOPE_CLAIM"]);
  });

  test("a vault needs its token", () => {
    expect(blamed({ TOLLGATE_VAULT_ADDR: "http://v:8200" })).toEqual(["TOLLGATE_VAULT_TOKEN"]);
    const set = { TOLLGATE_VAULT_ADDR: "http://v:8200", TOLLGATE_VAULT_TOKEN_FILE: file("token", "t\n") };
    expect(load(set).config?.vault).toMatchObject({ token: "t", tokenFile: join(dir, "token") });
  });

  test("a vault token that came through a pipe is not looked for there again", async () => {
    const pipe = join(dir, "pipe");
    expect(Bun.spawnSync(["mkfifo", pipe]).exitCode).toBe(0);
    const writer = Bun.spawn(["sh", "-c", 'echo t > "$1"', "sh", pipe]);
    const set = { TOLLGATE_VAULT_ADDR: "http://v:8200", TOLLGATE_VAULT_TOKEN_FILE: pipe };
    expect(load(set).config?.vault).toMatchObject({ token: "t", tokenFile: null });
    expect(await writer.exited).toBe(0);
  });
});

describe("the values of settings", () => {
  test("a database URL is one that the client can take", () => {
    const url = (DATABASE_URL: string) => blamed({ DATABASE_URL, TOLLGATE_MASTER_KEY: KEY });
    for (const good of [
      "postgres://h",
      "postgresql://u:p%25@[::1]:5432/d%20b?sslmode=verify-full&application_name=x",
      "postgres://h/d?prepare=false",
    ]) {
      expect([good, url(good)]).toEqual([good, []]);
    }
    for (const bad of [
      "postgres:x",
      "postgres:///d",
      "mysql://h/d",
      "postgres://u:%zz@h/d",
      "postgres://%zz:p@h/d",
      "postgres://h/%zz",
      "postgres://%2ftmp/d",
      "postgres://h:0/d",
      "postgres://h:1,i:2/d",
      "postgres://h,i/d",
      "postgres://h/d?target_session_attrs=read-write",
      "postgres://h/d?sslmode=bogus",
      "postgres://h/d?prepare=never",
    ]) {
      expect([bad, url(bad)]).toEqual([bad, ["DATABASE_URL"]]);
    }
  });

  test("the public URL is a base without a slash at its end", () => {
    const base = (TOLLGATE_PUBLIC_URL: string) => load({ TOLLGATE_PUBLIC_URL }).config?.publicUrl;
    expect(base("https://gateway.test")).toBe("https://gateway.test");
    expect(base("http://gateway.test:81/x//")).toBe("http://gateway.test:81/x");
    for (const bad of ["gateway.test", "ftp://g.test", "https://u@g.test", "https://g.test/?", "https://g.test/#"]) {
      expect([bad, blamed({ TOLLGATE_PUBLIC_URL: bad })]).toEqual([bad, ["TOLLGATE_PUBLIC_URL"]]);
    }
  });

  test("allowed hosts are names, addresses and ranges without ports", () => {
    const hosts = (list: string) => load({ TOLLGATE_ALLOW_HOSTS: list }).config?.allowHosts;
    const written = ["LocalHost", "127.0.0.1", "10.0.0.0/8", "[::1]", "fd00::/8", "a_b.test.", "bücher.test"];
    expect(hosts(` ${written.join(" , ")},`)).toEqual(written);
    for (const bad of ["a:1", "10.0.0.0/33", "::/129", "10.0/8", "host/8", "*.test", "http://a", "a b", "a..b"]) {
      expect([bad, hosts(bad)]).toEqual([bad, undefined]);
    }
  });

  test("denied hosts are written like allowed ones", () => {
    const hosts = (list: string) => load({ TOLLGATE_DENY_HOSTS: list }).config?.denyHosts;
    expect(load({}).config?.denyHosts).toEqual([]);
    expect(hosts("db.test, 198.51.100.0/24,[2001:db8::1], ::ffff:8.8.8.8")).toHaveLength(4);
    for (const bad of ["a:1", "10.0.0.0/33", "*.test", "http://a", "bad_host!", "a,b&c"])
      expect([bad, blamed({ TOLLGATE_DENY_HOSTS: bad })]).toEqual([bad, ["TOLLGATE_DENY_HOSTS"]]);
    expect(blamed({ TOLLGATE_DENY_HOSTS: "a b", TOLLGATE_ALLOW_HOSTS: "a b" }).sort()).toEqual([
      "TOLLGATE_ALLOW_HOSTS",
      "TOLLGATE_DENY_HOSTS",
    ]);
  });

  test("the scope for writing is one scope", () => {
    const scope = (TOLLGATE_MANAGE_SCOPE: string) => load({ TOLLGATE_MANAGE_SCOPE }).config?.manageScope;
    expect(load({}).config?.manageScope).toBeNull();
    expect(scope("tollgate:manage")).toBe("tollgate:manage");
    for (const bad of ["a b", 'a"', "a\\b", "ä", "x".repeat(257)])
      expect([bad, blamed({ TOLLGATE_MANAGE_SCOPE: bad })]).toEqual([bad, ["TOLLGATE_MANAGE_SCOPE"]]);
  });

  test("traces are off until there is a collector, and then go by OpenTelemetry's variables", () => {
    const endpoint = { OTEL_EXPORTER_OTLP_ENDPOINT: "http://collector:4318/base" };
    expect(load({ OTEL_TRACES_SAMPLER: "always_off" }).config?.tracing).toBeNull();
    expect(load(endpoint).config?.tracing).toEqual({
      endpoint: "http://collector:4318/base",
      headers: [],
      serviceName: null,
      resource: [],
      sampler: "parentbased_always_on",
      ratio: 1,
      tracesPerSecond: 100,
      extraCa: null,
    });
    const set = {
      OTEL_EXPORTER_OTLP_HEADERS_FILE: file("headers", "Authorization=Bearer%20t%2Cu, x = 1 ,\n"),
      OTEL_SERVICE_NAME: "gate",
      OTEL_RESOURCE_ATTRIBUTES: "a.b=%C3%A4,c=",
      OTEL_TRACES_SAMPLER: "traceidratio",
      OTEL_TRACES_SAMPLER_ARG: "0.25",
    };
    expect(load({ ...endpoint, ...set }).config?.tracing).toMatchObject({
      headers: [
        ["authorization", "Bearer t,u"],
        ["x", "1"],
      ],
      serviceName: "gate",
      resource: [
        ["a.b", "ä"],
        ["c", ""],
      ],
      sampler: "traceidratio",
      ratio: 0.25,
    });
    for (const [name, ...values] of [
      ["OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "grpc://collector", "http://u:p@collector", "http://c?x=1"],
      ["OTEL_EXPORTER_OTLP_HEADERS", "a", "=b", "a b=c", "a=%0a", "a=%zz", "a=%C4%80", Array(65).fill("a=b").join()],
      ["OTEL_RESOURCE_ATTRIBUTES", "a", "=b", "a=%00"],
      ["OTEL_TRACES_SAMPLER", "jaeger_remote", "xray"],
      ["OTEL_TRACES_SAMPLER_ARG", "1.1", "-1", "1e-3", "half"],
      ["TOLLGATE_TRACES_PER_SECOND", "0", "1.5"],
    ] as const) {
      for (const value of values) expect([value, blamed({ [name]: value })]).toEqual([value, [name]]);
    }
  });

  test("a vault prefix keeps each tenant in a place of its own", () => {
    const base = { TOLLGATE_VAULT_ADDR: "http://v", TOLLGATE_VAULT_TOKEN: "t" };
    const prefix = (text: string) => load({ ...base, TOLLGATE_VAULT_PREFIX: text }).config?.vault?.prefix;
    expect(prefix("kv/data/{tenant}/agents")).toBe("kv/data/{tenant}/agents");
    for (const bad of [
      "kv",
      "/kv/{tenant}",
      "kv/{tenant}/",
      "kv/x{tenant}",
      "kv/../{tenant}",
      "{tenant}/{tenant}",
      "kv//{tenant}",
      "kv/{tenant}?x",
    ]) {
      expect([bad, prefix(bad)]).toEqual([bad, undefined]);
    }
  });

  test("a master key is exactly 32 bytes of standard base64", () => {
    expect(blamed({ TOLLGATE_MASTER_KEY: KEY.replace("=", "") })).toEqual([]);
    const bytes = (count: number) => Buffer.alloc(count, 255).toString("base64");
    for (const bad of [
      bytes(31),
      bytes(33),
      ` ${KEY}`,
      bytes(32).replaceAll("/", "_"),
      Buffer.alloc(32).toString("hex"),
    ]) {
      expect(blamed({ TOLLGATE_MASTER_KEY: bad })).toEqual(["TOLLGATE_MASTER_KEY"]);
    }
  });
});

describe("the data directory", () => {
  /** What is told of it when it is opened. */
  function opened(dataDir: string): string[] {
    const told: string[] = [];
    openDataDir({ databaseUrl: null, dataDir }, { ...silentLog, warn: (event) => void told.push(event) });
    return told;
  }

  test("may be anywhere where it can be created", () => {
    expect(blamed({ TOLLGATE_DATA_DIR: join(dir, "a/b/c") })).toEqual([]);
    expect(blamed({ TOLLGATE_DATA_DIR: "/dev/null/x" })).toEqual(["TOLLGATE_DATA_DIR"]);
    expect(blamed({ TOLLGATE_DATA_DIR: file("plain", "") })).toEqual(["TOLLGATE_DATA_DIR"]);
    expect(blamed({}, { "data-dir": "/dev/null" })).toEqual(["--data-dir"]);
  });

  test("is made for its owner alone, and one that is open to others is told", () => {
    const made = join(dir, "deep/made");
    expect(opened(made)).toEqual([]);
    expect(statSync(made).mode & 0o777).toBe(0o700);
    expect(readdirSync(made)).toEqual([]);
    mkdirSync(join(dir, "open"));
    chmodSync(join(dir, "open"), 0o755);
    expect(opened(join(dir, "open"))).toEqual(["data_dir_too_open"]);
  });

  test("may hold what an earlier start, cut short, has left", () => {
    const left = join(dir, "left");
    mkdirSync(left);
    writeFileSync(join(left, `.trial-${process.pid}`), "");
    expect(() => opened(left)).not.toThrow();
  });

  test("is a problem of the start when it can't be written after all", () => {
    expect(() => opened("/proc/nowhere")).toThrow("; /proc/nowhere can't be used: no such file or directory (ENOENT)");
  });
});
