// `tollgate doctor --mode facilitator`: all well on a real chain, and each thing that can be wrong of it provoked.
import { Database as Sqlite } from "bun:sqlite";
import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { issueCa, issueServer } from "../src/cli/pki.ts";
import { startChain, type TestChain } from "./support/chain/chain.ts";
import { type RpcRelay, startRpcRelay } from "./support/chain/rpc-relay.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { type DoctorRun, runDoctor, snapshot } from "./support/gateway/doctor.ts";
import { type Environment, runCommand, startService, temporaryRoot } from "./support/gateway/process.ts";
import { steppedClock } from "./support/gateway/stepped-clock.ts";
import { startPostgres } from "./support/stores/postgres.ts";

const DAY_MS = 86_400_000;
const KEY = generatePrivateKey();
const { address } = privateKeyToAccount(KEY);

let home: string;
let chain: TestChain;
/** Of a facilitator where all is well, and that was never started. */
let env: Environment;

const canMount = Bun.spawnSync(["unshare", "-Urm", "true"]).success;

/** The binary, after a script that mounts what only it sees. */
const inNamespace = (script: string) => ["unshare", "-Urm", "--", "sh", "-c", script, "sh", tollgateBinary()];

/** It takes connections and says nothing. */
function listenSilently() {
  const listener = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
  return { port: listener.port, [Symbol.dispose]: () => listener.stop(true) };
}

/** Files of a server certificate that was issued so long ago. */
async function tlsFiles(name: string, daysAgo: number): Promise<Environment> {
  const then = Date.now() - daysAgo * DAY_MS;
  const ca = await issueCa(then);
  const server = await issueServer(ca, ["127.0.0.1"], then);
  const path = (file: string, text: string) => {
    writeFileSync(join(home, `${name}.${file}`), text);
    return join(home, `${name}.${file}`);
  };
  return {
    TOLLGATE_TLS_CERT_FILE: path("crt", server.cert),
    TOLLGATE_TLS_KEY_FILE: path("key", server.key),
    TOLLGATE_CLIENT_CA_FILE: path("ca.crt", ca.cert),
  };
}

beforeAll(async () => {
  home = mkdtempSync(join(temporaryRoot(), "doctor-"));
  // A chain without new blocks looks like nodes that do not follow it.
  chain = await startChain({ blockTimeSeconds: 1 });
  await chain.fundEth(address, 10n ** 18n);
  // The lag of nodes is told apart from the age of the chain, so it needs a few blocks.
  await chain.mine(30);
  env = {
    TOLLGATE_DATA_DIR: join(home, "data"),
    TOLLGATE_RPC_URLS: chain.url,
    TOLLGATE_SIGNER_KEY: KEY,
    ...(await tlsFiles("new", 0)),
  };
});
afterAll(async () => {
  await chain.stop();
  rmSync(home, { recursive: true, force: true });
});

/** Most of them wait for nobody. More at once would be late on a busy machine, and what is late fails. */
const lanes: Promise<unknown>[] = Array.from({ length: 4 }, () => Promise.resolve());
let runs = 0;

function doctor(changed: Environment = {}, program?: readonly string[]): Promise<DoctorRun> {
  const surroundings = { cwd: home, env: { ...env, ...changed }, ...(program && { program }) };
  const lane = runs++ % lanes.length;
  const run = (lanes[lane] ?? Promise.resolve()).then(() => runDoctor(["--mode", "facilitator"], surroundings));
  lanes[lane] = run.catch(() => {});
  return run;
}

/** What is not ok, with the exit status. */
async function found(changed: Environment, program?: readonly string[]): Promise<[number, ...string[]]> {
  const { code, bad } = await doctor(changed, program);
  return [code, ...bad];
}

/** What is found of the chain and a relay before it that does this. */
async function second(spoil: (relay: RpcRelay) => void, expected: readonly unknown[]): Promise<void> {
  const relay = await startRpcRelay(chain.url);
  try {
    spoil(relay);
    expect(await found({ TOLLGATE_RPC_URLS: `${chain.url},${relay.url}` })).toEqual(expected as never);
  } finally {
    await relay.stop();
  }
}

const says = (start: string) => expect.stringMatching(new RegExp(`^${start}`));
const NO_CLOCK = says("warn database clock: not checked without the database");

test.concurrent("all is well before the first start, which has made nothing then, and beside a running facilitator", async () => {
  // Of its own: the other tests look at theirs at the same time, and each look has files open.
  const place = { TOLLGATE_DATA_DIR: join(home, "own") };
  const before = await doctor(place);
  expect(before).toMatchObject({ code: 0, bad: [], stderr: "" });
  expect(existsSync(place.TOLLGATE_DATA_DIR)).toBe(false);
  const running = await startService({
    args: ["--mode", "facilitator", "--port", "0"],
    cwd: home,
    env: { ...env, ...place, TOLLGATE_OPEN_PORT: "0" },
    log: [],
  });
  const two = { ...place, TOLLGATE_RPC_URLS: `${chain.url},${chain.url}/` };
  const { lines, ...beside } = await doctor(two).finally(() => running.end("SIGTERM"));
  expect(beside).toMatchObject({ code: 0, bad: [], stderr: "" });
  expect(lines.map(({ what }) => what)).toEqual([
    "configuration",
    "data directory",
    "database",
    "server certificate",
    "client CA",
    "RPC endpoint 0",
    "RPC endpoint 1",
    "agreement",
    "chain clock",
    `wallet ${address.toLowerCase()}`,
  ]);
  const kept = snapshot(place.TOLLGATE_DATA_DIR);
  expect(await found(place)).toEqual([0]);
  expect(snapshot(place.TOLLGATE_DATA_DIR)).toEqual(kept);
});

test.concurrent("Postgres: all is well before the first start, which has made no table then; a dead server fails", async () => {
  const url = await (await startPostgres()).emptyDatabase();
  expect(await found({ DATABASE_URL: url })).toEqual([0]);
  await using client = new Bun.SQL(url, { max: 1, database: new URL(url).pathname.slice(1) });
  expect(await client.unsafe("select 1 from pg_class where relnamespace = 'public'::regnamespace")).toHaveLength(0);
  expect(await found({ DATABASE_URL: "postgres://nobody:hunter2@127.0.0.1:1/none" })).toEqual([
    1,
    says(
      "fail database: the Postgres server of DATABASE_URL does not answer at 127.0.0.1:1; DATABASE_URL must be right",
    ),
    NO_CLOCK,
  ]);
});

test.concurrent("Postgres: one that takes no writes fails, and so does one that is silent, within seconds", async () => {
  const server = await startPostgres();
  const url = await server.freshDatabase();
  const database = new URL(url).pathname.slice(1);
  await using client = new Bun.SQL(url, { max: 1, database });
  await client.unsafe(`alter database ${database} set default_transaction_read_only = on`);
  using silent = listenSilently();
  const silentUrl = `postgres://a:b@127.0.0.1:${silent.port}/c`;
  const [refusing, hanging] = await Promise.all([found({ DATABASE_URL: url }), found({ DATABASE_URL: silentUrl })]);
  expect(refusing).toEqual([
    1,
    says("fail database: the Postgres database of DATABASE_URL is read-only \\(def"),
    NO_CLOCK,
  ]);
  expect(hanging).toEqual([1, says("fail database: "), NO_CLOCK]);
});

test.concurrent("SQLite: one that another process holds fails, and one that can't be written", async () => {
  const dir = join(home, "held");
  const place = { TOLLGATE_DATA_DIR: dir };
  await runCommand(["migrate", "--data-dir", dir], { cwd: home, env: { TOLLGATE_MODE: "facilitator" } });
  const path = join(dir, "tollgate.db");
  {
    using other = new Sqlite(path);
    other.run("begin immediate");
    expect(await found(place)).toEqual([1, says("fail database: another process holds its write lock; ")]);
  }
  if (!canMount) return;
  const script = `mount --bind ${path} ${path} && mount -o remount,bind,ro ${path} && exec "$@"`;
  const before = snapshot(dir);
  expect(await found(place, inNamespace(script))).toEqual([
    1,
    says("fail database: \\S+tollgate.db must be readable and writable by this user \\(EROFS\\); "),
  ]);
  expect(snapshot(dir)).toEqual(before);
});

test.concurrent("a bad configuration ends with 2, as the start does", async () => {
  const { code, stdout, stderr } = await doctor({ TOLLGATE_RPC_URLS: "nonsense", TOLLGATE_DRAIN_MS: "x" });
  expect([code, stdout]).toEqual([2, ""]);
  expect(stderr).toMatch(/^tollgate doctor failed:\n {2}- .*\n {2}- /);
  expect(await found({ TOLLGATE_DRIAN_MS: "1" })).toEqual([
    0,
    "warn configuration: TOLLGATE_DRIAN_MS is set but nothing reads it; did you mean TOLLGATE_DRAIN_MS?; unset or correct it",
  ]);
});

test.concurrent("certificates: one that ends soon warns, one that has ended fails", async () => {
  const [soon, ended] = await Promise.all([tlsFiles("soon", 390), tlsFiles("ended", 400)]);
  expect(await found(soon)).toEqual([0, says("warn server certificate: a certificate expires in 6 days, at ")]);
  expect(await found(ended)).toEqual([1, says("fail server certificate: a certificate expired at ")]);
});

test.concurrent("nodes: a dead one warns beside a good one and fails alone, and its URL is not shown", async () => {
  const dead = "http://127.0.0.1:1/v2/api-key-of-mine";
  const both = await doctor({ TOLLGATE_RPC_URLS: `${chain.url},${dead}` });
  expect([both.code, ...both.bad]).toEqual([
    0,
    says("warn RPC endpoint 1: it gives no usable answer: unreached, ECONNREFUSED; "),
  ]);
  const alone = await doctor({ TOLLGATE_RPC_URLS: dead });
  expect([alone.code, ...alone.bad]).toEqual([
    1,
    says("fail RPC endpoint 0: it gives no usable answer"),
    says("warn chain clock: not checked without a node"),
    says("warn wallets: not checked without a node"),
  ]);
  expect(both.stdout + both.stderr + alone.stdout + alone.stderr).not.toContain("api-key-of-mine");
});

test.concurrent("nodes: another chain, another token, a lag, a silence and a fork are told by the endpoint's place", async () => {
  const reverted = { kind: "error", message: "execution reverted" } as const;
  const other = (block: unknown, [number]: readonly unknown[]) =>
    String(number).startsWith("0x") ? { ...(block as object), hash: `0x${"ab".repeat(32)}` } : block;
  await Promise.all([
    second(
      (relay) => relay.on("eth_chainId", { kind: "result", result: "0x1" }),
      [1, says("fail RPC endpoint 1: it is on chain 1, not 8453; ")],
    ),
    ...[reverted, { kind: "result", result: "0x" } as const].map((answer) =>
      second(
        (relay) => relay.on("eth_call", answer),
        [
          1,
          says(
            "fail RPC endpoint 1: it does not have USD Coin, version 2, at 0x833589fcd6edb6e08f4c7c32d4f71b54bda02913; ",
          ),
        ],
      ),
    ),
    second(
      (relay) => relay.behind(12),
      [0, says("warn RPC endpoint 1: its newest block is 1\\d blocks behind the best")],
    ),
    second(
      (relay) => relay.on("eth_chainId", { kind: "hang" }),
      [0, says("warn RPC endpoint 1: it gives no usable answer: no answer within 3000")],
    ),
    second(
      (relay) => relay.on("eth_getBlockByNumber", { kind: "rewrite", rewrite: other }),
      [1, says("fail agreement: the endpoints have different blocks at height \\d+: 0 against 1; ")],
    ),
  ]);
});

test.concurrent("wallets: a low one warns beside a full one and fails alone", async () => {
  const poor = generatePrivateKey();
  const low = "it has 0 ETH, less than TOLLGATE_GAS_LOW_WATER_WEI \\(0.001 ETH\\); send it ETH";
  const name = `wallet ${privateKeyToAccount(poor).address.toLowerCase()}`;
  expect(await found({ TOLLGATE_SIGNER_KEY: `${KEY},${poor}` })).toEqual([0, says(`warn ${name}: ${low}`)]);
  expect(await found({ TOLLGATE_SIGNER_KEY: poor })).toEqual([1, says(`fail ${name}: ${low}`)]);
});

test.concurrent("this machine's clock is held against the database's and the chain's", async () => {
  const url = await (await startPostgres()).freshDatabase();
  const { program } = steppedClock(-45_000);
  expect(await found({ DATABASE_URL: url }, program)).toEqual([
    0,
    says("warn database clock: the database's clock is 4\\d s ahead of this machine's clock; set both by NTP"),
    says("warn chain clock: the chain's time is 4\\d s ahead of this machine's clock; "),
  ]);
});

/** Runs the binary with its data directory on a small disk of its own, of which this is left. */
function onSmallDisk(size: string, left: "some" | "none", mode: "rw" | "ro" = "rw"): readonly string[] {
  const dir = join(home, "disk");
  mkdirSync(dir, { recursive: true });
  const fill = left === "none" ? `(head -c 10m /dev/zero >${dir}/full 2>/dev/null || true)` : "true";
  const script = `mount -t tmpfs -o mode=700,size=${size} disk ${dir} && ${fill} && mount -o remount,${mode} ${dir} && exec "$@"`;
  return inNamespace(script);
}

test.skipIf(!canMount)(
  "a disk that is nearly full warns, a full one fails, a read-only one is a bad configuration",
  async () => {
    const place = { TOLLGATE_DATA_DIR: join(home, "disk") };
    expect(await found(place, onSmallDisk("8m", "some"))).toEqual([
      0,
      says("warn data directory: \\S+ has 8 MiB free; free some space"),
    ]);
    expect(await found(place, onSmallDisk("1m", "none"))).toEqual([
      1,
      says("fail data directory: \\S+ has 0 MiB free; free some space"),
    ]);
    const { code, stderr } = await doctor(place, onSmallDisk("1m", "some", "ro"));
    expect([code, stderr]).toEqual([
      2,
      expect.stringContaining("TOLLGATE_DATA_DIR must be a directory that tollgate can"),
    ]);
  },
);
