// The gateway as its users meet it: the compiled binary in a process of its own, with an empty data directory,
// a free port and an unrelated working directory.

import { Database as Sqlite } from "bun:sqlite";
import { describe } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { mintToken } from "../../../src/cli/token.ts";
import { silentLog } from "../../../src/core/log.ts";
import { newMasterKey } from "../keys.ts";
import { startPostgres } from "../stores/postgres.ts";
import { until } from "../until.ts";
import {
  configOf,
  type Environment,
  type Finished,
  runCommand,
  START_MS_MAX,
  startService,
  temporaryRoot,
} from "./process.ts";

export interface Database {
  readonly name: "sqlite" | "postgres";
  /** The variables that make a gateway use an empty database of this kind. */
  fresh(): Promise<Environment>;
}

const sqlite: Database = { name: "sqlite", fresh: async () => ({}) };

const postgres: Database = {
  name: "postgres",
  async fresh() {
    const server = await startPostgres();
    const masterKey = newMasterKey();
    return { DATABASE_URL: await server.freshDatabase(), TOLLGATE_MASTER_KEY: masterKey };
  },
};

/** Runs a statement past a gateway, in the database of its environment. */
export async function executeIn(gateway: Pick<Gateway, "dataDir">, env: Environment, statement: string): Promise<void> {
  const url = env["DATABASE_URL"];
  if (url === undefined) {
    using file = new Sqlite(join(gateway.dataDir, "tollgate.db"));
    // The gateway may be writing.
    file.run("pragma busy_timeout = 10000");
    file.run(statement);
    return;
  }
  await using client = new Bun.SQL(url, { max: 1, database: new URL(url).pathname.slice(1) });
  await client.unsafe(statement);
}

/** The same suite on SQLite and on Postgres. */
export function eachDatabase(suite: (database: Database) => void): void {
  for (const database of [sqlite, postgres]) describe(database.name, () => suite(database));
}

const TOKEN_SECONDS = 12 * 3600;

interface Caller {
  readonly tenant: string;
  readonly user: string;
  readonly scope?: string;
}

export interface Gateway extends AsyncDisposable {
  /** Without a slash at its end. Another one after a restart. */
  readonly url: string;
  readonly pid: number;
  readonly dataDir: string;
  /** Everything that its processes have logged so far. */
  log(): string;
  /** A token of the local issuer, the same one for the same caller. */
  token(caller: Caller): Promise<string>;
  /** Runs another command of the binary beside it, with the same environment. */
  run(...args: readonly string[]): Promise<Finished>;
  /** Ends it by SIGTERM. Throws when it does not end well. */
  stop(): Promise<void>;
  kill9(): Promise<void>;
  /** Starts it again where the last process ended, with `env` instead of what it was given for those variables. */
  restart(env?: Environment): Promise<void>;
}

export interface GatewayOptions {
  readonly database?: Database;
  readonly env?: Environment;
  /** A free one when it is left out. */
  readonly port?: number;
  /** Runs in the place of the compiled binary. */
  readonly program?: readonly string[];
}

export async function startGateway({
  database = sqlite,
  env = {},
  port = 0,
  ...program
}: GatewayOptions = {}): Promise<Gateway> {
  const home = mkdtempSync(join(temporaryRoot(), "gateway-"));
  const [cwd, dataDir] = [join(home, "elsewhere"), join(home, "data")];
  mkdirSync(cwd);
  let environment: Environment = {
    PATH: "/usr/bin:/bin",
    TOLLGATE_DATA_DIR: dataDir,
    TOLLGATE_ALLOW_HOSTS: "127.0.0.1",
    TOLLGATE_LOG_FORMAT: "json",
    ...(await database.fresh()),
    ...env,
  };
  const tokens = new Map<string, Promise<string>>();
  const log: string[] = [];
  const start = async () => {
    const args = ["--mode", "gateway", "--port", `${port}`];
    const { listening, pid, end } = await startService({ args, cwd, env: environment, log, ...program });
    const url = `http://127.0.0.1:${new URL(listening.url).port}`;
    try {
      await becomeReady(url);
    } catch (error) {
      await end("SIGKILL");
      throw error;
    }
    return { url, pid, end };
  };
  let current = await start();

  const run = (...args: readonly string[]) => runCommand(args, { cwd, env: environment, ...program });
  const mint = async ({ tenant, user, scope }: Caller): Promise<string> => {
    // What `tollgate token` does, in this process: a process for each token takes four times as long. Not on SQLite, where Bun
    // would keep the file open for a while.
    if (program.program === undefined && environment["DATABASE_URL"] !== undefined) {
      const request = { tenant, user, scope: scope ?? null, ttlSeconds: TOKEN_SECONDS };
      return mintToken(configOf("token", environment), request, silentLog);
    }
    const scopes = scope === undefined ? [] : ["--scope", scope];
    const { code, stdout, stderr } = await run("token", "--tenant", tenant, "--user", user, ...scopes);
    if (code !== 0) throw new Error(`tollgate token ended with ${code}: ${stderr}`);
    return stdout.trim();
  };
  return {
    get url() {
      return current.url;
    },
    get pid() {
      return current.pid;
    },
    dataDir,
    log: () => log.join(""),
    run,
    token(caller) {
      const key = JSON.stringify([caller.tenant, caller.user, caller.scope]);
      const token = tokens.get(key) ?? mint(caller);
      tokens.set(key, token);
      return token;
    },
    async stop() {
      const code = await current.end("SIGTERM");
      if (code !== 0) throw new Error(`the gateway ended with ${code}:\n${log.join("")}`);
    },
    kill9: async () => void (await current.end("SIGKILL")),
    async restart(changed = {}) {
      environment = { ...environment, ...changed };
      current = await start();
    },
    async [Symbol.asyncDispose]() {
      await current.end("SIGKILL");
      rmSync(home, { recursive: true, force: true });
    },
  };
}

async function becomeReady(url: string): Promise<void> {
  const deadline = AbortSignal.timeout(START_MS_MAX);
  await until(async () => (await fetch(`${url}/readyz`, { signal: deadline })).ok);
}
