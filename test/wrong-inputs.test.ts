// What tollgate says to somebody who typed something wrong: one table of inputs and of what each must be told. The sentence names
// the culprit (flag, variable, file, line, entry, host and port), the exit status is 2, and standard output stays empty.
import { Database } from "bun:sqlite";
import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmodSync, cpSync, mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { type Environment, runCommand } from "./support/gateway/process.ts";
import { makePki, type Pki } from "./support/http/pki.ts";

interface Wrong {
  readonly words: string;
  readonly env?: Environment;
  /** Each is a whole line of standard error, or a part of one. */
  readonly told: readonly string[];
  /** 2 if it is left out. */
  readonly status?: number;
}

const home = mkdtempSync(join(tmpdir(), "wrong-"));
const at = (name: string) => join(home, name);
let pki: Pki;
let taken: Bun.TCPSocketListener;
/** Holds the write lock of a database. */
let locking: Database;

beforeAll(async () => {
  pki = await makePki();
  writeFileSync(at("other.crt"), pki.otherClient.cert);
  taken = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data: (caller) => void caller.end() } });
  mkdirSync(at("folder"));
  mkdirSync(at("held"));
  locking = new Database(at("held/tollgate.db"), { create: true });
  locking.run("pragma journal_mode = wal");
  locking.run("begin immediate");
  mkdirSync(at("locked"));
  mkdirSync(at("broken"));
  mkdirSync(at("keyed"));
  writeFileSync(at("keyed/master.key"), `${Buffer.alloc(32, 1).toString("base64")}\n`, { mode: 0o600 });
  writeFileSync(at("broken/tollgate.db"), "no database, whatever its name says");
  writeFileSync(at("broken/master.key"), `${Buffer.alloc(32, 1).toString("base64")}\n`, { mode: 0o600 });
  writeFileSync(at("open.key"), "x\n", { mode: 0o644 });
  writeFileSync(at("secret.key"), "hunter2\n", { mode: 0o600 });
  writeFileSync(at("bearer"), "Bearer hunter2\n", { mode: 0o600 });
  writeFileSync(at("notes.txt"), "no certificate\n");
  writeFileSync(at("client.crt"), pki.client.cert);
  writeFileSync(at("client.key"), pki.client.key);
  writeFileSync(at("other.pem"), `${pki.client.cert}${pki.otherClient.key}`);
  writeFileSync(at("good.pem"), `${pki.client.cert}${pki.client.key}`);
  writeFileSync(at("server.crt"), pki.server.cert);
  writeFileSync(at("server.pem"), `${pki.server.cert}${pki.server.key}${pki.ca.cert}`);
  writeFileSync(at("ca.crt"), pki.ca.cert);
  writeFileSync(at("bad.env"), "# a comment\n\nTOLLGATE_PORT=0\nhunter2 is a secret\nTOLLGATE_HOST='::1\n");
  writeFileSync(at("misspelt.env"), "TOLLGATE_PROT=1\nTOLLGATE_WORKERS=1 # many\n");
  writeFileSync(at("behind.env"), "TOLLGATE_HOST='::1' # all\n");
  writeFileSync(
    at("twice.env"),
    "TOLLGATE_WORKERS=9\nTOLLGATE_TENANT_CLAIM=iss\nTOLLGATE_MASTER_KEY_FILE=a\nTOLLGATE_MASTER_KEY_FILE=hunter2\n" +
      "TOLLGATE_TENANT_CLAIM=exp\nTOLLGATE_JWKS_URL=https://x.test/hunter2\n",
  );
  writeFileSync(at("host.env"), "# here\nTOLLGATE_HOST=192.0.2.1\n");
  writeFileSync(at("lower.env"), "tollgate_port=1\n");
  writeFileSync(at("mode.env"), "TOLLGATE_MODE=facilitator\n");
  writeFileSync(at("long.env"), "# ".padEnd(4_194_305, "x"));
  expect(Bun.spawnSync(["mkfifo", at("pipe")]).exitCode).toBe(0);
  const made = [
    "token --tenant acme --user me --data-dir gateways",
    "account add alice --cert client.crt --data-dir facilitators",
    "backup accounts.db --data-dir facilitators",
  ];
  for (const words of made) expect((await run({ words, told: [] })).code).toBe(0);
  const asFacilitator = { env: { TOLLGATE_MODE: "facilitator" }, told: [] };
  for (const words of ["migrate --data-dir unused", "backup unused.db --data-dir unused"])
    expect((await run({ words, ...asFacilitator })).code).toBe(0);
  cpSync(at("gateways"), at("moved"), { recursive: true });
  writeFileSync(at("moved/master.key"), `${Buffer.alloc(32, 1).toString("base64")}\n`, { mode: 0o600 });
});
afterAll(() => {
  taken.stop(true);
  locking.close();
  rmSync(home, { recursive: true });
});

const run = ({ words, env = {} }: Wrong) =>
  runCommand(words === "" ? [] : words.split(" "), { cwd: home, env: { PATH: "/usr/bin:/bin", ...env } });

const SET = "settlement set --tenant acme --bundle good.pem --facilitator";
const OWN_FACILITATOR: Environment = {
  TOLLGATE_TLS_CERT_FILE: "client.crt",
  TOLLGATE_TLS_KEY_FILE: "client.key",
  TOLLGATE_CLIENT_CA_FILE: "ca.crt",
  TOLLGATE_RPC_URLS: "http://127.0.0.1:1",
  TOLLGATE_SIGNER_KEY: "5d".repeat(32),
  TOLLGATE_OPEN_PORT: "0",
};

const SLASHED_KEY = `/hunter2${"a/".repeat(17)}a=`;

const WRONG: readonly Wrong[] = [
  // Words and flags.
  {
    words: "tokn",
    told: ["tollgate: tokn is not a command; did you mean token?", `See ${tollgateBinary()} help.`],
  },
  { words: "account lst", told: ["account lst is not a command; did you mean account list?"] },
  {
    words: "account",
    told: [
      "account is not a command by itself; the commands of account are add, list, disable, enable, remove, add-cert, remove-cert",
    ],
  },
  { words: "settlement", told: ["settlement is not a command by itself; did you mean settlement set?"] },
  { words: "account foo", told: ["account foo is not a command; the commands of account are add, list, disable"] },
  { words: "token revok", told: ["tollgate: token revok is not a command; did you mean token revoke?"] },
  { words: "TOKEN", told: ["TOKEN is not a command; did you mean token?"] },
  { words: "run", told: ["run is not a command; did you mean serve?"] },
  { words: "start --port 1", told: ["start is not a command; did you mean serve?"] },
  { words: "server", told: ["server is not a command; did you mean serve?"] },
  { words: "agents", told: ["agents is not a command; did you mean help start?"] },
  { words: "gateway", told: ["gateway is not a command; did you mean serve?"] },
  { words: "facilitator", told: ["facilitator is not a command; did you mean serve --mode facilitator?"] },
  { words: "rotate", told: ["rotate is not a command; did you mean keys rotate?"] },
  { words: "serve gateway", told: ["gateway is not expected here; did you mean --mode gateway?"] },
  { words: "serve --log-level debug", told: ["--log-level is not a flag: set TOLLGATE_LOG_LEVEL"] },
  { words: "help --all payments", told: ["--all can't be combined with a topic or a command"] },
  { words: "serve -p 80", told: ["-p is not a flag: flags begin with two hyphens", "80 is not expected here"] },
  { words: "serve --prot 80", told: ["did you mean --port?", `See ${tollgateBinary()} serve --help.`] },
  {
    words: "--hlep",
    told: ["tollgate can't start:\n  - --hlep is not a flag of this command; did you mean --help?\nSee"],
  },
  { words: "token --hepl", told: ["--hepl is not a flag of this command; did you mean --help?"] },
  { words: "--prot 80", told: ["did you mean --port?", `See ${tollgateBinary()} serve --help.`] },
  {
    words: "token acme me",
    told: ["tollgate token failed:", "  - acme me is not expected here: did you mean --tenant acme --user me?\nSee"],
  },
  { words: "settlement acme", told: ["settlement acme is not a command; the only command of settlement is set"] },
  { words: "keys rotat", told: ["keys rotat is not a command; did you mean keys rotate?"] },
  {
    words: "token --tenat acme",
    told: [
      "tollgate token failed:",
      "--tenat is not a flag of this command; did you mean --tenant?",
      `See ${tollgateBinary()} token --help.`,
    ],
  },
  { words: "token --tenant acme --user", told: ["--user needs a value: --user U"] },
  { words: "token", told: ["--tenant is missing: a text of at most 256", "--user is missing: a text"] },
  { words: "token --tenant= --user u", told: ["--tenant must not be empty: a text of at most 256"] },
  { words: "token --tenant a --tenant b --user c", told: ["--tenant may be given only once"] },
  { words: "call a --stream=yes", told: ["--stream takes no value"] },
  { words: "migrate now", told: ["now is not expected here"] },
  { words: "account disable", told: ["NAME is missing: tollgate account disable NAME"] },
  { words: "backup", told: ["FILE is missing: tollgate backup FILE"] },
  { words: "backup a --verify b", told: ["two files are named"] },
  { words: "help pay", told: ["pay is neither a command nor a topic; did you mean payments?"] },
  { words: "mode gateway", told: ["tollgate: mode is not a command; did you mean --mode gateway?"] },
  { words: "help paymets", told: ["paymets is neither a command nor a topic; did you mean payments?"] },
  { words: "help paymets", told: [`See ${tollgateBinary()} help.\n`] },
  { words: "help serv", told: ["serv is neither a command nor a topic; did you mean serve?"] },
  { words: "help xyzzy", told: ["xyzzy is neither a command nor a topic; the topics are install, start"] },
  { words: "help account foo", told: ["account foo is not a command; the commands of account are add, list"] },
  {
    words: "completion zhs",
    told: ["SHELL must be bash, zsh or fish: there are no completions for zhs; did you mean zsh?"],
  },
  { words: "completion", told: ["SHELL is missing", "SHELL must be bash, zsh or fish\n"] },
  { words: "completion BASH", told: ["there are no completions for BASH; did you mean bash?"] },
  { words: "token --tenant acme --user me --scope=", told: ["--scope must be one or more scopes"] },
  {
    words: "token --tenant acme --user me --ttl 1w",
    told: ["--ttl must be a time like 90s, 30m, 12h or 7d", ": 1w is none"],
  },
  { words: "token --tenant acme --user me --ttl 0h", told: ["--ttl must be", "d: 0h is no time at all"] },
  { words: "token --tenant acme --user me --ttl 9999d", told: ["--ttl must be", "d: 9999d is longer"] },
  {
    words: "account remove alice",
    told: ["account remove can't be undone, and there is no terminal to ask on: add --yes if you are sure"],
  },
  {
    words: "token revoke --all",
    told: ["token revoke can't be undone, and there is no terminal to ask on: add --yes if you are sure"],
  },
  {
    words: "token revoke",
    told: ["--tenant is missing: name the tenant whose tokens to revoke, or give --all for those of every tenant"],
  },
  { words: "token revoke --all --tenant acme --yes", told: ["--all can't be combined with --tenant"] },
  {
    words: "account disable alcie --data-dir facilitators",
    told: ['there is no account "alcie"; did you mean alice?'],
  },
  {
    words: "account add a --cert client.crt --daily-ceiling 5usdc",
    told: ["--daily-ceiling must be a whole number", "in smallest units (1 USDC is 1000000)"],
  },
  // The data directory of the other service, none, and one that can't be.
  {
    words: "account add bob --cert other.crt --data-dir gateways",
    told: [
      `--data-dir (or TOLLGATE_DATA_DIR) must be the facilitator's data directory: ${at("gateways")} is a gateway's`,
    ],
  },
  {
    words: "account list --data-dir gateways",
    told: [`facilitator's data directory: ${at("gateways")} is a gateway's`],
  },
  {
    words: "token --tenant acme --user me --data-dir facilitators",
    told: [
      `--data-dir (or TOLLGATE_DATA_DIR) must be the gateway's data directory: ${at("facilitators")} is a facilitator's`,
    ],
  },
  { words: "migrate --data-dir facilitators", told: [`: ${at("facilitators")} is a facilitator's`] },
  {
    words: "migrate --data-dir gateways",
    env: { TOLLGATE_MODE: "facilitator" },
    told: [`: ${at("gateways")} is a gateway's`],
  },
  {
    words: "token revoke --tenant acme --data-dir facilitators",
    told: [`gateway's data directory: ${at("facilitators")} is a facilitator's`],
  },
  {
    words: "--mode facilitator --data-dir gateways --port 0",
    env: OWN_FACILITATOR,
    told: [`must be the facilitator's data directory: ${at("gateways")} is a gateway's`],
  },
  {
    words: "serve --data-dir facilitators --port 0",
    told: [`must be the gateway's data directory: ${at("facilitators")} is a facilitator's`],
  },
  { words: "token revoke --tenant acme --data-dir folder", told: [`: ${at("folder")} holds no tollgate.db`] },
  { words: "restore --data-dir folder", told: [`the service's data directory: ${at("folder")} holds no tollgate.db`] },
  {
    words: "restore accounts.db --data-dir gateways",
    told: [`must be the facilitator's data directory: ${at("gateways")} is a gateway's\n`],
  },
  {
    words: "restore unused.db --data-dir gateways",
    told: ["FILE must be a copy of a gateway's database: no service had used the database when it was copied\n"],
  },
  ...["keys rotate", `${SET} https://f.test`].flatMap((words) => [
    {
      words: `${words} --data-dir folder`,
      told: [`must be the gateway's data directory: ${at("folder")} holds no tollgate.db`],
    },
    {
      words: `${words} --data-dir facilitators`,
      told: [`must be the gateway's data directory: ${at("facilitators")} is a facilitator's`],
    },
  ]),
  { words: "serve --data-dir notes.txt/x", told: [`: ${at("notes.txt")} is not a directory`] },
  {
    words: "serve --port 0 --data-dir /proc/nope",
    told: ["--data-dir (or TOLLGATE_DATA_DIR) must be a directory", "; /proc/nope can't be used: no such file"],
  },
  { words: "pki init --dir notes.txt", told: ["--dir must be a directory, and notes.txt is a file"] },
  { words: "pki server --dir notes.txt --host a", told: ["--dir must be a directory, and notes.txt is a file"] },
  { words: "pki server --dir folder --host a", told: [`${at("folder/ca.crt")} does not exist: make the CA first`] },
  { words: "pki server --dir folder", told: ["--host is missing: a host name (*.name too) or an IP address"] },
  { words: "pki server --dir folder --host a:1", told: ["--host must be a host name", ': "a:1" is neither'] },
  { words: "pki client --dir folder --name ca", told: ["--name must be 1 to 64 letters"] },
  { words: "pki init", told: ["--dir is missing: the directory of the CA"] },
  // Files: missing, not readable, not PEM, and PEM with something else.
  { words: "account add a --cert none.crt", told: [`: ${at("none.crt")} does not exist`] },
  { words: "account add a --cert folder", told: [`: ${at("folder")} is a directory`] },
  { words: "account add a --cert /nope", told: ["--cert must be", ": /nope does not exist"] },
  { words: "account add a --cert /dev/zero", told: [": /dev/zero is neither a file nor a pipe"] },
  { words: "account add a --cert notes.txt", told: [`: ${at("notes.txt")} is not a PEM file`] },
  { words: "account add a --cert /etc/passwd", told: ["--cert must be", ": /etc/passwd is not a PEM file"] },
  { words: "account add a --cert client.key", told: [`: ${at("client.key")} is a PEM file, but holds something else`] },
  { words: "account add a --cert ca.crt", told: ["--cert must be a client's certificate, not a CA's"] },
  { words: "account add a --cert server.crt", told: ["--cert must be a client's certificate, not a server's"] },
  {
    words: "account add-cert alice --cert server.crt --data-dir facilitators",
    told: ["--cert must be a client's certificate, not a server's"],
  },
  { words: "account add a", told: ["--cert is missing: a PEM file with the client's certificate"] },
  {
    words: "serve --mode facilitator",
    env: { ...OWN_FACILITATOR, TOLLGATE_TLS_CERT_FILE: "none.crt", TOLLGATE_TLS_KEY_FILE: "notes.txt" },
    told: [
      `TOLLGATE_TLS_CERT_FILE must be the path of a readable file with PEM certificates: ${at("none.crt")} does not exist`,
      `: ${at("notes.txt")} is not a PEM file`,
    ],
  },
  {
    words: "receipt verify notes.txt --jwks keys.json",
    told: ["--jwks must be a JSON Web Key Set", `: ${at("keys.json")} does not exist`],
  },
  { words: "receipt verify notes.txt --jwks notes.txt", told: ["--jwks must be", "notes.txt: it is not JSON"] },
  { words: "receipt verify notes.txt --jwks ftp://k.test", told: [": ftp://k.test: keys must come over https"] },
  { words: "receipt verify none.jsonl", told: ["--jwks is missing", `FILE ${at("none.jsonl")} does not exist`] },
  { words: "receipt verify", told: ["FILE is missing: tollgate receipt verify FILE", "--jwks is missing"] },
  {
    words: "backup nodir/b.db --data-dir gateways",
    told: [`the directory ${at("nodir")} does not exist: make it first`],
  },
  // A broken database file.
  ...["serve --port 0", "migrate", "restore", "token --tenant acme --user me"].map((words) => ({
    words: `${words} --data-dir broken`,
    told: [`${at("broken/tollgate.db")} can't be read as a database (SQLITE_NOTADB)`],
  })),
  { words: "serve --port 0 --data-dir broken", told: ["check its disk, or put a backup in its place"] },
  // The master key of another database.
  {
    words: "serve --port 0 --data-dir moved",
    told: [`the master key (${at("moved/master.key")}) must be the key that this database was made with`],
  },
  {
    words: "token --tenant acme --user me --data-dir gateways",
    env: { TOLLGATE_MASTER_KEY_FILE: at("moved/master.key") },
    told: [`the master key (${at("moved/master.key")}) must be`],
  },
  {
    words: "token --tenant acme --user me --data-dir gateways",
    env: { TOLLGATE_MASTER_KEY: `${"A".repeat(43)}=` },
    told: ["the master key (TOLLGATE_MASTER_KEY) must be the key that this database was made with"],
  },
  { words: "backup copy.db", told: [`there is no database at ${at("data/tollgate.db")}`] },
  // A file of variables.
  {
    words: "serve --env-file none.env",
    told: [`--env-file must be the path of a readable file of variables: ${at("none.env")} does not exist`],
  },
  { words: "serve --env-file folder", told: [`: ${at("folder")} is a directory`] },
  { words: "serve --env-file /dev/zero", told: [": /dev/zero is neither a file nor a pipe"] },
  { words: "serve --env-file long.env", told: [`: ${at("long.env")} is larger than 4194304 bytes`] },
  // A named pipe without a writer, which the plain opening of a file would wait for without end.
  { words: "serve --env-file pipe", told: [`: ${at("pipe")} is a pipe that nobody has written to in 10 s`] },
  {
    words: "serve",
    env: { TOLLGATE_MASTER_KEY_FILE: "/dev/zero" },
    told: [": /dev/zero is neither a file nor a pipe"],
  },
  {
    words: "serve --env-file bad.env",
    told: [
      `--env-file ${at("bad.env")}: line 4 must be NAME=value (no blank before =), a comment`,
      `--env-file ${at("bad.env")}: line 5 must be NAME=value with one quote at each end`,
    ],
  },
  {
    words: "serve --env-file behind.env",
    told: [
      `--env-file ${at("behind.env")}: line 1 must be NAME=value with one quote at each end of the value, or with none: a comment needs a line of its own\nSee`,
    ],
  },
  {
    words: "serve --env-file misspelt.env",
    told: [
      `TOLLGATE_PROT (line 1 of ${at("misspelt.env")}) is set but nothing reads it; did you mean TOLLGATE_PORT?`,
      `TOLLGATE_WORKERS (line 2 of ${at("misspelt.env")}) must be a whole number from 1 to 64: a comment needs a line of its own\n`,
    ],
  },
  // What the environment sets is not in the file, and the last of several lines counts.
  {
    words: "serve --env-file twice.env",
    env: { TOLLGATE_WORKERS: "none" },
    told: [
      "  - TOLLGATE_WORKERS must be a whole number",
      `TOLLGATE_MASTER_KEY_FILE (line 4 of ${at("twice.env")}) must be the path`,
      `TOLLGATE_TENANT_CLAIM (line 5 of ${at("twice.env")}) must be a claim name`,
      `TOLLGATE_JWKS_URL (line 6 of ${at("twice.env")}) has no effect without TOLLGATE_OIDC_ISSUER`,
    ],
  },
  {
    words: "serve --env-file host.env --data-dir made",
    told: [`TOLLGATE_HOST (line 2 of ${at("host.env")}) must be an address to listen on: 192.0.2.1 is not`],
  },
  { words: "serve --env-file lower.env --port x", told: ["is set but nothing reads it; did you mean TOLLGATE_PORT?"] },
  // Variables.
  { words: "serve --port 65536", told: ["--port must be a whole number from 0 to 65535"] },
  {
    words: "serve",
    env: { TOLLGATE_MODE: "facilitator" },
    told: [
      "TOLLGATE_MODE is facilitator, but tollgate serve runs the gateway: give --mode facilitator, or unset TOLLGATE_MODE",
    ],
  },
  { words: "serve", env: { TOLLGATE_MODE: "facilitatr" }, told: ["TOLLGATE_MODE must be gateway or facilitator"] },
  {
    words: "serve --env-file mode.env",
    told: [`TOLLGATE_MODE (line 1 of ${at("mode.env")}) is facilitator, but tollgate serve`],
  },
  {
    words: "serve",
    env: { TOLLGATE_LOG_LEVEL: "loud", TOLLGATE_SECRETS_DIR: "none.dir" },
    told: [
      "TOLLGATE_LOG_LEVEL must be debug, info, warn or error",
      `TOLLGATE_SECRETS_DIR must be the path of a readable directory: ${at("none.dir")} does not exist`,
    ],
  },
  {
    words: "serve",
    env: { TOLLGATE_JWKS_URL: "https://x.test", TOLLGATE_PORT: "1234", TOLLGATE_METRICS_PORT: "1234" },
    told: [
      "TOLLGATE_JWKS_URL has no effect without TOLLGATE_OIDC_ISSUER: unset it, or set",
      "TOLLGATE_METRICS_PORT must differ from the port of TOLLGATE_PORT",
    ],
  },
  { words: "serve", env: { TOLLGATE_SECRETS_DIR: "hunter2" }, told: [": that directory does not exist"] },
  { words: "serve", env: { TOLLGATE_MASTER_KEY_FILE: "hunter2" }, told: [": that file does not exist"] },
  {
    words: "serve --mode facilitator",
    env: { ...OWN_FACILITATOR, TOLLGATE_CLIENT_CA_FILE: "nofile" },
    told: [`of a CA, and no others: that file does not exist in ${home}\n`],
  },
  { words: "serve", env: { TOLLGATE_MASTER_KEY_FILE: "/nope" }, told: [": /nope does not exist"] },
  { words: "serve", env: { TOLLGATE_MASTER_KEY_FILE: "./nope" }, told: [`: ${at("nope")} does not exist`] },
  { words: "serve", env: { TOLLGATE_SECRETS_DIR: "/nope" }, told: [": /nope does not exist"] },
  // A key in base64 may begin with a slash, so this one could be a key in the wrong variable.
  { words: "serve", env: { TOLLGATE_MASTER_KEY_FILE: SLASHED_KEY }, told: [": that file does not exist"] },
  ...(
    [
      ["hunter2", "there is none of that name on the PATH"],
      ["/nope", "/nope does not exist"],
      ["./notes.txt", `${at("notes.txt")} is not executable`],
    ] as const
  ).map(([named, why]) => ({
    words: "demo",
    env: { TOLLGATE_ANVIL: named },
    told: [`TOLLGATE_ANVIL must name an executable program: ${why}`],
  })),
  { words: "serve --mode", told: ["--mode needs a value: --mode gateway|facilitator"] },
  { words: "--mode gatway", told: ["--mode must be gateway or facilitator: gatway is neither; did you mean gateway?"] },
  { words: "--port 0", told: ["TOLLGATE_MODE must be gateway or facilitator (or give --mode)"] },
  {
    words: "serve",
    env: { TOLLGATE_ALLOW_HOSTS: "10.0.0.1, 10.0.0.0/33,localhost", TOLLGATE_PRT: "1" },
    told: [
      "TOLLGATE_ALLOW_HOSTS must be a comma-separated list",
      "entry 2 of 3 (10.0.0.0/33) is not valid",
      "TOLLGATE_PRT is set but nothing reads it; did you mean TOLLGATE_PORT?",
    ],
  },
  {
    words: "serve",
    env: { TOLLGATE_ALLOW_HOSTS: "ok.test,*" },
    told: ["TOLLGATE_ALLOW_HOSTS must be", "entry 2 of 2 (*) is not valid"],
  },
  {
    words: "serve",
    env: { TOLLGATE_ALLOW_HOSTS: "ok.test,bad_host!" },
    told: ['entry 2 of 2, with "!" in it, is not valid'],
  },
  {
    words: "serve",
    env: { TOLLGATE_ALLOWED_ORIGINS: "https://a.test,https://b.test/path" },
    told: ["entry 2 of 2 (https://b.test/path) is not valid"],
  },
  {
    words: "--mode facilitator",
    env: { ...OWN_FACILITATOR, TOLLGATE_TLS_CERT_FILE: "other.crt" },
    told: [
      `TOLLGATE_TLS_KEY_FILE must hold the key of the first certificate in TOLLGATE_TLS_CERT_FILE: ${at("client.key")} is not the key of ${at("other.crt")}\n`,
    ],
  },
  {
    words: "--mode facilitator",
    env: {
      ...OWN_FACILITATOR,
      TOLLGATE_SIGNER_KEY: `${"5d".repeat(32)},hunter2`,
      TOLLGATE_RPC_URLS: "http://a.test,http://a.test",
    },
    told: ["TOLLGATE_SIGNER_KEY must be", "entry 2 of 2 is not valid", "entry 2 of 2 equals entry 1"],
  },
  {
    words: "serve",
    env: { DATABASE_URL: "mysql://u:hunter2@h/d" },
    told: ["DATABASE_URL must be a URL like postgres://", ": it is not a URL that begins with postgres:// or"],
  },
  {
    words: "serve",
    env: { DATABASE_URL: "postgres://u:hunter2@a:1,b:2/d" },
    told: [": it must name one host, that of the primary"],
  },
  {
    words: "serve",
    env: { DATABASE_URL: "postgres://u:hunter2@a/d?sslmode=on" },
    told: [": its sslmode must be one of disable, allow"],
  },
  {
    words: "migrate",
    env: { DATABASE_URL: "postgres://u:hunter2@127.0.0.1:1/x", TOLLGATE_MASTER_KEY: `${"A".repeat(43)}=` },
    told: ["the Postgres server of DATABASE_URL does not answer at 127.0.0.1:1"],
    // It may answer later.
    status: 1,
  },
  {
    words: "migrate",
    env: { DATABASE_URL: "postgres://u:hunter2@127.0.0.1:TAKEN/x", TOLLGATE_MASTER_KEY: `${"A".repeat(43)}=` },
    told: ["does not answer at 127.0.0.1:TAKEN: the connection was closed, as by a server that is not Postgres"],
    status: 1,
  },
  {
    words: "migrate",
    env: { TOLLGATE_MASTER_KEY: "hunter2", TOLLGATE_MASTER_KEY_FILE: "notes.txt" },
    told: ["TOLLGATE_MASTER_KEY and TOLLGATE_MASTER_KEY_FILE must not both be set"],
  },
  {
    words: "serve --data-dir notes.txt",
    told: [
      `--data-dir must be a directory that tollgate can create and write to: ${at("notes.txt")} is not a directory`,
    ],
  },
  {
    words: "--mode facilitator --data-dir keyed --port 0",
    env: OWN_FACILITATOR,
    told: [`must be the facilitator's data directory: ${at("keyed")} holds a master.key, so it is a gateway's`],
  },
  {
    words: "account add bob --cert other.crt --data-dir keyed",
    told: [`: ${at("keyed")} holds a master.key, so it is a gateway's`],
  },
  // Addresses.
  { words: "serve --host 192.0.2.1 --data-dir made", told: ["--host must be an address to listen on: 192.0.2.1"] },
  {
    words: "serve --data-dir made --port TAKEN",
    told: [
      "TOLLGATE_HOST and --port must be free to listen on: 127.0.0.1:TAKEN is already in use; choose another with --port, or stop the program that uses it\nSee",
    ],
  },
  {
    words: "serve --data-dir made --host 127.0.0.1",
    env: { TOLLGATE_PORT: "TAKEN" },
    told: [
      "--host and TOLLGATE_PORT must be free to listen on: 127.0.0.1:TAKEN is already in use; choose another with TOLLGATE_PORT, or",
    ],
  },
  {
    words: "--mode facilitator --data-dir made-too --port TAKEN",
    env: OWN_FACILITATOR,
    told: ["TOLLGATE_HOST and --port must be free to listen on: 127.0.0.1:TAKEN is already in use"],
  },
  {
    words: "--mode facilitator --data-dir made-too --host 192.0.2.1",
    env: OWN_FACILITATOR,
    told: ["192.0.2.1 is not an address of this machine"],
  },
  {
    words: "--mode facilitator --data-dir made-too --port 0",
    env: { ...OWN_FACILITATOR, TOLLGATE_OPEN_PORT: "TAKEN" },
    told: ["TOLLGATE_HOST and TOLLGATE_OPEN_PORT must be free to listen on: 127.0.0.1:TAKEN is already in use"],
  },
  {
    words: "serve --data-dir held --port 0",
    status: 1,
    told: [
      `tollgate can't start:\n  - another program has locked ${at("held/tollgate.db")} for 10 s: end what writes to it (a copy that is being made, an SQLite shell), and start again\nSee`,
    ],
  },
  { words: "version now", told: ["now is not expected here"] },
  // The settlement of a tenant.
  { words: `${SET} http://127.0.0.1:9443`, told: ["--facilitator must be an https URL"] },
  { words: `${SET} https://user:hunter2@f.test`, told: ["--facilitator must not carry user information"] },
  { words: `${SET} https://f.test/x/settle/`, told: ["--facilitator must be the base URL, without /settle"] },
  { words: `${SET} https://f.test/?a=1`, told: ["--facilitator must have no query and no fragment"] },
  { words: `${SET}=`, told: ["--facilitator must not be empty: the facilitator's https URL"] },
  { words: `${SET} notaurl`, told: ["--facilitator must be an https URL", ": notaurl is not a URL"] },
  { words: "settlement set --tenant acme", told: ["--facilitator is missing", "--bundle is missing"] },
  {
    words: "settlement set --tenant acme --facilitator https://f.test --bundle other.pem",
    told: ["--bundle must be", "no certificate of the bundle belongs to its private key"],
  },
  {
    words: "settlement set --tenant acme --facilitator https://f.test --bundle server.pem",
    told: [`: ${at("server.pem")} is not such a bundle: its certificate is a server's, not a client's`],
  },
  {
    words: "settlement set --tenant acme --facilitator https://f.test --bundle client.crt",
    told: [`: ${at("client.crt")} holds no private key`],
  },
  // A call. All that is wrong is told at once.
  {
    words: "call",
    told: ["AGENT is missing: tollgate call AGENT", "a token is missing: set TOLLGATE_TOKEN, or name a file"],
  },
  {
    words: "call a b",
    env: { TOLLGATE_TOKEN: "hunter2 x" },
    told: ["b is not expected here", "TOLLGATE_TOKEN must be a token", "it has a blank or another character"],
  },
  {
    words: "call a --url g.test?key=hunter2",
    env: { TOLLGATE_TOKEN: "hunter2" },
    told: [
      "without user information, query or fragment\n",
      "it does not have the three parts of a token, in base64url with dots between them",
    ],
  },
  {
    words: "call a hello world -d x -q --max-price .01",
    env: { TOLLGATE_TOKEN: "Bearer hunter2" },
    told: [
      "hello is not expected here: --data takes text; put it in quotes if it contains spaces",
      "-d is not a flag: flags begin with two hyphens; did you mean --data?",
      "-q is not a flag: flags begin with two hyphens\n",
      "--max-price must be a decimal number of USDC, like 5 or 0.5 and not .5, with 1 to 6 digits before the point",
      "TOLLGATE_TOKEN must be a token, as tollgate token prints it: leave out the word Bearer before it",
    ],
  },
  { words: "call a --token-file bearer", told: [`: ${at("bearer")} does not contain one: leave out the word Bearer`] },
  {
    words:
      "call a --data --wait soon --max-price 0.0000001 --url localhost:8080 --token-file none.crt --payer-key-file open.key --price 1",
    env: { TOLLGATE_TOKEN_FILE: "none" },
    told: [
      "--data needs a value: --data @FILE|-|TEXT",
      "--wait must be a whole number from 0 to 86400",
      "--max-price must be a decimal number of USDC, like 5 or 0.5",
      "--url must be an http or https URL with a host and without user information, query or fragment: did you mean http://localhost:8080?",
      `--token-file must be a file readable only by its owner (chmod 600), containing a token, as tollgate token prints it: ${at("none.crt")} does not exist`,
      `--payer-key-file must be a file readable only by its owner (chmod 600), containing one 32-byte hex private key (secp256k1): ${at("open.key")} is open to other users\n`,
      "--price is not a flag of this command",
      "TOLLGATE_TOKEN_FILE must be the path",
    ],
  },
  {
    words:
      "call a --data @none.crt --wait -1 --max-price -1 --url http://me:hunter2@g.test --token-file pipe --payer-key-file secret.key",
    told: [
      `--data must name a readable file after @: ${at("none.crt")} does not exist`,
      "--wait must be",
      "--max-price must be",
      "--url must be an http or https URL with a host and without user information",
      `: ${at("pipe")} is not a regular file`,
      `: ${at("secret.key")} does not contain one`,
    ],
  },
  {
    words: "call a --data @folder --token-file folder",
    told: [`${at("folder")} is a directory`, `: ${at("folder")} is not a regular`],
  },
  {
    words: "call a --data @/dev/zero --token-file=",
    told: ["/dev/zero is neither a file nor a pipe", "--token-file must not be empty"],
  },
  { words: "call a --data @", told: ["--data @ must name a file: @FILE"] },
  {
    words: `${SET} https://f.test`,
    told: [`must be the gateway's data directory: ${at("data")} holds no tollgate.db`],
  },
];

test("each wrong input is told with its culprit, with status 2, and nothing on standard output", async () => {
  expect(WRONG.length).toBeGreaterThan(30);
  const here = (text: string) => text.replaceAll("TAKEN", String(taken.port));
  const failed: object[] = [];
  for (const wrong of WRONG) {
    const env = Object.entries(wrong.env ?? {}).map(([name, value]) => [name, here(value ?? "")]);
    const { code, stdout, stderr } = await run({ ...wrong, words: here(wrong.words), env: Object.fromEntries(env) });
    const told = wrong.told.map(here).filter((text) => !stderr.includes(text));
    const isPlain = !/hunter2|^\s+at .*:\d+/m.test(stderr);
    if (code === (wrong.status ?? 2) && stdout === "" && told.length === 0 && isPlain) continue;
    failed.push({ words: wrong.words, code, stdout, missing: told, stderr });
  }
  expect(failed).toEqual([]);
  // Nor does a refused start leave a directory, or anything in one.
  expect(readdirSync(home).filter((name) => /^(data|made.*)$/.test(name))).toEqual([]);
  expect([readdirSync(at("folder")), readdirSync(at("keyed"))]).toEqual([[], ["master.key"]]);
  // No copy has replaced the other service's database.
  expect(readdirSync(at("gateways")).filter((name) => name.includes("db"))).toEqual(["tollgate.db"]);
  // No command has left a master key beside a facilitator's database.
  expect(readdirSync(at("facilitators"))).not.toContain("master.key");
});

test("a flag without its value, given twice, or empty is told once, and not as missing too", async () => {
  for (const [words, ...told] of [
    ["--mode", "--mode needs a value: --mode gateway|facilitator"],
    ["--mode=", "--mode must not be empty"],
    ["doctor --mode", "--mode needs a value: --mode gateway|facilitator"],
    ["serve --mode gateway --mode facilitator", "--mode may be given only once"],
    ["serve --env-file", "--env-file needs a value: --env-file FILE"],
    ["serve --env-file=", "--env-file must not be empty"],
    ["token revoke --tenant", "--tenant needs a value: --tenant T"],
    ["pki server --dir folder --host", "--host needs a value: --host H"],
    ["call a --token-file", "--token-file needs a value: --token-file FILE"],
    ["token --tenant", "--tenant needs a value: --tenant T", "--user is missing: a text of at most 256 characters"],
  ] as const) {
    const { code, stdout, stderr } = await run({ words, told: [] });
    const lines = stderr.split("\n").filter((line) => line.startsWith("  - "));
    expect({ words, code, stdout, lines }).toEqual({
      ...{ words, code: 2, stdout: "" },
      lines: told.map((text) => expect.stringContaining(`  - ${text}`)),
    });
  }
});

test("with --json a word that is no command is told in a document too", async () => {
  for (const [words, problem] of [
    ["keys --json", "keys is not a command by itself; did you mean keys rotate?"],
    ["account lst --json", "account lst is not a command; did you mean account list?"],
    ["backup copy.db --json=yes", "--json takes no value"],
    ["backup --json --tenat a", "--tenat is not a flag of this command"],
    ["call echo --json --stream", "--json can't be combined with --stream"],
  ] as const) {
    const { code, stdout } = await run({ words, told: [] });
    expect({ words, code, problems: JSON.parse(stdout).problems }).toEqual({
      ...{ words, code: 2 },
      problems: expect.arrayContaining([problem]),
    });
  }
});

test("a program on the PATH is named in hints as it was called", async () => {
  symlinkSync(tollgateBinary(), at("gate"));
  const script = "exec gate tokn";
  const { stderr } = await runCommand(["-c", script], {
    cwd: home,
    env: { PATH: `${home}:/usr/bin:/bin` },
    program: ["bash"],
  });
  expect(stderr).toBe("tollgate: tokn is not a command; did you mean token?\nSee gate help.\n");
  const beside = await runCommand(["-c", "exec ./gate help"], {
    cwd: home,
    env: { PATH: "/usr/bin:/bin" },
    program: ["bash"],
  });
  expect(beside.stdout).toEndWith("\nHere tollgate is called as ./gate\n");
});

/** Permissions of files hold for root too. The binary may lie where root alone may look. */
const ordinary = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--", tollgateBinary()];

test("a path that this user may not use is told with what it must be, by every command that meets it", async () => {
  const made = "pki init --dir closed-pki";
  expect((await run({ words: made, told: [] })).code).toBe(0);
  for (const place of ["db", "lock", "wal", "folder-db"])
    cpSync(at("gateways"), at(`closed-${place}`), { recursive: true });
  cpSync(at("facilitators"), at("closed-accounts"), { recursive: true });
  rmSync(at("closed-folder-db/tollgate.db"));
  mkdirSync(at("closed-folder-db/tollgate.db"));
  for (const name of ["lock/tollgate.lock", "wal/tollgate.db-wal"]) writeFileSync(at(`closed-${name}`), "");
  mkdirSync(at("closed"));
  const closed = ["db/tollgate.db", "lock/tollgate.lock", "wal/tollgate.db-wal", "accounts/tollgate.db", "pki/ca.key"];
  const all = [...closed.map((name) => at(`closed-${name}`)), at("closed"), at("client.crt")];
  for (const path of all) chmodSync(path, 0o000);
  const lacks = (name: string) => `${at(name)} must be readable and writable by this user (EACCES)\nSee`;
  const writing = ["serve --port 0", "token --tenant a --user b", "migrate"];
  const owning = [
    ...writing,
    "token revoke --tenant a",
    "restore",
    "keys rotate",
    "backup b.db",
    `${SET} https://f.test`,
  ];
  const on = (place: string, commands: readonly string[], told: string) =>
    commands.map((words) => [`${words} --data-dir closed-${place}`, told] as const);
  for (const [words, told] of [
    ...on("db", owning, lacks("closed-db/tollgate.db")),
    ...on("lock", ["serve --port 0", "restore"], lacks("closed-lock/tollgate.lock")),
    ...on("wal", [...writing, "backup b.db"], lacks("closed-wal/tollgate.db-wal")),
    ...on("folder-db", [...writing, "restore"], `${at("closed-folder-db/tollgate.db")} must be a file`),
    ...on(
      "accounts",
      ["account list", "account add bob --cert other.crt", "account disable alice", "account remove alice --yes"],
      lacks("closed-accounts/tollgate.db"),
    ),
    ["backup b.db --data-dir closed", `${at("closed/tollgate.db")} must be readable`],
    ["pki init --dir closed/p", "closed/p must be readable and writable by this user (EACCES)"],
    ["pki server --dir closed/p --host a", "closed/p must be readable and writable by this user (EACCES)"],
    [
      "pki client --dir closed-pki --name b",
      `${at("closed-pki/ca.key")} can't be read: permission denied (EACCES)\nSee`,
    ],
    ["backup closed/b.db --data-dir gateways", `the directory ${at("closed")} must be writable by this user (EACCES)`],
    ["backup --verify closed/b.db", lacks("closed/b.db")],
    ["restore closed/b.db --data-dir closed-wal", "can't be restored: it must be readable by this user (EACCES)"],
    ["receipt verify closed/r --jwks k", `FILE ${at("closed/r")} can't be read: permission denied (EACCES)`],
    ["account add a --cert client.crt", `${at("client.crt")} can't be read: permission denied (EACCES)`],
  ] as const) {
    const env = { PATH: "/usr/bin:/bin" };
    const program = process.getuid?.() === 0 ? ordinary : [tollgateBinary()];
    const { code, stdout, stderr } = await runCommand(words.split(" "), { cwd: home, env, program });
    expect({ words, code, stdout, stderr }).toEqual({
      words,
      code: 2,
      stdout: "",
      stderr: expect.stringContaining(told),
    });
  }
  // Only an open directory can be removed.
  chmodSync(at("closed"), 0o700);
});

test("a scope that is nearly one that the gateway reads is warned of, and any other is taken", async () => {
  const scoped = (scope: string) =>
    run({ words: `token --tenant acme --user me --data-dir gateways --scope ${scope}`, told: [] });
  const near = await scoped("invocation:read_body");
  expect(near).toMatchObject({
    code: 0,
    stderr: "warning: the gateway reads no scope invocation:read_body; did you mean invocations:read_body?\n",
  });
  for (const scope of ["invocations:read_body", "own:scope"])
    expect(await scoped(scope)).toMatchObject({ code: 0, stderr: "" });
});

test("several words that are no command are looked for in the manual", async () => {
  const { code, stdout } = await run({ words: "help how do I pay", told: [] });
  expect({ code, stdout }).toEqual({ code: 0, stdout: expect.stringMatching(/^ {2}payments +Pay for a call$/m) });
});

test("the port of a facilitator that speaks plain HTTP is told as such", async () => {
  using plain = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => new Response() });
  const url = `https://127.0.0.1:${plain.port}`;
  const { code, stderr } = await run({ words: `${SET} ${url} --data-dir gateways`, told: [] });
  expect({ code, stderr }).toEqual({ code: 0, stderr: expect.stringContaining("it speaks plain HTTP there") });
  expect(stderr).toContain("name its TLS port (a facilitator's is TOLLGATE_PORT, not TOLLGATE_OPEN_PORT)");
});
