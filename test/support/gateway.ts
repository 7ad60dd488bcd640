// The gateway as its users meet it: the compiled binary in a process of its own, with an empty data directory,
// a free port and an unrelated working directory. Whatever happens to the test process, its gateways and their
// directories go with it.
import { describe } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { tollgateBinary } from "./binary.ts";
import { startPostgres } from "./postgres.ts";

const START_MS_MAX = 15_000;
const STOP_MS_MAX = 40_000;

type Environment = Readonly<Record<string, string>>;

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
    const masterKey = Buffer.from(crypto.getRandomValues(new Uint8Array(32))).toString("base64");
    return { DATABASE_URL: await server.freshDatabase(), TOLLGATE_MASTER_KEY: masterKey };
  },
};

/** The same suite on SQLite and on Postgres. */
export function eachDatabase(suite: (database: Database) => void): void {
  for (const database of [sqlite, postgres]) describe(database.name, () => suite(database));
}

interface Caller {
  readonly tenant: string;
  readonly user: string;
  readonly scope?: string;
}

interface Finished {
  readonly code: number;
  readonly stdout: string;
  readonly stderr: string;
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
}

export async function startGateway({ database = sqlite, env = {} }: GatewayOptions = {}): Promise<Gateway> {
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
  const start = () => startProcess({ cwd, env: environment, log });
  let current = await start();

  const run = async (...args: readonly string[]): Promise<Finished> => {
    const child = spawn(args, { cwd, env: environment });
    const [stdout, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
    return { code: await child.exited, stdout, stderr };
  };
  const mint = async ({ tenant, user, scope }: Caller) => {
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

interface Surroundings {
  readonly cwd: string;
  readonly env: Environment;
}

/** The kernel ends the process when the thread that started it ends, which is the end of the test process. */
function spawn(args: readonly string[], { cwd, env }: Surroundings) {
  const command = ["setpriv", "--pdeathsig", "KILL", "--", tollgateBinary(), ...args];
  return Bun.spawn(command, { cwd, env, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
}

async function startProcess({ cwd, env, log }: Surroundings & { log: string[] }) {
  const child = spawn(["--mode", "gateway", "--port", "0"], { cwd, env });
  const listening = Promise.withResolvers<number>();
  const logged = readLog(child.stderr, log, listening.resolve);
  const printed = readLog(child.stdout, log, listening.resolve);
  const failed = (why: string) => listening.reject(new Error(`the gateway ${why}:\n${log.join("")}`));
  const timer = setTimeout(() => failed("took too long to start"), START_MS_MAX);
  Promise.all([child.exited, logged, printed]).then(
    ([code]) => failed(`ended with ${code} before it listened`),
    listening.reject,
  );
  const end = async (signal: "SIGTERM" | "SIGKILL") => {
    child.kill(signal);
    const overdue = setTimeout(() => child.kill("SIGKILL"), STOP_MS_MAX);
    const [code] = await Promise.all([child.exited, logged, printed]);
    clearTimeout(overdue);
    return code;
  };
  try {
    const url = `http://127.0.0.1:${await listening.promise}`;
    await becomeReady(url);
    return { url, pid: child.pid, end };
  } catch (error) {
    await end("SIGKILL");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** Keeps all that comes and finds the line that says which port was taken. */
async function readLog(stream: ReadableStream<Uint8Array>, log: string[], found: (port: number) => void) {
  const decoder = new TextDecoder();
  let line = "";
  for await (const chunk of stream) {
    const text = decoder.decode(chunk, { stream: true });
    log.push(text);
    const lines = (line + text).split("\n");
    line = lines.pop() ?? "";
    for (const whole of lines) {
      const port = /"event":"listening".*(?:"port":|"url":"http:[^"]*:)(\d+)/.exec(whole)?.[1];
      if (port !== undefined) found(Number(port));
    }
  }
}

async function becomeReady(url: string): Promise<void> {
  const deadline = AbortSignal.timeout(START_MS_MAX);
  while (!(await fetch(`${url}/readyz`, { signal: deadline })).ok) await Bun.sleep(20);
}

/** In the background of a shell that ends at once, since the test runner kills its own children at a timeout. */
const SWEEPER = `
{
  trap '' INT TERM HUP
  while kill -0 "$2"; do sleep 1; done
  rm -rf "$1"
} &
`;

let root: string | undefined;

/** A directory that a process of its own removes when this one is gone, killed or not. */
function temporaryRoot(): string {
  if (root !== undefined) return root;
  root = mkdtempSync(join(tmpdir(), "tollgate-test-"));
  const stdio = { stdin: "ignore", stdout: "ignore", stderr: "ignore" } as const;
  Bun.spawnSync(["sh", "-c", SWEEPER, "sweeper", root, String(process.pid)], stdio);
  return root;
}
