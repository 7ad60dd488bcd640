// The facilitator as its users meet it: the compiled binary in a process of its own, certificates and accounts made
// by its own commands, and requests over mutual TLS. It keeps its ports over restarts, as a deployed one would.
import { Database } from "bun:sqlite";
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { connect } from "node:tls";
import type { Address, Hex } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { runPki } from "../../../src/cli/pki.ts";
import { type Environment, type Finished, runCommand, startService, temporaryRoot } from "../gateway/process.ts";
import type { TestChain } from "./chain.ts";

const ETHER = 10n ** 18n;

/** A client certificate of the facilitator's CA. */
export interface Client {
  readonly name: string;
  /** PEM. */
  readonly cert: string;
  readonly key: string;
  readonly ca: string;
  /** PEM: what a tenant stores as the credential of its facilitator. */
  readonly bundle: string;
}

export interface SettleAnswer {
  readonly status: number;
  readonly retryAfter: string | null;
  readonly text: string;
  // biome-ignore lint/suspicious/noExplicitAny: tests look into bodies of many shapes.
  readonly body: any;
}

export interface AccountOptions {
  readonly maxPerTransaction?: bigint;
  readonly dailyCeiling?: bigint;
}

/** A row of its database, by column name. */
export type Row = Readonly<Record<string, string | number | null>>;

/** A line of its log. */
export type LogLine = Readonly<Record<string, unknown>>;

/** A connection of its own, which stays open between requests. */
export interface Connection {
  settle(request: unknown): Promise<SettleAnswer>;
  close(): void;
}

export interface Facilitator extends AsyncDisposable {
  /** Without a slash at its end. */
  readonly url: string;
  readonly openUrl: string;
  readonly dataDir: string;
  readonly pid: number;
  readonly pki: string;
  /** What its process is given. */
  readonly environment: Environment;
  /** The gas wallets. */
  readonly signers: readonly Address[];
  /** The account that is there from the start. */
  readonly client: Client;
  /** Issues a client certificate and adds an account for it, while the facilitator runs. */
  addAccount(name: string, options?: AccountOptions): Promise<Client>;
  /** @param request the body, sent as it is when it is a text */
  settle(request: unknown, client?: Client): Promise<SettleAnswer>;
  connect(client?: Client): Promise<Connection>;
  /** Runs another command of the binary beside it, with the same environment. */
  run(...args: readonly string[]): Promise<Finished>;
  /** Everything that its processes have logged so far. */
  log(): string;
  lines(event?: string): LogLine[];
  /** What is kept of the payment with this nonce; null when there is nothing. */
  payment(nonce: Hex): Row | null;
  /** The exact reason for which the payment with this nonce was refused before any transaction. */
  refusal(nonce: Hex): string | null;
  /** All transactions that it has signed, by wallet, nonce and replacement. */
  transactions(): Row[];
  /** What of the account's ceiling is taken, all days together. */
  reserved(account: string): bigint;
  /** Ends it by SIGTERM. Throws when it does not end well. */
  stop(): Promise<void>;
  kill9(): Promise<void>;
  /** Starts it again where the last process ended, with `env` instead of what it was given for those variables. */
  restart(env?: Environment): Promise<void>;
}

export interface FacilitatorOptions {
  /** The chain itself by default; a relay before it for faults and counts. */
  readonly rpcUrls?: readonly string[];
  /** How many keys with gas it signs with. */
  readonly signers?: number;
  readonly env?: Environment;
  /** Runs in the place of the compiled binary. */
  readonly program?: readonly string[];
  /** One that shares its Postgres with this one, and all else that replicas share: keys, certificates and accounts. */
  readonly beside?: Facilitator;
}

/** With one account, `gateway`. */
export async function startFacilitator(
  chain: Pick<TestChain, "url" | "fundEth">,
  { rpcUrls = [chain.url], signers = 1, env = {}, program, beside }: FacilitatorOptions = {},
): Promise<Facilitator> {
  const home = mkdtempSync(join(temporaryRoot(), "facilitator-"));
  const [cwd, dataDir, pki] = [join(home, "elsewhere"), join(home, "data"), beside?.pki ?? join(home, "pki")];
  mkdirSync(cwd);
  const keys = beside === undefined ? Array.from({ length: signers }, generatePrivateKey) : [];
  const addresses = beside?.signers ?? keys.map((key) => privateKeyToAccount(key).address);
  if (beside === undefined) await Promise.all(addresses.map((address) => chain.fundEth(address, 10n * ETHER)));
  let environment: Environment = {
    PATH: "/usr/bin:/bin",
    TOLLGATE_LOG_FORMAT: "json",
    TOLLGATE_TLS_CERT_FILE: join(pki, "server.crt"),
    TOLLGATE_TLS_KEY_FILE: join(pki, "server.key"),
    TOLLGATE_CLIENT_CA_FILE: join(pki, "ca.crt"),
    TOLLGATE_SIGNER_KEY: keys.join(","),
    ...beside?.environment,
    TOLLGATE_DATA_DIR: dataDir,
    TOLLGATE_RPC_URLS: rpcUrls.join(","),
    ...env,
  };
  const surroundings = { cwd, ...(program && { program }) };
  const run = (...args: readonly string[]) => runCommand(args, { ...surroundings, env: environment });
  // The certificates are made as by `tollgate pki`, in this process: a process for each takes several times as long.
  const addAccount = async (name: string, options: AccountOptions = {}): Promise<Client> => {
    await runPki({ dir: pki, wanted: { kind: "client", name } });
    const limits = [
      ["--max-per-transaction", options.maxPerTransaction] as const,
      ["--daily-ceiling", options.dailyCeiling] as const,
    ].flatMap(([flag, limit]) => (limit === undefined ? [] : [flag, `${limit}`]));
    const { code, stderr } = await run("account", "add", name, "--cert", join(pki, `${name}.crt`), ...limits);
    if (code !== 0) throw new Error(`tollgate account add ${name} ended with ${code}: ${stderr}`);
    const read = (file: string) => readFileSync(join(pki, file), "utf8");
    const [cert, key, bundle] = [read(`${name}.crt`), read(`${name}.key`), read(`${name}.pem`)];
    return { name, cert, key, bundle, ca: read("ca.crt") };
  };
  const log: string[] = [];
  const start = async (port: string, openPort: string) => {
    const env = { ...environment, TOLLGATE_OPEN_PORT: openPort };
    const args = ["--mode", "facilitator", "--port", port];
    const { listening, pid, end } = await startService({ args, ...surroundings, env, log });
    return { url: listening.url, openUrl: listening.open_url ?? "", pid, end };
  };
  const found = async () => {
    await runPki({ dir: pki, wanted: { kind: "ca" } });
    await runPki({ dir: pki, wanted: { kind: "server", hosts: ["127.0.0.1"] } });
    return addAccount("gateway");
  };
  const client = beside?.client ?? (await found());
  let current = await start("0", "0");

  return {
    get url() {
      return current.url;
    },
    get openUrl() {
      return current.openUrl;
    },
    get pid() {
      return current.pid;
    },
    get environment() {
      return environment;
    },
    dataDir,
    pki,
    signers: addresses,
    client,
    addAccount,
    settle: (request, from = client) => settleByFetch(current.url, request, from),
    connect: (from = client) => openConnection(current.url, from),
    run,
    log: () => log.join(""),
    lines: (event) => linesOf(log.join(""), event),
    ...recordsIn(join(dataDir, "tollgate.db")),
    async stop() {
      const code = await current.end("SIGTERM");
      if (code !== 0) throw new Error(`the facilitator ended with ${code}:\n${log.join("")}`);
    },
    kill9: async () => void (await current.end("SIGKILL")),
    async restart(changed = {}) {
      environment = { ...environment, ...changed };
      const [port, openPort] = [new URL(current.url).port, new URL(current.openUrl).port];
      current = await oncePortsAreFree(() => start(port, openPort));
    },
    async [Symbol.asyncDispose]() {
      await current.end("SIGKILL");
      rmSync(home, { recursive: true, force: true });
    },
  };
}

const PORTS_FREE_MS_MAX = 20_000;

/** While a process is gone, a connection that somebody opens may have one of its ports for its own end. */
async function oncePortsAreFree<T>(begin: () => Promise<T>): Promise<T> {
  const until = performance.now() + PORTS_FREE_MS_MAX;
  for (;;) {
    try {
      return await begin();
    } catch (error) {
      if (!String(error).includes("must be free to listen on") || performance.now() > until) throw error;
    }
  }
}

function linesOf(log: string, event: string | undefined): LogLine[] {
  const lines = log.split("\n").filter((line) => line.startsWith("{"));
  return lines
    .map((line): LogLine => JSON.parse(line))
    .filter((line) => event === undefined || line["event"] === event);
}

/** What an operator would see in the database, through a connection that can only read. */
function recordsIn(path: string) {
  const all = (sql: string, ...parameters: string[]): Row[] => {
    using database = new Database(path, { readonly: true });
    return database.query<Row, string[]>(sql).all(...parameters);
  };
  return {
    payment: (nonce: Hex) => all("select * from facilitator_payments where nonce = ?", nonce)[0] ?? null,
    refusal(nonce: Hex) {
      const [row] = all("select reason from facilitator_refusals where nonce = ?", nonce);
      return row === undefined ? null : String(row["reason"]);
    },
    transactions: () => all("select * from facilitator_transactions order by wallet, wallet_nonce, replacement"),
    reserved: (account: string) =>
      all("select reserved from facilitator_days where account = ?", account).reduce(
        (sum, { reserved = 0 }) => sum + BigInt(reserved ?? 0),
        0n,
      ),
  };
}

function bodyOf(request: unknown): string {
  return typeof request === "string" ? request : JSON.stringify(request);
}

function answerOf(status: number, retryAfter: string | null, text: string): SettleAnswer {
  return { status, retryAfter, text, body: text === "" ? undefined : JSON.parse(text) };
}

async function settleByFetch(url: string, request: unknown, client: Client): Promise<SettleAnswer> {
  const response = await fetch(`${url}/settle`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: bodyOf(request),
    tls: { cert: client.cert, key: client.key, ca: client.ca },
  });
  return answerOf(response.status, response.headers.get("retry-after"), await response.text());
}

/** By hand, since only so a test knows which connection it uses, and Bun's fetch has no more than 256 at work. */
async function openConnection(url: string, client: Client): Promise<Connection> {
  const { hostname: host, port } = new URL(url);
  const socket = connect({ host, port: Number(port), cert: client.cert, key: client.key, ca: client.ca });
  let received = "";
  let look = () => {};
  let ended: Error | null = null;
  socket.setEncoding("latin1");
  socket.on("data", (text: string) => {
    received += text;
    look();
  });
  socket.on("error", (error) => {
    ended = error;
  });
  socket.on("close", () => {
    ended ??= new Error("the connection was closed");
    look();
  });
  await new Promise<void>((resolve, reject) => {
    socket.once("secureConnect", resolve);
    socket.once("error", reject);
  });

  const answer = () =>
    new Promise<SettleAnswer>((resolve, reject) => {
      look = () => {
        const end = received.indexOf("\r\n\r\n");
        const [head, rest] = [received.slice(0, end), received.slice(end + 4)];
        const length = Number(/\r\ncontent-length: (\d+)/i.exec(head)?.[1] ?? 0);
        if (end > 0 && rest.length >= length) {
          received = rest.slice(length);
          const status = Number(/^HTTP\/1\.1 (\d+)/.exec(head)?.[1]);
          const retryAfter = /\r\nretry-after: (.*)/i.exec(head)?.[1] ?? null;
          resolve(answerOf(status, retryAfter, rest.slice(0, length)));
        } else if (ended !== null) reject(ended);
      };
      look();
    });
  return {
    settle(request) {
      const body = bodyOf(request);
      socket.write(
        `POST /settle HTTP/1.1\r\nhost: ${host}\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`,
      );
      return answer();
    },
    close: () => void socket.destroy(),
  };
}
