// What tollgate says to somebody who typed something wrong: one table of inputs and of what each must be told. The sentence names
// the culprit (flag, variable, file, line, entry, host and port), the exit status is 2, and standard output stays empty.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmodSync, mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
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

beforeAll(async () => {
  pki = await makePki();
  taken = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
  mkdirSync(at("folder"));
  mkdirSync(at("locked"));
  writeFileSync(at("notes.txt"), "no certificate\n");
  writeFileSync(at("client.crt"), pki.client.cert);
  writeFileSync(at("client.key"), pki.client.key);
  writeFileSync(at("other.pem"), `${pki.client.cert}${pki.otherClient.key}`);
  writeFileSync(at("good.pem"), `${pki.client.cert}${pki.client.key}`);
  writeFileSync(at("ca.crt"), pki.ca.cert);
  writeFileSync(at("bad.env"), "# a comment\n\nTOLLGATE_PORT=0\nhunter2 is a secret\nTOLLGATE_HOST='::1\n");
  writeFileSync(at("misspelt.env"), "TOLLGATE_PROT=1\nTOLLGATE_WORKERS=many\n");
});
afterAll(() => {
  taken.stop(true);
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

const WRONG: readonly Wrong[] = [
  // Words and flags.
  {
    words: "tokn",
    told: ["tollgate can't start:", "tokn is not a command; did you mean token?", "See tollgate help."],
  },
  { words: "account lst", told: ["account lst is not a command; did you mean account list?"] },
  {
    words: "account",
    told: ["account must be followed by one of add, list, disable, enable, remove, add-cert, remove-cert"],
  },
  { words: "keys rotat", told: ["keys rotat is not a command; did you mean keys rotate?"] },
  {
    words: "token --tenat acme",
    told: ["--tenat is not a flag; did you mean --tenant?", "See tollgate token --help."],
  },
  { words: "token --tenant acme --user", told: ["--user must be followed by a value"] },
  { words: "token --tenant a --tenant b --user c", told: ["--tenant must be given only once"] },
  { words: "backup copy.db --json=yes", told: ["--json takes no value"] },
  { words: "migrate now", told: ["now is not expected"] },
  { words: "account disable", told: ["NAME must be given"] },
  { words: "help paymets", told: ["paymets is not a topic; did you mean payments?"] },
  { words: "help serv", told: ["serv is not a topic; did you mean serve?"] },
  { words: "completion zhs", told: ["SHELL must be bash, zsh or fish, and not zhs; did you mean zsh?"] },
  { words: "token --tenant acme --user me --ttl 1w", told: ["--ttl must be a time like 90s, 30m, 12h or 7d"] },
  {
    words: "account remove alice",
    told: ["--yes must be given where there is no terminal to ask: account remove can't be undone"],
  },
  {
    words: "token revoke --all",
    told: ["--yes must be given where there is no terminal to ask: token revoke can't be undone"],
  },
  { words: "token revoke --all --tenant acme --yes", told: ["--all must stand alone"] },
  // Files: missing, not readable, not PEM, and PEM with something else.
  { words: "account add a --cert none.crt", told: [`: ${at("none.crt")} does not exist`] },
  { words: "account add a --cert folder", told: [`: ${at("folder")} can't be read (EISDIR)`] },
  { words: "account add a --cert notes.txt", told: [`: ${at("notes.txt")} is not a PEM file`] },
  { words: "account add a --cert /etc/passwd", told: ["--cert must be", ": /etc/passwd is not a PEM file"] },
  { words: "account add a --cert client.key", told: [`: ${at("client.key")} is a PEM file, but holds something else`] },
  { words: "account add a --cert ca.crt", told: ["--cert must be a client's certificate, not a CA's"] },
  { words: "account add a", told: ["--cert must be given: the path of a PEM file"] },
  {
    words: "serve --mode facilitator",
    env: { ...OWN_FACILITATOR, TOLLGATE_TLS_CERT_FILE: "none.crt", TOLLGATE_TLS_KEY_FILE: "notes.txt" },
    told: [
      `TOLLGATE_TLS_CERT_FILE must be the path of a readable file with PEM certificates: ${at("none.crt")} does not exist`,
      `: ${at("notes.txt")} is not a PEM file`,
    ],
  },
  {
    words: "receipt verify none.jsonl --jwks keys.json",
    told: ["--jwks must be a JSON Web Key Set", "keys.json: ENOENT"],
  },
  { words: "receipt verify none.jsonl", told: ["--jwks must be given"] },
  { words: "backup copy.db", told: [`there is no database at ${at("data/tollgate.db")}`] },
  // A file of variables.
  {
    words: "serve --env-file none.env",
    told: [`--env-file must be the path of a readable file of variables: ${at("none.env")} does not exist`],
  },
  { words: "serve --env-file folder", told: [`: ${at("folder")} can't be read (EISDIR)`] },
  {
    words: "serve --env-file bad.env",
    told: [
      `--env-file ${at("bad.env")}: line 4 must be NAME=value`,
      `--env-file ${at("bad.env")}: line 5 must be NAME=value`,
    ],
  },
  {
    words: "serve --env-file misspelt.env",
    told: ["TOLLGATE_PROT is set but nothing reads it; did you mean TOLLGATE_PORT?", "TOLLGATE_WORKERS must be"],
  },
  // Variables.
  { words: "serve --port 65536", told: ["--port must be a whole number from 0 to 65535"] },
  { words: "--mode gatway", told: ["--mode must be gateway or facilitator"] },
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
    env: { TOLLGATE_ALLOWED_ORIGINS: "https://a.test,https://b.test/path" },
    told: ["entry 2 of 2 (https://b.test/path) is not valid"],
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
    told: ["DATABASE_URL must be a URL like postgres://"],
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
    env: { TOLLGATE_MASTER_KEY: "hunter2", TOLLGATE_MASTER_KEY_FILE: "notes.txt" },
    told: ["TOLLGATE_MASTER_KEY and TOLLGATE_MASTER_KEY_FILE must not both be set"],
  },
  {
    words: "serve --data-dir notes.txt",
    told: ["TOLLGATE_DATA_DIR must be a directory that can be created and written"],
  },
  // Addresses, which of the whole table only these two rows make a database for.
  { words: "serve --host 192.0.2.1 --data-dir made", told: ["192.0.2.1 is not an address of this machine"] },
  { words: "serve --data-dir made --port TAKEN", told: ["127.0.0.1 port TAKEN is already in use"] },
  {
    words: "--mode facilitator --data-dir made-too --port TAKEN",
    env: OWN_FACILITATOR,
    told: ["127.0.0.1 port TAKEN is already in use"],
  },
  {
    words: "--mode facilitator --data-dir made-too --host 192.0.2.1",
    env: OWN_FACILITATOR,
    told: ["192.0.2.1 is not an address of this machine"],
  },
  { words: "version now", told: ["now is not expected"] },
  // The settlement of a tenant.
  { words: `${SET} http://127.0.0.1:9443`, told: ["--facilitator must be an https URL"] },
  { words: `${SET} https://user:hunter2@f.test`, told: ["--facilitator must not carry user information"] },
  { words: `${SET} https://f.test/?a=1`, told: ["--facilitator must have no query and no fragment"] },
  { words: `${SET}=`, told: ["--facilitator must be given"] },
  { words: "settlement set --tenant acme", told: ["--facilitator must be given", "--bundle must be given"] },
  {
    words: "settlement set --tenant acme --facilitator https://f.test --bundle other.pem",
    told: ["--bundle must be", "no certificate of the bundle belongs to its private key"],
  },
  {
    words: "settlement set --tenant acme --facilitator https://f.test --bundle client.crt",
    told: [`: ${at("client.crt")} holds no private key`],
  },
  { words: `${SET} https://f.test`, told: ["there is no master key"] },
];

test("each wrong input is told with its culprit, with status 2, and nothing on standard output", async () => {
  expect(WRONG.length).toBeGreaterThan(30);
  const here = (text: string) => text.replaceAll("TAKEN", String(taken.port));
  const failed: object[] = [];
  for (const wrong of WRONG) {
    const { code, stdout, stderr } = await run({ ...wrong, words: here(wrong.words) });
    const told = wrong.told.map(here).filter((text) => !stderr.includes(text));
    const isPlain = !/hunter2|^\s+at .*:\d+/m.test(stderr);
    if (code === (wrong.status ?? 2) && stdout === "" && told.length === 0 && isPlain) continue;
    failed.push({ words: wrong.words, code, stdout, missing: told, stderr });
  }
  expect(failed).toEqual([]);
  expect(readdirSync(home)).not.toContain("data");
});

test.skipIf(process.getuid?.() === 0)("a file without permission is told as such", async () => {
  chmodSync(at("client.crt"), 0o000);
  const { code, stderr } = await run({ words: "account add a --cert client.crt", told: [] });
  expect({ code, stderr }).toEqual({
    code: 2,
    stderr: expect.stringContaining(`${at("client.crt")} can't be read (EACCES)`),
  });
});
