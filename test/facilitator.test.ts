// The facilitator as it is composed, in this process, on a real chain: both ports, accounts that another store
// changes meanwhile, the drain, and what a start refuses.

import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { type LogFields, silentLog } from "../src/core/log.ts";
import { silentMeters } from "../src/core/meters.ts";
import { systemClock } from "../src/core/time.ts";
import { addAccount, setEnabled } from "../src/facilitator/accounts.ts";
import { utcDay } from "../src/facilitator/payments/guardrails.ts";
import { type FacilitatorOptions, startFacilitator } from "../src/facilitator/start.ts";
import { openStore } from "../src/storage/open.ts";
import { startChain, type TestChain } from "./support/chain/chain.ts";
import { newPayer, type SignedPayment, signPayment } from "./support/chain/payments.ts";
import { startRpcRelay } from "./support/chain/rpc-relay.ts";
import { makePki, type Pki } from "./support/http/pki.ts";
import { BASE } from "./support/network.ts";
import { temporaryPlace } from "./support/temporary.ts";
import { until } from "./support/until.ts";

const PAYEE = "0x00000000000000000000000000000000000000aa";
const PRICE = 1_000n;

let chain: TestChain;
let pki: Pki;
const key = generatePrivateKey();
const running: { stop(): Promise<void> }[] = [];
const dirs: string[] = [];

beforeAll(async () => {
  [chain, pki] = await Promise.all([startChain(), makePki()]);
  await chain.fundEth(privateKeyToAccount(key).address, 10n ** 18n);
});
afterEach(async () => {
  await Promise.all(running.splice(0).map((each) => each.stop()));
  await chain.resumeMining();
  for (const dir of dirs.splice(0)) rmSync(dir, { recursive: true, force: true });
});
afterAll(() => chain.stop());

function newDir(): string {
  const dir = mkdtempSync(join(temporaryPlace(), "tollgate-facilitator-"));
  dirs.push(dir);
  return dir;
}

function optionsFor(dataDir: string, changes: Partial<FacilitatorOptions> = {}): FacilitatorOptions {
  return {
    network: BASE,
    host: "127.0.0.1",
    port: 0,
    openPort: 0,
    dataDir,
    databaseUrl: null,
    drainMs: 200,
    tracing: null,
    tls: { cert: pki.server.cert, key: pki.server.key, clientCa: pki.ca.cert },
    readTls: null,
    rpcUrls: [chain.url],
    signers: { kind: "local", keys: [key] },
    limits: {
      maxPerTransaction: 10_000_000n,
      dailyCeiling: 1_000_000_000n,
      dailyGasAllWei: 0n,
      minValue: 100n,
      dailyGasWei: 10n ** 15n,
      gasLowWaterWei: 10n ** 15n,
      inclusionTimeoutMs: 15_000,
      maxFee: 5n * 10n ** 9n,
      batch: 0,
      confirmations: 1,
    },
    ...changes,
  };
}

async function start(dataDir: string, changes: Partial<FacilitatorOptions> = {}) {
  const facilitator = await startFacilitator(optionsFor(dataDir, changes), silentLog, silentMeters);
  let stopping: Promise<void> | null = null;
  const stop = () => (stopping ??= facilitator.stop());
  running.push({ stop });
  const tls = { cert: pki.client.cert, key: pki.client.key, ca: pki.ca.cert };
  return {
    ...facilitator,
    stop,
    async settle(payment: SignedPayment) {
      const response = await fetch(`${facilitator.url}/settle`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(payment.settleRequest),
        tls,
      });
      return [response.status, await response.json()];
    },
  };
}

/** The data as `tollgate account` opens it: beside the facilitator, without its lock. */
async function beside<T>(
  dataDir: string,
  work: (store: Awaited<ReturnType<typeof openStore>>) => Promise<T>,
): Promise<T> {
  const store = await openStore({ databaseUrl: null, dataDir, log: silentLog, clock: systemClock });
  try {
    return await work(store);
  } finally {
    await store.close();
  }
}

const addClient = (dataDir: string) =>
  beside(dataDir, (store) =>
    addAccount(store, systemClock, {
      name: "acme",
      certificate: pki.client.cert,
      maxPerTransaction: null,
      dailyCeiling: null,
    }),
  );

async function funded(): Promise<SignedPayment> {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, PRICE);
  return signPayment(payer, { to: PAYEE, value: PRICE });
}

describe("a facilitator that runs", () => {
  test("settles for an account that is added, disabled and enabled beside it", async () => {
    const dir = newDir();
    const facilitator = await start(dir);
    const payment = await funded();
    expect(await facilitator.settle(payment)).toEqual([403, { error: "no active account has this certificate" }]);
    await addClient(dir);
    const [status, body] = await facilitator.settle(payment);
    const [transfer] = await chain.transfers({ nonce: payment.authorization.nonce });
    expect([status, body]).toEqual([
      200,
      {
        success: true,
        transaction: transfer?.transaction_hash,
        network: "base",
        payer: payment.authorization.from.toLowerCase(),
      },
    ]);
    await beside(dir, (store) => setEnabled(store, systemClock, "acme", false));
    expect((await facilitator.settle(payment))[0]).toBe(403);
    await beside(dir, (store) => setEnabled(store, systemClock, "acme", true));
    expect(await facilitator.settle(payment)).toEqual([200, body]);
  });

  test("has two endpoints on its open port, and nothing else", async () => {
    const { openUrl } = await start(newDir());
    expect(await (await fetch(`${openUrl}/healthz`)).json()).toEqual({ status: "ok" });
    const { kinds } = (await (await fetch(`${openUrl}/supported`)).json()) as { kinds: unknown[] };
    expect(kinds).toHaveLength(1);
    for (const path of ["/settle", "/metrics", "/", "/v1/agents", "/swagger"]) {
      const response = await fetch(openUrl + path, { method: "POST", body: "{}" });
      expect([path, response.status]).toEqual([path, 404]);
    }
    const root = await fetch(openUrl);
    expect([root.status, await root.json()]).toEqual([
      404,
      { error: "no such route; known here: GET /supported, GET /healthz" },
    ]);
    expect((await fetch(`${openUrl}/supported`, { method: "POST" })).status).toBe(405);
  });

  test("says why it is not ready", async () => {
    const poor = generatePrivateKey();
    const { openUrl } = await start(newDir(), { signers: { kind: "local", keys: [poor] } });
    const response = await fetch(`${openUrl}/healthz`);
    expect([response.status, await response.json()]).toEqual([
      503,
      { status: "unavailable", reason: "gas wallet low" },
    ]);
  });

  test("is not ready without a node, and still answers", async () => {
    const { openUrl } = await start(newDir(), { rpcUrls: ["http://127.0.0.1:1"] });
    const response = await fetch(`${openUrl}/healthz`);
    expect([response.status, await response.json()]).toEqual([
      503,
      { status: "unavailable", reason: "rpc unreachable" },
    ]);
    expect((await fetch(`${openUrl}/supported`)).status).toBe(200);
  });
});

test("that no node answers at the start, and that one does again, is in the log once each, though nobody asks", async () => {
  const relay = await startRpcRelay(chain.url);
  await relay.refuse();
  const told: [string, LogFields][] = [];
  const tell = (event: string, fields: LogFields = {}) => {
    if (/ready$/.test(event)) told.push([event, fields]);
  };
  const log = { ...silentLog, info: tell, error: tell };
  running.push(await startFacilitator(optionsFor(newDir(), { rpcUrls: [relay.url] }), log, silentMeters));
  try {
    await until(() => told.length === 1);
    await relay.restore();
    await until(() => told.length === 2);
    expect(told).toEqual([
      ["not_ready", { reason: "rpc unreachable" }],
      ["ready", {}],
    ]);
  } finally {
    await relay.stop();
  }
});

describe("the stop of a facilitator", () => {
  test("gives waiting callers what there is, and the next start goes on with it", async () => {
    const dir = newDir();
    const first = await start(dir);
    await addClient(dir);
    const payment = await funded();
    await chain.pauseMining();
    const waiting = first.settle(payment);
    const pool = async () => Number(((await chain.rpc("txpool_status")) as { pending: string }).pending);
    await until(async () => (await pool()) !== 0);
    await first.stop();
    // An answer that nobody takes for final: the hash that may still land, or that it is still being settled.
    const [status, body] = (await waiting) as [number, { success?: boolean; transaction?: string }];
    expect([200, 503]).toContain(status);
    if (status === 200) expect([body.success, body.transaction]).toEqual([false, expect.stringMatching(/^0x/)]);

    await chain.resumeMining();
    await chain.mine();
    const second = await start(dir);
    let settled = await second.settle(payment);
    while (settled[0] === 503) settled = await second.settle(payment);
    expect(settled).toEqual([200, expect.objectContaining({ success: true })]);
    expect(await chain.transfers({ nonce: payment.authorization.nonce })).toHaveLength(1);
  });

  test("refuses new connections, and takes no longer than the drain when nobody is at work", async () => {
    const facilitator = await start(newDir(), { drainMs: 60_000 });
    await facilitator.stop();
    for (const url of [facilitator.openUrl, facilitator.url]) {
      const refused = await fetch(`${url}/supported`, { tls: { ca: pki.ca.cert } }).then(
        () => "answered",
        (error) => error.code,
      );
      expect(refused).toMatch(/refused/i);
    }
  });
});

describe("the start of a facilitator", () => {
  const problemOf = (options: FacilitatorOptions) =>
    startFacilitator(options, silentLog, silentMeters).then(
      async (facilitator) => {
        await facilitator.stop();
        return "started";
      },
      (error: Error) => `${error.constructor.name}: ${error.message}`,
    );

  test("is refused on data that another one works on", async () => {
    const dir = newDir();
    const first = await start(dir);
    expect(await problemOf(optionsFor(dir))).toBe(`StartupProblem: another tollgate runs on the data directory ${dir}`);
    await first.stop();
    expect(await problemOf(optionsFor(dir))).toBe("started");
  });

  test("is refused on a node of another chain", async () => {
    using node = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      async fetch(request) {
        const { id } = (await request.json()) as { id: number };
        return Response.json({ jsonrpc: "2.0", id, result: "0x1" });
      },
    });
    expect(await problemOf(optionsFor(newDir(), { rpcUrls: [`${node.url}`] }))).toMatch(/^StartupProblem: .*chain/);
  });

  test("is refused with a key that is not the certificate's, and with taken ports, and leaves nothing behind", async () => {
    const dir = newDir();
    using taken = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => new Response() });
    const port = taken.port ?? 0;
    const { cert, clientCa } = optionsFor(dir).tls;
    const wrong: [Partial<FacilitatorOptions>, RegExp][] = [
      [{ tls: { cert, clientCa, key: pki.client.key } }, /TOLLGATE_TLS_KEY_FILE/],
      [{ tls: { cert: "none", clientCa, key: pki.server.key } }, /TOLLGATE_TLS_CERT_FILE/],
      [{ port }, /TOLLGATE_PORT must be free/],
      [{ openPort: port }, /TOLLGATE_OPEN_PORT must be free/],
      [{ host: "192.0.2.1" }, /192\.0\.2\.1 is not an address of this machine$/],
    ];
    for (const [changes, message] of wrong) {
      expect(await problemOf(optionsFor(dir, changes))).toMatch(message);
    }
    expect(await problemOf(optionsFor(dir))).toBe("started");
  });

  test("says where it listens", async () => {
    const lines: [string, LogFields][] = [];
    const log = {
      ...silentLog,
      info: (event: string, fields: LogFields = {}) => void lines.push([event, fields]),
    };
    const facilitator = await startFacilitator(optionsFor(newDir()), log, silentMeters);
    running.push(facilitator);
    const { url, openUrl } = facilitator;
    expect(lines).toContainEqual(["listening", expect.objectContaining({ url, open_url: openUrl })]);
    expect(JSON.stringify(lines)).not.toContain(key.slice(2));
  });
});

test("a machine that starts 40 days ahead forgets nothing of today's ceilings", async () => {
  const dir = newDir();
  const today = { account: "acme", day: utcDay(Date.now()), reserved: "5", gas_burned: "7", gas_used: "9" };
  await beside(dir, (store) =>
    store.write(async ({ db, tables }) => void (await db.insert(tables.facilitatorDays).values(today))),
  );
  const now = Date.now;
  Date.now = () => now() + 40 * 86_400_000;
  try {
    const facilitator = await start(dir);
    // Long enough for what a start does by itself.
    await Bun.sleep(500);
    await facilitator.stop();
  } finally {
    Date.now = now;
  }
  const kept = await beside(dir, ({ read }) => read.db.select().from(read.tables.facilitatorDays).execute());
  expect(kept).toEqual([today]);
});
