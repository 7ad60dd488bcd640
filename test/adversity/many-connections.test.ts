// More connections than the gateway may have descriptors. Callers' calls are made and answered all the same, and when
// the flood is over everybody is let in again.
import { expect, setDefaultTimeout, test } from "bun:test";
import { connect, type Socket } from "node:net";
import { tollgateBinary } from "../support/gateway/binary.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { until } from "../support/until.ts";

setDefaultTimeout(120_000);

const OPEN_FILES = 512;
const FLOOD = 800;
/** Less than what a silent connection is given to live once it has been used. */
const ANSWER_MS_MAX = 30_000;

const crowded = (openFiles = OPEN_FILES) =>
  startGateway({ program: ["prlimit", `--nofile=${openFiles}:${openFiles}`, "--", tollgateBinary()] });

/** Connections that send this and stay, each for as long as the gateway lets it. */
class Flood implements Disposable {
  readonly #sockets: Socket[] = [];

  async open(gateway: Gateway, sent: string, ...from: readonly string[]): Promise<void> {
    const port = Number(new URL(gateway.url).port);
    const opening = Array.from({ length: FLOOD }, (_, at) => {
      const { promise, resolve } = Promise.withResolvers<void>();
      const localAddress = from[at % from.length] ?? "127.0.0.1";
      const socket = connect({ port, host: "127.0.0.1", localAddress }, () => {
        if (sent === "") resolve();
        else socket.write(sent);
      });
      socket.on("data", () => resolve());
      for (const event of ["close", "error"]) socket.on(event, () => resolve());
      this.#sockets.push(socket);
      return promise;
    });
    await Promise.all(opening);
  }

  [Symbol.dispose](): void {
    for (const socket of this.#sockets) socket.destroy();
  }
}

/** Sends a request until it is answered: a connection may be refused or closed meanwhile. */
async function insist(url: string, init: RequestInit = {}): Promise<Response> {
  const deadline = performance.now() + ANSWER_MS_MAX;
  for (;;) {
    try {
      return await fetch(url, { ...init, signal: AbortSignal.timeout(ANSWER_MS_MAX), keepalive: false });
    } catch (error) {
      if (performance.now() > deadline) throw error;
      await Bun.sleep(50);
    }
  }
}

async function tenantOf(gateway: Gateway, upstreamUrl: string, name = "acme") {
  const authorization = `Bearer ${await gateway.token({ tenant: name, user: "me" })}`;
  const headers = { authorization, "content-type": "application/json", prefer: "wait=20" };
  const body = JSON.stringify({ name: `echo ${crypto.randomUUID()}`, upstream_url: upstreamUrl });
  const created = await insist(`${gateway.url}/v1/agents`, { method: "POST", headers, body });
  const { id } = (await created.json()) as { id: string };
  const proxy = `${gateway.url}/v1/proxy/${id}`;
  return {
    call: () => insist(proxy, { method: "POST", headers, body: "{}" }),
    accept: () => insist(proxy, { method: "POST", headers: { ...headers, prefer: "" }, body: "{}" }),
    async statusOf(answer: Response): Promise<string> {
      const { invocation_id } = (await answer.json()) as { invocation_id: string };
      const poll = await insist(`${proxy}/invocations/${invocation_id}`, { headers });
      return ((await poll.json()) as { status: string }).status;
    },
  };
}

test("connections that were used and are silent give way to those that come", async () => {
  using upstream = Bun.serve({ hostname: "127.0.0.1", port: 0, fetch: () => new Response("here") });
  await using gateway = await crowded();
  const tenant = await tenantOf(gateway, `http://127.0.0.1:${upstream.port}/`);
  using flood = new Flood();
  await flood.open(gateway, HEALTH);
  expect(await tenant.statusOf(await tenant.call())).toBe("succeeded");
  expect(gateway.log()).toContain("connections_ended");
  expect(gateway.log()).not.toContain("connections_refused");
});

const HEALTH = "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";

/** Whether a request on the connection is answered. */
function isAnswered(socket: Socket, request = HEALTH): Promise<boolean> {
  const { promise, resolve } = Promise.withResolvers<boolean>();
  if (socket.destroyed) resolve(false);
  socket.removeAllListeners();
  socket.once("data", (bytes) => resolve(bytes.toString().startsWith("HTTP/1.1 200")));
  for (const event of ["close", "error"]) socket.on(event, () => resolve(false));
  socket.write(request);
  return promise;
}

interface SteadyFloodOptions {
  readonly most: number;
  /** By turns. */
  readonly from: readonly string[];
}

/** Opens connections in the place of those that it loses, some each second, until it is disposed of. */
class SteadyFlood implements Disposable {
  readonly #sockets = new Set<Socket>();
  readonly #opening: ReturnType<typeof setInterval>;

  constructor(gateway: Gateway, sent: string, { most, from }: SteadyFloodOptions) {
    const port = Number(new URL(gateway.url).port);
    const begun = performance.now();
    let made = 0;
    this.#opening = setInterval(() => {
      const due = Math.min((EACH_SECOND * (performance.now() - begun)) / 1000, made + AT_ONCE);
      for (; made < due && this.#sockets.size < most; made++) {
        const localAddress = from[made % from.length] ?? "127.0.0.1";
        const socket = connect({ port, host: "127.0.0.1", localAddress }, () => socket.write(sent));
        socket.on("error", () => {}).on("close", () => this.#sockets.delete(socket));
        socket.resume();
        this.#sockets.add(socket);
      }
    }, 20);
  }

  [Symbol.dispose](): void {
    clearInterval(this.#opening);
    for (const socket of this.#sockets) socket.destroy();
  }
}

test("an address that holds most connections loses some, and others are let in and lose none", async () => {
  await using gateway = await crowded();
  const { port } = new URL(gateway.url);
  const open = () => connect({ port: Number(port), host: "127.0.0.1" });
  const kept = open();
  expect(await isAnswered(kept)).toBe(true);
  // Heads that never end.
  using flood = new Flood();
  void flood.open(gateway, "GET /healthz HTTP/1.1\r\n", "127.0.0.2");
  await until(() => gateway.log().includes("connections_ended"));
  for (let asked = 0; asked < 50; asked++) {
    const socket = open();
    expect(await isAnswered(socket)).toBe(true);
    socket.destroy();
  }
  expect(await isAnswered(kept)).toBe(true);
  kept.destroy();
});

/** Far more than the gateway looks at in one go, and than its system's limit leaves for connections. */
const MANY_FILES = 4_700;
const MANY_CONNECTIONS = 5_000;
const EACH_SECOND = 800;
const AT_ONCE = 50;
/** How long it goes on once connections are ended, and how long that may take on a busy machine. */
const FLOOD_MS = 3_500;
const FULL_MS_MAX = 60_000;

test("an address that fills thousands of descriptors again and again closes the port to nobody", async () => {
  await using gateway = await crowded(MANY_FILES);
  const port = Number(new URL(gateway.url).port);
  const open = () => connect({ port, host: "127.0.0.1", localAddress: "127.0.0.9" });
  const kept = open();
  expect(await isAnswered(kept)).toBe(true);
  const begun = performance.now();
  {
    using _flood = new SteadyFlood(gateway, HEALTH, { most: MANY_CONNECTIONS, from: ["127.0.0.66"] });
    let until = begun + FULL_MS_MAX;
    let isFull = false;
    while (performance.now() < until) {
      if (!isFull && gateway.log().includes("connections_ended")) {
        isFull = true;
        until = performance.now() + FLOOD_MS;
      }
      // Most of the time this address has only the connection from before the flood.
      await Bun.sleep(100);
      const socket = open();
      expect(await isAnswered(socket)).toBe(true);
      socket.destroy();
      expect(await isAnswered(kept)).toBe(true);
    }
  }
  kept.destroy();
  expect(gateway.log()).toContain("connections_ended");
  expect(gateway.log()).not.toContain("connections_refused");
});

const KEPT = 5;
const NEW = 50;

/** Each with what a connection sends of its only request, behind the tenant's token where it has one. */
const HOGS: [who: string, line: string, tenant: string | null, more: string][] = [
  ["a tenant that keeps silent connections", "GET /v1/agents", "many", "\r\n"],
  ["a tenant that stops in tiny bodies", "POST /v1/agents", "many", "content-length: 9\r\n\r\n{"],
  ["strangers that stop in their heads", "GET /v1/agents", null, ""],
];

async function requestOf(gateway: Gateway, line: string, tenant: string | null, more = "\r\n"): Promise<string> {
  const token = tenant === null ? "" : `authorization: Bearer ${await gateway.token({ tenant, user: "me" })}\r\n`;
  return `${line} HTTP/1.1\r\nhost: x\r\n${token}${more}`;
}

for (const [who, ...sent] of HOGS) {
  test(`${who}: some are ended, and callers at the address are let in and lose none`, async () => {
    await using gateway = await crowded();
    const { port } = new URL(gateway.url);
    const open = () => connect({ port: Number(port), host: "127.0.0.1" });
    const request = await requestOf(gateway, "GET /v1/agents", "few");
    const hogs = await requestOf(gateway, ...sent);
    const kept = Array.from({ length: KEPT }, open);
    const early: Socket[] = [];
    // One at a time, so that the callers send requests while many are open, and not yet too many.
    while (!/connections_(ended|refused)/.test(gateway.log()) && early.length < FLOOD) {
      for (const socket of kept) expect(await isAnswered(socket, request)).toBe(true);
      const hog = open().on("error", () => {});
      hog.resume().write(hogs);
      early.push(hog);
    }
    using _flood = new SteadyFlood(gateway, hogs, { most: FLOOD, from: ["127.0.0.1"] });
    for (let asked = 0; asked < NEW; asked++) {
      const socket = open();
      expect(await isAnswered(socket, request)).toBe(true);
      socket.destroy();
    }
    for (const socket of kept) expect(await isAnswered(socket, request)).toBe(true);
    for (const socket of [...kept, ...early]) socket.destroy();
    expect(gateway.log()).toMatch(sent[1] === null ? /"connections_ended"/ : /"connections_ended".*"tenant":"many"/);
    expect(gateway.log()).not.toContain("connections_refused");
  });
}

const MANY_ADDRESSES = Array.from({ length: 100 }, (_, at) => `127.0.1.${at + 1}`);

/** Each with where they come from. */
const STRANGERS: [of: string, ...from: string[]][] = [
  ["all of one address", "127.0.0.1"],
  ["many of each of a few addresses", ...MANY_ADDRESSES.slice(0, 20)],
  ["a few of each of many addresses", ...MANY_ADDRESSES],
];

for (const [of, ...from] of STRANGERS) {
  test(`heads that never end, ${of}: who comes is let in, and a tenant's connections stay`, async () => {
    await using gateway = await crowded();
    const port = Number(new URL(gateway.url).port);
    const open = () => connect({ port, host: "127.0.0.1" });
    const request = await requestOf(gateway, "GET /v1/agents", "few");
    using _flood = new SteadyFlood(gateway, "GET /healthz HTTP/1.1\r\n", { most: FLOOD, from });
    await until(() => /connections_(ended|refused)/.test(gateway.log()));
    const kept: Socket[] = [];
    for (let asked = 0; asked < NEW; asked++) {
      const socket = open();
      expect(await isAnswered(socket, request)).toBe(true);
      if (kept.length < KEPT) kept.push(socket);
      else socket.destroy();
    }
    for (const socket of kept) expect(await isAnswered(socket, request)).toBe(true);
    for (const socket of kept) socket.destroy();
    expect(gateway.log()).not.toContain("connections_refused");
  });
}

/** Answers no call before it is told to. */
function slowUpstream() {
  let calls = 0;
  const released = Promise.withResolvers<void>();
  const fetch = async () => {
    calls++;
    await released.promise;
    return new Response("here");
  };
  const server = Bun.serve({ hostname: "127.0.0.1", port: 0, idleTimeout: 0, fetch });
  return {
    url: `http://127.0.0.1:${server.port}/`,
    calls: () => calls,
    release: released.resolve,
    [Symbol.dispose]: () => void server.stop(true),
  };
}

for (const [of, ...from] of STRANGERS) {
  test(`connections that send nothing, ${of}, end no call that is under way, and everybody is let in again`, async () => {
    using upstream = slowUpstream();
    await using gateway = await crowded();
    const tenant = await tenantOf(gateway, upstream.url);
    const answered = tenant.call();
    await until(() => upstream.calls() === 1);
    {
      using flood = new Flood();
      await flood.open(gateway, "", ...from);
      await until(() => gateway.log().includes("connections_ended"));
      upstream.release();
      expect((await answered).status).toBe(202);
    }
    expect((await insist(`${gateway.url}/healthz`)).status).toBe(200);
    expect(await tenant.statusOf(await answered)).toBe("succeeded");
    await gateway.stop();
  });
}

/** So many that none of them has much more than the others. */
const EQUALS = Array.from({ length: 8 }, (_, at) => `equal-${at}`);

test("tenants that keep equally many connections lose silent ones, but none with a call, and who has few loses none", async () => {
  using upstream = slowUpstream();
  await using gateway = await crowded();
  const open = () => connect({ port: Number(new URL(gateway.url).port), host: "127.0.0.1" });
  const request = await requestOf(gateway, "GET /v1/agents", "few");
  const requests = await Promise.all(EQUALS.map((tenant) => requestOf(gateway, "GET /v1/agents", tenant)));
  const equal = await tenantOf(gateway, upstream.url, EQUALS[0]);
  const answered = equal.call();
  await until(() => upstream.calls() === 1);
  const kept = Array.from({ length: KEPT }, open);
  for (const socket of kept) expect(await isAnswered(socket, request)).toBe(true);
  const early: Socket[] = [];
  while (!/connections_(ended|refused)/.test(gateway.log()) && early.length < FLOOD) {
    const socket = open();
    early.push(socket);
    expect(await isAnswered(socket, requests[early.length % requests.length])).toBe(true);
  }
  for (let asked = 0; asked < NEW; asked++) {
    const socket = open();
    early.push(socket);
    expect(await isAnswered(socket, requests[asked % requests.length])).toBe(true);
  }
  for (const socket of kept) expect(await isAnswered(socket, request)).toBe(true);
  upstream.release();
  expect(await equal.statusOf(await answered)).toBe("succeeded");
  for (const socket of [...kept, ...early]) socket.destroy();
  expect(gateway.log()).not.toContain("connections_refused");
});

/** Of each tenant: with the connections to the upstream that all of them take, too many. */
const CALLS = 27;

test("calls that take all connections are answered, and new connections are refused until then", async () => {
  using upstream = slowUpstream();
  await using gateway = await crowded();
  const tenants = await Promise.all(EQUALS.map((name) => tenantOf(gateway, upstream.url, name)));
  const answers = tenants.flatMap(({ call }) => Array.from({ length: CALLS }, call));
  await until(() => gateway.log().includes("connections_refused"));
  expect(upstream.calls()).toBe(EQUALS.length * CALLS);
  upstream.release();
  for (const answer of await Promise.all(answers)) expect(answer.status).toBe(202);
  expect((await insist(`${gateway.url}/healthz`)).status).toBe(200);
  expect(upstream.calls()).toBe(EQUALS.length * CALLS);
});

/** As many calls of an agent run at once, by default. */
const AGENT_CALLS = 64;

test("calls of one tenant whose upstreams are slow leave descriptors to everybody else", async () => {
  using upstream = slowUpstream();
  await using gateway = await crowded();
  const agents = await Promise.all(Array.from({ length: 8 }, () => tenantOf(gateway, upstream.url)));
  const ask = async ({ accept }: (typeof agents)[number]) => {
    for (let made = 0; made < AGENT_CALLS; made++) expect((await accept()).status).toBe(202);
  };
  await Promise.all(agents.map(ask));
  await until(() => upstream.calls() > 230);
  for (let asked = 0; asked < 400; asked++) {
    const answer = await fetch(`${gateway.url}/healthz`, { keepalive: false });
    expect(answer.status).toBe(200);
  }
  expect(gateway.log()).not.toContain("connections_refused");
  upstream.release();
});
