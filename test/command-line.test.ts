// The command line as people and scripts meet it, by the binary: help, completions in the shells themselves, one JSON document,
// questions and progress on a terminal, and a file of variables.
import { Database } from "bun:sqlite";
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { VARIABLES } from "../src/config.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { type Environment, runCommand, startService } from "./support/gateway/process.ts";
import { makePki } from "./support/http/pki.ts";

const home = mkdtempSync(join(tmpdir(), "command-line-"));
const at = (name: string) => join(home, name);
const PATH = "/usr/bin:/bin";

const run = (words: string, env: Environment = {}) =>
  runCommand(words === "" ? [] : words.split(" "), { cwd: home, env: { PATH, ...env } });

interface OnTerminal {
  /** Everything that the terminal has shown. */
  shown(): string;
  write(text: string): void;
  /** Resolves when the terminal has shown this. */
  shows(text: string): Promise<void>;
  readonly exited: Promise<number>;
}

/** Runs a command of the binary on a terminal of its own. */
function runOnTerminal(words: readonly string[], env: Environment = {}): OnTerminal {
  let shown = "";
  const waiting: { readonly text: string; readonly resolve: () => void }[] = [];
  const look = () => {
    for (const { text, resolve } of waiting) if (shown.includes(text)) resolve();
  };
  const decoder = new TextDecoder();
  const child = Bun.spawn(["setpriv", "--pdeathsig", "KILL", "--", tollgateBinary(), ...words], {
    cwd: home,
    env: { PATH, TERM: "xterm", ...env },
    terminal: {
      cols: 200,
      rows: 24,
      data(_terminal, bytes) {
        shown += decoder.decode(bytes, { stream: true });
        look();
      },
    },
  });
  return {
    shown: () => shown,
    write: (text) => void child.terminal?.write(text),
    shows(text) {
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      waiting.push({ text, resolve });
      look();
      child.exited.then(() => reject(new Error(`it ended without showing ${text}:\n${shown}`)));
      return promise;
    },
    exited: child.exited,
  };
}

beforeAll(async () => {
  const { client } = await makePki();
  writeFileSync(at("client.crt"), client.cert);
  writeFileSync(at("client.pem"), client.cert + client.key);
  for (const mode of ["gateway", "facilitator"]) {
    expect((await run(`migrate --data-dir ${mode}`, { TOLLGATE_MODE: mode })).code).toBe(0);
  }
  expect((await run("token --tenant acme --user me --data-dir gateway")).code).toBe(0);
});
afterAll(() => rmSync(home, { recursive: true }));

describe("help", () => {
  test("is short without a word, and whole when all is asked for", async () => {
    const [bare, help, whole] = await Promise.all(["", "help", "--help"].map((words) => run(words)));
    expect(bare).toEqual({ code: 0, stdout: expect.stringContaining("\nUsage: tollgate COMMAND"), stderr: "" });
    expect(bare?.stdout.split("\n").length).toBeLessThanOrEqual(41);
    expect(help?.stdout).toBe(String(bare?.stdout));
    for (const name of Object.keys(VARIABLES)) expect(whole?.stdout).toContain(`  ${name}`);
    expect(existsSync(at("data"))).toBe(false);
  });

  test("is that of the command where one is named", async () => {
    const own = await run("account add --help");
    expect([own.code, own.stderr]).toEqual([0, ""]);
    expect(own.stdout).toStartWith("Usage: tollgate account add NAME");
    expect(own.stdout).toContain("--daily-ceiling N");
    expect(own.stdout).not.toContain("TOLLGATE_WORKERS");
    expect((await run("help configuration")).stdout).toContain("| `TOLLGATE_WORKERS` |");
    // The binary has the index of the search, and no renderer.
    const found = await run("help x402");
    expect(found).toEqual({ code: 0, stdout: expect.stringMatching(/^ {2}payments +Pay for a call$/m), stderr: "" });
    const versions = await Promise.all(["version", "-v", "--version"].map((words) => run(words)));
    expect(versions.map(({ stdout }) => stdout)).toEqual(
      Array(3).fill(expect.stringMatching(/^tollgate \d+\.\d+\.\d+\n$/)),
    );
  });

  test("does not stand in for a service whose mode is set", async () => {
    const { code, stderr } = await run("", { TOLLGATE_MODE: "facilitator" });
    expect({ code, stderr }).toEqual({ code: 2, stderr: expect.stringContaining("TOLLGATE_RPC_URLS must be set") });
  });
});

describe("completion", () => {
  /** What each shell offers for a line that ends with the word to complete. */
  const shells: Readonly<Record<string, (line: string) => readonly string[]>> = {
    bash: (line) => [
      "bash",
      "--norc",
      "-c",
      `source completion; words=(${line}); COMP_WORDS=("\${words[@]}"${line.endsWith(" ") ? ' ""' : ""})
       COMP_CWORD=$((\${#COMP_WORDS[@]} - 1)); _tollgate; printf '%s\\n' "\${COMPREPLY[@]}"`,
    ],
    // The functions that would show the candidates print them instead.
    zsh: (line) => [
      "zsh",
      "-f",
      "-c",
      `compdef() { : }; source ./completion
       _describe() { print -rl -- \${(P)2%%:*} }; compadd() { shift; print -rl -- $@ }; _files() { }; _message() { }
       words=(${line}${line.endsWith(" ") ? ' ""' : ""}); CURRENT=$#words; _tollgate`,
    ],
    fish: (line) => ["fish", "--no-config", "-c", `source completion; complete -C ${JSON.stringify(line)}`],
  };
  const expected: readonly (readonly [line: string, offered: readonly string[], not: readonly string[]])[] = [
    ["tollgate ", ["token", "serve", "account", "completion"], ["revoke"]],
    ["tollgate account ", ["add", "list", "remove-cert"], ["token"]],
    ["tollgate account add --", ["--cert", "--daily-ceiling"], ["--tenant", "--yes"]],
    ["tollgate account remove --", ["--yes"], ["--cert"]],
    ["tollgate token --", ["--tenant", "--ttl"], ["--all"]],
    ["tollgate token revoke --", ["--all", "--yes"], ["--ttl"]],
    ["tollgate --mode ", ["gateway", "facilitator"], ["token"]],
    ["tollgate help ", ["payments", "token"], []],
    ["tollgate help account ", ["add", "remove-cert"], ["payments", "token"]],
    ["tollgate help token ", ["revoke"], ["payments", "token"]],
    ["tollgate completion ", ["bash", "zsh", "fish"], ["token"]],
  ];
  for (const [shell, command] of Object.entries(shells)) {
    test.skipIf(Bun.which(shell) === null)(`works in ${shell}`, async () => {
      const { stdout, stderr, code } = await run(`completion ${shell}`);
      expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
      writeFileSync(at("completion"), stdout);
      for (const [line, offered, not] of expected) {
        const child = Bun.spawn([...command(line)], {
          cwd: home,
          env: { PATH, HOME: home },
          stdout: "pipe",
          stderr: "pipe",
        });
        const [out, err] = await Promise.all([child.stdout.text(), child.stderr.text()]);
        const words = out.split("\n").map((each) => each.replace(/\t.*/, ""));
        const seen = [...offered, ...not].filter((word) => words.includes(word));
        expect({ line, seen, err, out }).toEqual({ line, seen: [...offered], err: "", out });
      }
    });
  }

  test.each(["zsh", "fish"])("describes a group of one command by that command in %s", async (shell) => {
    const { stdout } = await run(`completion ${shell}`);
    expect(stdout).toMatch(/settlement.{1,6}set the facilitator/);
    expect(stdout).toMatch(/keys.{1,6}renew every key/);
  });

  test.skipIf(Bun.which("bash") === null)("completes a word that somebody types in bash", async () => {
    writeFileSync(at("completion"), (await run("completion bash")).stdout);
    const shown: string[] = [];
    const seen = Promise.withResolvers<void>();
    const child = Bun.spawn(["setpriv", "--pdeathsig", "KILL", "--", "bash", "--norc", "--noprofile", "-i"], {
      cwd: home,
      env: { PATH, HOME: home, TERM: "dumb", PS1: "ready> " },
      terminal: {
        cols: 200,
        rows: 24,
        data(_terminal, bytes) {
          shown.push(new TextDecoder().decode(bytes));
          if (shown.join("").includes("settlement set ")) seen.resolve();
        },
      },
    });
    child.terminal?.write("source completion\ntollgate settl\tse\t");
    await seen.promise;
    child.kill("SIGKILL");
    await child.exited;
  });
});

describe("--json", () => {
  async function documentOf(words: string, status = 0, env: Environment = {}): Promise<Record<string, unknown>> {
    const { code, stdout, stderr } = await run(words, env);
    expect([words, code, stderr]).toEqual([words, status, stderr]);
    return JSON.parse(stdout) as Record<string, unknown>;
  }

  test("is one document on standard output, with the status that the command has without it", async () => {
    expect(await documentOf("account list --json --data-dir facilitator")).toEqual({ accounts: [] });
    expect((await run("account add alice --cert client.crt --daily-ceiling 5 --data-dir facilitator")).code).toBe(0);
    expect(await documentOf("account list --json --data-dir facilitator")).toEqual({
      accounts: [
        {
          name: "alice",
          enabled: true,
          fingerprints: [expect.stringMatching(/^[0-9a-f]{64}$/)],
          max_per_transaction: null,
          daily_ceiling: "5",
        },
      ],
    });
    const copy = { file: at("copy.db"), written: true, bytes: expect.any(Number), problem: null };
    expect(await documentOf("backup copy.db --verify --json --data-dir gateway")).toEqual({ ...copy, verified: true });
    writeFileSync(at("broken.db"), "no database");
    expect(await documentOf("backup --verify broken.db --json --data-dir gateway", 1)).toMatchObject({
      ...{ written: false, verified: false },
      problem: expect.stringContaining("not a complete tollgate database"),
    });
    expect(await documentOf("keys rotate --json --data-dir gateway")).toMatchObject({
      outcome: "done",
      master_key_file: at("gateway/master.key"),
      master_key_in_place: true,
      gateways_without_the_key: [],
    });
    expect(await documentOf("doctor --mode gateway --json --data-dir gateway --port 0")).toMatchObject({
      healthy: true,
      checks: expect.arrayContaining([{ check: "keys", state: "ok", message: expect.any(String), advice: null }]),
    });
    writeFileSync(at("gateway/master.key"), `${Buffer.alloc(32).toString("base64")}\n`);
    expect(await documentOf("doctor --mode gateway --json --data-dir gateway --port 0", 1)).toMatchObject({
      healthy: false,
      checks: expect.arrayContaining([expect.objectContaining({ check: "keys", state: "fail" })]),
    });
  });

  test("tells the problems of a command that can't be done", async () => {
    expect(await documentOf("backup other.db --json --data-dir nowhere", 2)).toEqual({
      problems: [`there is no database at ${at("nowhere/tollgate.db")}`],
    });
    expect(await documentOf("doctor --mode gatway --json", 2)).toEqual({
      problems: ["--mode must be gateway or facilitator: gatway is neither; did you mean gateway?"],
    });
    writeFileSync(at("keys.json"), '{"keys": []}');
    writeFileSync(at("receipts.jsonl"), "x\n");
    expect(await documentOf("receipt verify receipts.jsonl --jwks keys.json --json", 2)).toEqual({
      problems: [expect.stringContaining("--jwks must be a JSON Web Key Set")],
    });
  });
});

test("an empty file in the place of the database of a master key is told in the log", async () => {
  expect((await run("token --tenant acme --user me --data-dir emptied")).stderr).not.toContain("database_is_empty");
  writeFileSync(at("emptied/tollgate.db"), "");
  const log: string[] = [];
  const words = ["serve", "--port", "0", "--data-dir", "emptied"];
  const service = await startService({ cwd: home, env: { PATH }, args: words, log });
  await service.end("SIGTERM");
  expect(log.join("")).toContain(`"event":"database_is_empty","path":"${at("emptied/tollgate.db")}"`);
});

test("who replaces a master key is told what needs it, and who restores a copy that no key opens what to do", async () => {
  expect((await run("token --tenant acme --user me --data-dir turned")).code).toBe(0);
  expect((await run("backup before.db --data-dir turned")).stdout).toBe(`wrote ${at("before.db")}\n`);
  const key = readFileSync(at("turned/master.key"), "utf8");
  const rotate = ["keys", "rotate", "--data-dir", "turned"];
  const asked = runOnTerminal(rotate);
  await asked.shows(`replaces ${at("turned/master.key")}. Earlier backups need the current key: keep a copy of it.`);
  asked.write("n\n");
  expect([await asked.exited, readFileSync(at("turned/master.key"), "utf8")]).toEqual([1, key]);
  expect(await runOnTerminal([...rotate, "--yes"]).exited).toBe(0);
  expect(readFileSync(at("turned/master.key"), "utf8")).not.toBe(key);
  const advice = "the copy needs the master key of its time, as TOLLGATE_MASTER_KEY";
  expect((await run("restore before.db --data-dir turned")).stderr).toContain(
    `do not open with the master key (${at("turned/master.key")}): ${advice}`,
  );
  expect(await run("restore before.db --data-dir turned", { TOLLGATE_MASTER_KEY: key.trim() })).toMatchObject({
    code: 0,
  });
});

describe("what can't be undone", () => {
  const exists = async (name: string) =>
    (await run("account list --data-dir facilitator")).stdout.split("\n").some((line) => line.startsWith(`${name} `));

  test("is asked for on a terminal, and done only after a yes", async () => {
    const { client } = await makePki();
    writeFileSync(at("bob.crt"), client.cert);
    expect((await run("account add bob --cert bob.crt --data-dir facilitator")).code).toBe(0);
    const remove = ["account", "remove", "bob", "--data-dir", "facilitator"];
    // The last one is the end of the input, Ctrl-D.
    for (const answer of ["n\n", "\n", "\x04"]) {
      const asked = runOnTerminal(remove);
      await asked.shows("Go on? [y/N] ");
      asked.write(answer);
      expect([answer, await asked.exited, asked.shown()]).toEqual([
        answer,
        1,
        expect.stringContaining("nothing was changed"),
      ]);
      expect(await exists("bob")).toBe(true);
    }
    const asked = runOnTerminal(remove);
    await asked.shows("The account bob and all its certificates will be removed.");
    asked.write("y\n");
    expect(await asked.exited).toBe(0);
    expect(await exists("bob")).toBe(false);
  });

  test("needs no question with --yes", async () => {
    const told = runOnTerminal(["token", "revoke", "--all", "--yes", "--data-dir", "nowhere"]);
    expect([await told.exited, told.shown()]).toEqual([
      2,
      expect.stringContaining("--data-dir (or TOLLGATE_DATA_DIR) must be the gateway's"),
    ]);
    expect(told.shown()).not.toContain("Go on?");
  });
});

test("long work shows on a terminal that it goes on, and ends with its result in one line", async () => {
  mkdirSync(at("busy"));
  expect((await run("migrate --data-dir busy")).code).toBe(0);
  // Held by another one, so that the copy waits.
  const holder = new Database(at("busy/tollgate.db"));
  holder.run("pragma locking_mode = exclusive");
  holder.run("begin exclusive");
  const copying = runOnTerminal(["backup", "waited.db", "--verify", "--data-dir", "busy"]);
  await copying.shows(`copying the database to ${at("waited.db")}: `);
  holder.run("rollback");
  holder.close();
  expect(await copying.exited).toBe(0);
  // The progress is erased before the last line.
  expect(copying.shown()).toMatch(/\[Kwrote \S+\/waited\.db and verified it: \d+ bytes, [^\n]*\n$/);
  const migrated = runOnTerminal(["migrate", "--data-dir", "busy"]);
  expect(await migrated.exited).toBe(0);
  expect(migrated.shown()).toEndWith(`\n${at("busy/tollgate.db")} is up to date\r\n`);
});

describe("--env-file", () => {
  test("gives what neither the environment nor a flag says", async () => {
    writeFileSync(
      at("gateway.env"),
      `# The gateway.
TOLLGATE_MODE=gateway
export TOLLGATE_HOST="127.0.0.1"
TOLLGATE_PORT=1
TOLLGATE_DATA_DIR='from file'
TOLLGATE_LOG_LEVEL=debug
TOLLGATE_LOG_FORMAT=json
NODE_ENV=nonsense
`,
    );
    const log: string[] = [];
    const env = { PATH, TOLLGATE_DATA_DIR: "from environment", TOLLGATE_LOG_FORMAT: "" };
    const args = ["--env-file", "gateway.env", "--port", "0"];
    const service = await startService({ args, cwd: home, env, log });
    try {
      expect(existsSync(at("from environment/tollgate.db"))).toBe(true);
      expect(existsSync(at("from file"))).toBe(false);
      expect((await fetch(`${service.listening.url}/healthz`)).status).toBe(200);
    } finally {
      expect(await service.end("SIGTERM")).toBe(0);
    }
    // Its lines are JSON and nothing else: the first start's welcome is for people.
    const lines = log.join("").trim().split("\n");
    expect(lines.filter((line) => !line.startsWith("{"))).toEqual([]);
    expect(log.join("")).toContain('"level":"debug"');
  });

  test("takes a pipe, and no secret that the environment gives in the other way", async () => {
    writeFileSync(at("key"), `${Buffer.alloc(32, 1).toString("base64")}\n`);
    const script = `exec "$0" token --tenant a --user b --data-dir piped --env-file <(echo TOLLGATE_MASTER_KEY=wrong)`;
    const env = { PATH, TOLLGATE_MASTER_KEY_FILE: at("key") };
    const { code, stdout } = await runCommand(["-c", script, tollgateBinary()], { cwd: home, env, program: ["bash"] });
    expect({ code, stdout }).toEqual({ code: 0, stdout: expect.stringMatching(/^eyJ/) });
  });
});

test("serve starts the gateway, and a new database for a token is told with its place", async () => {
  const service = await startService({
    args: ["serve", "--port", "0", "--data-dir", "served"],
    cwd: home,
    env: { PATH },
    log: [],
  });
  expect(await service.end("SIGTERM")).toBe(0);
  const minted = await run("token --tenant acme --user me --data-dir elsewhere");
  expect(minted.stderr).toContain(`tollgate token has created a new database, ${at("elsewhere/tollgate.db")}: `);
});

test("a facilitator at a private address is named, with a word of what the gateway needs for it, unless it is denied", async () => {
  expect((await run("token --tenant acme --user me --data-dir settled")).code).toBe(0);
  const set =
    "settlement set --tenant acme --bundle client.pem --data-dir settled --facilitator https://127.0.0.1:9443";
  const [named, exempt] = [await run(set), await run(set, { TOLLGATE_ALLOW_HOSTS: "127.0.0.1" })];
  const hint = "a gateway calls it only if its TOLLGATE_ALLOW_HOSTS names it";
  expect([named.code, named.stdout]).toEqual([0, expect.stringMatching(/^acme settles at https:/)]);
  expect([named.stderr.includes(hint), exempt.stderr.includes(hint)]).toEqual([true, false]);
  expect([exempt.code, exempt.stdout]).toEqual([0, expect.stringMatching(/^acme already settles at https:/)]);
  expect(await run(set, { TOLLGATE_DENY_HOSTS: "127.0.0.0/8" })).toMatchObject({
    ...{ code: 2, stdout: "" },
    stderr: expect.stringContaining("--facilitator must not "),
  });
});
