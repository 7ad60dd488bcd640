// The facilitator as its operator meets it: certificates by `tollgate pki`, the binary started with them, accounts
// that come and go while it runs, and a proper end.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { startChain, type TestChain } from "./support/chain/chain.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { until } from "./support/until.ts";

const SIGNER_KEY = "5d".repeat(32);
let home: string;
let chain: TestChain;

beforeAll(async () => {
  home = mkdtempSync(join(tmpdir(), "facilitator-"));
  chain = await startChain();
  expect((await tollgate("pki", "init", "--dir", "ca")).code).toBe(0);
  expect((await tollgate("pki", "server", "--dir", "ca", "--host", "127.0.0.1")).code).toBe(0);
});
afterAll(async () => {
  await chain.stop();
  rmSync(home, { recursive: true, force: true });
});

const read = (path: string) => readFileSync(join(home, path), "utf8");

async function tollgate(...words: string[]) {
  const child = Bun.spawn([tollgateBinary(), ...words], {
    cwd: home,
    env: {},
    stdin: "ignore",
    stderr: "pipe",
  });
  const [out, err] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  return { code: await child.exited, out, err };
}

/** The kernel ends the process when the thread that started it ends, which is the end of the test process. */
async function start(rpcUrls = `${chain.url}/?key=hunter2`) {
  const child = Bun.spawn(
    ["setpriv", "--pdeathsig", "KILL", "--", tollgateBinary(), "--mode", "facilitator", "--port", "0"],
    {
      cwd: home,
      env: {
        PATH: "/usr/bin:/bin",
        TOLLGATE_OPEN_PORT: "0",
        TOLLGATE_TLS_CERT_FILE: "ca/server.crt",
        TOLLGATE_TLS_KEY_FILE: "ca/server.key",
        TOLLGATE_CLIENT_CA_FILE: "ca/ca.crt",
        TOLLGATE_RPC_URLS: rpcUrls,
        TOLLGATE_SIGNER_KEY: SIGNER_KEY,
        TOLLGATE_LOG_LEVEL: "debug",
      },
      stdin: "ignore",
      stdout: "ignore",
      stderr: "pipe",
    },
  );
  const listening = Promise.withResolvers<{ url: string; open_url: string }>();
  let log = "";
  const logged = (async () => {
    for await (const chunk of child.stderr.pipeThrough(new TextDecoderStream())) {
      log += chunk;
      const line = log.split("\n").find((each) => each.includes('"event":"listening"'));
      if (line !== undefined) listening.resolve(JSON.parse(line));
    }
    listening.reject(new Error(log));
  })();
  return { child, log: () => log, logged, ...(await listening.promise) };
}

test("accounts of the facilitator come and go while it runs, and it ends well", async () => {
  expect((await tollgate("pki", "client", "--dir", "ca", "--name", "alice")).code).toBe(0);
  const facilitator = await start();
  try {
    const tls = { cert: read("ca/alice.crt"), key: read("ca/alice.key"), ca: read("ca/ca.crt") };
    const headers = { "content-type": "application/json" };
    // Whoever may settle is told what is wrong with the request.
    const status = async () =>
      (await fetch(`${facilitator.url}/settle`, { method: "POST", headers, body: "{}", tls })).status;
    expect((await fetch(`${facilitator.open_url}/supported`)).status).toBe(200);
    expect(await status()).toBe(403);
    expect(await tollgate("account", "add", "alice", "--cert", "ca/alice.pem")).toMatchObject({
      code: 0,
      err: "",
    });
    expect(await status()).toBe(400);
    expect((await tollgate("account", "disable", "alice")).code).toBe(0);
    expect(await status()).toBe(403);
    expect((await tollgate("account", "enable", "alice")).code).toBe(0);
    expect(await status()).toBe(400);
    expect((await tollgate("account", "remove", "alice", "--yes")).code).toBe(0);
    expect(await status()).toBe(403);
    facilitator.child.kill("SIGTERM");
    expect(await facilitator.child.exited).toBe(0);
    await facilitator.logged;
  } finally {
    facilitator.child.kill("SIGKILL");
  }
  expect(readdirSync(join(home, "data"))).not.toContain("master.key");
  expect(statSync(join(home, "data")).mode & 0o777).toBe(0o700);
  expect(facilitator.log()).toContain('"event":"stopped"');
  expect(facilitator.log()).not.toContain(SIGNER_KEY);
  expect(facilitator.log()).not.toContain("hunter2");
});

test("a facilitator that no node answers says so soon after it listens, though nobody asks", async () => {
  const silent = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
  try {
    for (const nodes of ["http://127.0.0.1:1", `http://127.0.0.1:${silent.port}`]) {
      const facilitator = await start(nodes);
      const began = performance.now();
      try {
        await until(() => facilitator.log().includes('"event":"not_ready"'), 10_000);
        // A node that says nothing is given up after three seconds.
        expect(performance.now() - began).toBeLessThan(9_000);
        const events = facilitator
          .log()
          .split("\n")
          .filter((line) => line !== "");
        const lines = events.map((line) => JSON.parse(line) as { event: string; level: string; reason?: string });
        const told = lines.filter(({ event }) => event === "listening" || event === "not_ready");
        expect(told).toMatchObject([{ event: "listening" }, { level: "error", reason: "rpc unreachable" }]);
      } finally {
        facilitator.child.kill("SIGKILL");
        await facilitator.logged;
      }
    }
  } finally {
    silent.stop(true);
  }
});
