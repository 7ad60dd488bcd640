// The life of the binary's process: it starts anywhere with nothing beside it, ends well when it is told to, and
// comes back with what it held, killed or not.
import { expect, test } from "bun:test";
import { readdirSync, readFileSync, readlinkSync, statSync, unlinkSync } from "node:fs";
import { join } from "node:path";
import { eachDatabase, executeIn, type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { runCommand, temporaryRoot } from "./support/gateway/process.ts";
import { startUpstream } from "./support/http/upstream.ts";
import { newMasterKey } from "./support/keys.ts";
import { startPostgres } from "./support/stores/postgres.ts";
import { until } from "./support/until.ts";

const ALICE = { tenant: "acme", user: "alice" };

async function agents(gateway: Gateway, init: RequestInit = {}): Promise<{ status: number; body: unknown }> {
  const headers = {
    authorization: `Bearer ${await gateway.token(ALICE)}`,
    "content-type": "application/json",
  };
  const response = await fetch(`${gateway.url}/v1/agents`, { ...init, headers });
  return { status: response.status, body: await response.json() };
}

async function freshPostgres() {
  const server = await startPostgres();
  return { DATABASE_URL: await server.emptyDatabase(), TOLLGATE_MASTER_KEY: newMasterKey() };
}

const isRefused = (error: unknown) => error instanceof Error && "code" in error && error.code === "ECONNREFUSED";

const modeOf = (path: string) => statSync(path).mode & 0o777;

eachDatabase((database) => {
  test("a call that was acknowledged is there after a proper end and after kill -9", async () => {
    await using gateway = await startGateway({ database });
    const names = ["first", "second"];
    expect((await agents(gateway, { method: "POST", body: `{"name":"first"}` })).status).toBe(201);
    await gateway.stop();
    await gateway.restart();
    expect((await agents(gateway, { method: "POST", body: `{"name":"second"}` })).status).toBe(201);
    await gateway.kill9();
    await gateway.restart();
    const { body } = await agents(gateway);
    const { data, total } = body as { data: { name: string }[]; total: number };
    expect([data.map((agent) => agent.name).sort(), total]).toEqual([names, 2]);
    await gateway.stop();
  });
});

/** As the interface promises for calls of a process that was killed, when the next one on its data directory is ready. */
const TAKEN_UP_MS_MAX = 2_000;

/** A gateway on Postgres with an agent of two slots, both taken by calls that never end, and a call that waits for one. */
async function withAllSlotsTaken(use: (parts: SlotsTaken) => Promise<void>): Promise<void> {
  let answer = () => new Promise<Response>(() => {});
  const stuck = startUpstream(() => answer());
  try {
    const database = { name: "postgres", fresh: freshPostgres } as const;
    await using gateway = await startGateway({ database, env: { TOLLGATE_AGENT_CONCURRENCY: "2" } });
    const { body } = await agents(gateway, {
      method: "POST",
      body: JSON.stringify({ name: "a", upstream_url: stuck.url }),
    });
    const { id } = body as { id: string };
    const headers = { authorization: `Bearer ${await gateway.token(ALICE)}` };
    const call = async () =>
      (await fetch(`${gateway.url}/v1/proxy/${id}`, { method: "POST", headers })).headers.get("location");
    const [first, second, pending] = [await call(), await call(), await call()];
    const view = async (path: string | null) =>
      (await (await fetch(`${gateway.url}${path}`, { headers })).json()) as { status: string };
    await until(async () => (await view(second)).status === "running");
    await use({
      gateway,
      async kill() {
        await gateway.kill9();
        answer = async () => new Response("made");
      },
      async takenUp() {
        const failed = { status: "failed", error_class: "internal" };
        const wanted = [failed, failed, { status: "succeeded" }];
        const views = () => Promise.all([first, second, pending].map(view));
        await until(async () => Bun.deepMatch(wanted, await views()), TAKEN_UP_MS_MAX);
      },
    });
  } finally {
    await stuck.stop();
  }
}

interface SlotsTaken {
  readonly gateway: Gateway;
  /** Kills the gateway. From then on the upstream answers. */
  kill(): Promise<void>;
  /** The calls that were running have ended as internal, and the one that waited has been made. Throws when that takes too long. */
  takenUp(): Promise<void>;
}

test("a gateway on Postgres that is killed and started again takes up its own calls at once, as its directory's lock proves it gone", () =>
  withAllSlotsTaken(async ({ gateway, kill, takenUp }) => {
    await kill();
    await gateway.restart();
    await takenUp();
  }));

test("a start that failed in between changes nothing about that", () =>
  withAllSlotsTaken(async ({ gateway, kill, takenUp }) => {
    await kill();
    const foreign = startUpstream(() => Response.json({ jsonrpc: "2.0", id: 1, result: "0x1" }));
    await expect(gateway.restart({ TOLLGATE_RPC_URLS: foreign.url })).rejects.toThrow("is not of chain");
    await foreign.stop();
    await gateway.restart({ TOLLGATE_RPC_URLS: "" });
    await takenUp();
  }));

test("the gateway leaves nothing in the working directory, and what it keeps is for its owner only", async () => {
  await using gateway = await startGateway();
  expect(readdirSync(readlinkSync(`/proc/${gateway.pid}/cwd`))).toEqual([]);
  expect(modeOf(gateway.dataDir)).toBe(0o700);
  const files = readdirSync(gateway.dataDir);
  expect(files).toContain("tollgate.db");
  expect(files).toContain("master.key");
  for (const file of files) expect([file, modeOf(join(gateway.dataDir, file))]).toEqual([file, 0o600]);
});

test.concurrent("the first start writes nothing but lines of JSON to a log that is no terminal", async () => {
  await using gateway = await startGateway();
  await gateway.stop();
  const lines = gateway.log().trimEnd().split("\n");
  expect(lines.map((line) => JSON.parse(line))).toContainEqual(expect.objectContaining({ event: "listening" }));
});

test.concurrent("the log of SQLite is moved into the database file by a thread that the binary has with it", async () => {
  await using gateway = await startGateway();
  const bytes = () => statSync(join(gateway.dataDir, "tollgate.db")).size;
  const before = bytes();
  const description = "x".repeat(1_000);
  for (let n = 0; bytes() === before; n++) {
    const { status } = await agents(gateway, {
      method: "POST",
      body: JSON.stringify({ name: `agent ${n}`, description }),
    });
    expect(status).toBe(201);
  }
  await gateway.stop();
  expect(gateway.log()).not.toContain("checkpoint_failed");
});

test.concurrent("a process whose main loop stands still says so in one line and ends by a signal, so that it is started again", async () => {
  await using gateway = await startGateway();
  // A pipe in the place of the key's file: to read it, which the gateway does for a key that it does not know, takes for ever.
  const file = join(gateway.dataDir, "master.key");
  unlinkSync(file);
  expect(Bun.spawnSync(["mkfifo", file]).success).toBe(true);
  await executeIn(gateway, {}, "update keyring set next_master_key_id = 'unknown'");
  await until(() => fetch(`${gateway.url}/healthz`, { signal: AbortSignal.timeout(500) }).then(() => false, isRefused));
  const lines = gateway
    .log()
    .split("\n")
    .filter((line) => line.includes('"main_loop_stuck"'));
  expect(lines.map((line) => JSON.parse(line))).toMatchObject([{ level: "error", event: "main_loop_stuck" }]);
});

test.concurrent("a port that another gateway listens on is refused", async () => {
  await using gateway = await startGateway();
  const { port } = new URL(gateway.url);
  await using elsewhere = await startGateway();
  await elsewhere.stop();
  const second = await elsewhere.run("--mode", "gateway", "--port", port);
  expect(second.stderr).toContain(`must be free to listen on: 127.0.0.1:${port}`);
  expect(second.code).toBe(2);
});

test.concurrent("a start without the database ends in a way that is started again, and one with a wrong configuration does not", async () => {
  const there = await (await startPostgres()).freshDatabase();
  const { port, pathname } = new URL(there);
  await using client = new Bun.SQL(there, { max: 1 });
  await client.unsafe(`alter database "${pathname.slice(1)}" set default_transaction_read_only = on`);
  const env = (DATABASE_URL: string) => ({ DATABASE_URL, TOLLGATE_MASTER_KEY: `${"A".repeat(43)}=` });
  const start = (url: string) => runCommand(["--mode", "gateway"], { cwd: temporaryRoot(), env: env(url) });
  expect(await start("postgres://tollgate@127.0.0.1:1/x")).toMatchObject({
    code: 1,
    stderr: expect.stringContaining("the Postgres server of DATABASE_URL does not answer"),
  });
  expect(await start(there)).toMatchObject({ code: 1, stderr: expect.stringContaining("is read-only") });
  expect(await start(`postgres://nobody@127.0.0.1:${port}/x`)).toMatchObject({
    code: 2,
    stderr: expect.stringContaining("the Postgres server of DATABASE_URL refuses: "),
  });
  for (const service of ["gateway", "facilitator"]) {
    const unit = readFileSync(join(import.meta.dir, `../src/packaging/systemd/tollgate-${service}.service`), "utf8");
    expect(unit).toMatch(/^Restart=on-failure$[\s\S]*^RestartPreventExitStatus=2$/m);
  }
});

test.concurrent("the gateway names its version and the commit it was built from", async () => {
  await using gateway = await startGateway();
  const built = (await (await fetch(`${gateway.url}/version`)).json()) as {
    version: string;
    commit: string | null;
  };
  const { stdout } = await gateway.run("--version");
  expect(stdout).toBe(`tollgate ${built.version}\n`);
  // Null where the build saw no repository.
  expect(built.commit ?? "0".repeat(12)).toMatch(/^[0-9a-f]{12}$/);
});

test.concurrent("no token, secret or key reaches the log", async () => {
  await using gateway = await startGateway({ env: { TOLLGATE_LOG_LEVEL: "debug" } });
  const token = await gateway.token(ALICE);
  await agents(gateway);
  await gateway.stop();
  expect(gateway.log()).toContain('"event":"request"');
  expect(gateway.log()).not.toContain(token);
  expect(gateway.log()).not.toContain(token.split(".")[2] ?? token);
  expect(gateway.log()).not.toContain(readFileSync(join(gateway.dataDir, "master.key"), "utf8").trim());
});
