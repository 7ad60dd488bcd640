// One tenant does its worst, with tokens and upstreams of its own, and its neighbour's calls end as if it were alone: the
// compiled binary, in a process of its own, watched by its own log and by its memory.
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { Agent, type IncomingMessage, request } from "node:http";
import { zstdCompressSync } from "node:zlib";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { computedPauses } from "../support/gateway/pauses.ts";
import { unread } from "../support/http/unread.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";

const MIB = 1024 * 1024;
/** Of each call of the neighbour, on a machine that has other tests to run as well. */
const CALL_MS_MAX = 5_000;
const ROUNDS = 4;
const RSS_MIB_MAX = 700;
/**
 * Of a thread's event loop, in one piece: computed, not waited for a processor. The worst that was measured is 38 on two
 * busy cores, and 97, of the same program, on two slow ones; what these attacks did before they were mended was 150 to 500.
 */
const COMPUTED_MS_MAX = 130;
/** The watch tells at once of the first pause, and of what follows within a second. */
const TOLD_MS = 1_200;

interface Tenant {
  readonly headers: Record<string, string>;
  post(path: string, body: string, more?: Record<string, string>): Promise<Response>;
  register(agent: object): Promise<string>;
  /** Without the bound on requests at once that `fetch` has; nothing reads the answer's body. */
  send(method: string, path: string, body: string, more?: Record<string, string>): Promise<IncomingMessage>;
}

interface World {
  readonly gateway: Gateway;
  readonly hostile: Tenant;
  tenant(name: string): Promise<Tenant>;
  /** Answers as the path of its URL says; what hangs there ends with the test. */
  readonly upstream: Upstream;
}

async function tenantOf(gateway: Gateway, tenant: string): Promise<Tenant> {
  const headers = {
    authorization: `Bearer ${await gateway.token({ tenant, user: "u" })}`,
    "content-type": "application/json",
  };
  const post = (path: string, body: string, more: Record<string, string> = {}) =>
    fetch(`${gateway.url}${path}`, { method: "POST", headers: { ...headers, ...more }, body });
  const agent = new Agent({ maxSockets: Number.POSITIVE_INFINITY });
  return {
    headers,
    post,
    send(method, path, body, more = {}) {
      const { promise, resolve, reject } = Promise.withResolvers<IncomingMessage>();
      const options = { method, agent, headers: { ...headers, ...more } };
      request(`${gateway.url}${path}`, options, resolve).on("error", reject).end(body);
      return promise;
    },
    async register(agent) {
      const response = await post("/v1/agents", JSON.stringify({ name: crypto.randomUUID(), ...agent }));
      expect(response.status).toBe(201);
      return ((await response.json()) as { id: string }).id;
    },
  };
}

const MCP = { protocol: "mcp", mcp_transport: "streamable_http" };
const LISTED = Array.from({ length: 10_000 }, (_, at) => ({ name: `tool-${at}`, inputSchema: {} }));
const EVENTS = Buffer.from(`data: {"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"a"}]}}\n\n`.repeat(500));
const LIST = JSON.stringify({ jsonrpc: "2.0", id: 1, result: { tools: LISTED } });
/** A frame of which the window is 8 MiB, with 64 MiB of zeros: what may be sent. */
const WINDOWED = zstdCompressSync(new Uint8Array(64 * MIB), { params: { 101: 23 } });
const MESSAGE = JSON.stringify({ jsonrpc: "2.0", id: 1, method: "tools/list" });

/** Hundreds of answers begin with one of these, each of which is made once. */
const HALF = Buffer.alloc(2 * MIB, "x");
const EVENT = Buffer.concat([Buffer.from('data: {"jsonrpc":"2.0","id":1,"result":"'), HALF]);
const LONG = Buffer.alloc(MIB, "x");

/** A stream that begins with `start` and does not end, or goes on with `piece` for as long as it is read. */
function unending(start: Uint8Array, piece: Uint8Array | null, gone: AbortSignal): ReadableStream {
  let isBegun = false;
  return new ReadableStream({
    async pull(controller) {
      if (isBegun && piece === null) await new Promise((resolve) => gone.addEventListener("abort", resolve));
      else controller.enqueue(isBegun ? piece : start);
      isBegun = true;
    },
  });
}

function startHostileUpstream(gone: AbortSignal): Upstream {
  const never = () => new Promise<Response>((resolve) => gone.addEventListener("abort", () => resolve(new Response())));
  return startUpstream(async (request) => {
    const kind = new URL(request.url).pathname.slice(1);
    await request.bytes();
    switch (kind) {
      case "never":
        return never();
      case "event":
        return new Response(unending(EVENT, null, gone), {
          headers: { "content-type": "text/event-stream" },
        });
      case "lists":
        return new Response(unending(EVENTS, EVENTS, gone), {
          headers: { "content-type": "text/event-stream" },
        });
      case "half":
        return new Response(unending(HALF, null, gone));
      case "windows":
        return new Response(unending(WINDOWED.subarray(0, WINDOWED.length - 4), null, gone), {
          headers: { "content-encoding": "zstd" },
        });
      case "flood":
        return new Response(unending(Buffer.from("x"), new Uint8Array(256 * 1024), gone));
      case "long":
        return new Response(LONG);
      case "list":
        return new Response(LIST, { headers: { "content-type": "application/json" } });
      default:
        return new Response("done");
    }
  });
}

interface Attack {
  readonly name: string;
  /** Where the runtime itself takes longer than what is usual. */
  readonly computedMsMax?: number;
  /** Resolves when it is under way. What it began may go on until the gateway ends. */
  begin(world: World): Promise<void>;
}

const many = <T>(count: number, make: (at: number) => Promise<T>) =>
  Promise.all(Array.from({ length: count }, (_, at) => make(at)));

const unheard = (work: Promise<unknown>) => void work.catch(() => {});

/** Calls that are answered by the path of the upstream, over so many agents. */
function calls(kind: string, agents: number, each: number, options: { agent?: object; streamed?: boolean } = {}) {
  return async ({ hostile, upstream }: World) => {
    const agent = { upstream_url: `${upstream.url}${kind}`, ...options.agent };
    const ids = await many(agents, () => hostile.register(agent));
    for (const id of ids) {
      const path = options.streamed ? `/v1/proxy/${id}/stream` : `/v1/proxy/${id}`;
      const answers = many(each, () => hostile.send("POST", path, MESSAGE));
      if (options.streamed) unheard(answers);
      else for (const { statusCode } of await answers) expect(statusCode).toBe(202);
    }
  };
}

const EVIL_POLICY = {
  default: "allow",
  on_error: "deny",
  rules: Array.from({ length: 500 }, (_, at) =>
    at < 250
      ? { action: "deny", match: { max_body_bytes: at === 249 ? 1e6 : 1e12 } }
      : { action: "warn", match: { max_body_bytes: 1e6 } },
  ),
};

/** Streamed calls for lists of tools, which a policy denies some of. */
function lists(kind: string, count: number) {
  return async ({ hostile, gateway, upstream }: World) => {
    const put = await fetch(`${gateway.url}/v1/policy`, {
      method: "PUT",
      headers: hostile.headers,
      body: JSON.stringify(EVIL_POLICY),
    });
    expect(put.status).toBe(200);
    const id = await hostile.register({ upstream_url: `${upstream.url}${kind}`, ...MCP });
    const listing = async () => (await hostile.send("POST", `/v1/proxy/${id}/stream`, MESSAGE)).resume();
    unheard(many(count, listing));
  };
}

/** Nearly as long as one may be. */
const LONG_POLICY = {
  ...EVIL_POLICY,
  rules: Array.from({ length: 450 }, (_, at) => ({
    action: "warn",
    match: { tools: [`${at}`.padEnd(1000, "t"), "b".repeat(1000)] },
  })),
};

const ATTACKS: readonly Attack[] = [
  { name: "calls of hundreds of agents that never end", begin: calls("never", 300, 15) },
  {
    name: "streams of hundreds of agents that never end",
    begin: calls("never", 100, 20, { streamed: true }),
  },
  { name: "events that never end", begin: calls("event", 20, 4, { agent: MCP }) },
  { name: "answers that stop half-way", begin: calls("half", 20, 40) },
  { name: "answers in zstd windows that are held open", begin: calls("windows", 10, 24) },
  {
    name: "streamed answers in zstd windows that are held open",
    begin: calls("windows", 10, 24, { streamed: true }),
  },
  { name: "streams that nobody reads", begin: calls("flood", 8, 30, { streamed: true }) },
  { name: "lists of tools under a long policy", begin: lists("list", 30) },
  {
    name: "bodies that come slowly, of two tenants",
    // The runtime reads and copies half a megabyte of each of the 80 that begin together, in one go: 45 to 100 ms.
    computedMsMax: 220,
    async begin({ gateway, tenant }) {
      for (const name of ["slow-1", "slow-2"]) {
        const { headers, register } = await tenant(name);
        const id = await register({ upstream_url: "http://127.0.0.1:1/" });
        const agent = new Agent({ maxSockets: Number.POSITIVE_INFINITY });
        for (let body = 0; body < 40; body++) {
          const begun = request(`${gateway.url}/v1/proxy/${id}`, { method: "POST", agent, headers });
          begun.on("error", () => {}).write(new Uint8Array(8 * MIB));
        }
      }
    },
  },
  {
    name: "thousands of long answers that nobody reads",
    async begin({ hostile, gateway, upstream }) {
      const scope = "invocations:read_body";
      const token = await gateway.token({ tenant: "hostile", user: "u", scope });
      const id = await hostile.register({ upstream_url: `${upstream.url}long` });
      const called = await hostile.post(`/v1/proxy/${id}`, `"${"x".repeat(MIB)}"`, { prefer: "wait=30" });
      const poll = called.headers.get("location") ?? "";
      const detail = `/v1/invocations/${poll.split("/").at(-1)}`;
      const { headers } = hostile;
      const body = JSON.stringify(LONG_POLICY);
      const put = await fetch(`${gateway.url}/v1/policy`, { method: "PUT", headers, body });
      expect(put.status).toBe(200);
      await many(100, () => hostile.register({ metadata: { text: "x".repeat(16_000) } }));
      const asked = { [poll]: 700, [detail]: 300, "/v1/policy": 1000, "/v1/agents?limit=100": 500 };
      const asking = ([path, count]: [string, number]) => many(count, () => unread(gateway, token, path));
      await Promise.all(Object.entries(asked).map(asking));
    },
  },
  { name: "lists of tools in events without number", begin: lists("lists", 100) },
  {
    name: "strangers by the thousand, who ask for the documentation or have bad tokens",
    // The runtime accepts and reads a thousand connections in one go, each with a request that is answered at once: 60 to
    // 100 ms on two slow cores, now as in earlier versions.
    computedMsMax: 160,
    async begin({ gateway, hostile }) {
      const good = hostile.headers["authorization"]?.replace("Bearer ", "") ?? "";
      const bad = good.replace(/[^.]+$/, "x".repeat(86));
      unheard(many(1500, () => unread(gateway, bad, "/swagger/swagger-ui-bundle.js")));
      unheard(many(1500, () => unread(gateway, bad, "/v1/agents")));
    },
  },
  {
    name: "thousands of polls that wait, and of pages",
    async begin({ hostile, upstream }) {
      const id = await hostile.register({ upstream_url: `${upstream.url}never` });
      const response = await hostile.post(`/v1/proxy/${id}`, "{}");
      const location = response.headers.get("location") ?? "";
      const get = async (path: string, more?: Record<string, string>) =>
        (await hostile.send("GET", path, "", more)).resume();
      unheard(many(1500, () => get(location, { prefer: "wait=60" })));
      unheard(many(500, () => get("/v1/invocations?status=running&mode=transactional&limit=100")));
      unheard(many(500, () => get("/v1/agents?q=a&limit=100")));
    },
  },
];

/** One call of each kind; what each took in milliseconds. */
async function callsOf({ headers, post }: Tenant, gateway: Gateway, id: string, body: string): Promise<number[]> {
  const polledFrom = performance.now();
  const accepted = await post(`/v1/proxy/${id}`, body, { prefer: "wait=30" });
  expect(accepted.status).toBe(202);
  const poll = await fetch(`${gateway.url}${accepted.headers.get("location")}`, { headers });
  expect(await poll.json()).toMatchObject({ status: "succeeded" });
  const polled = performance.now() - polledFrom;
  const streamedFrom = performance.now();
  const streamed = await post(`/v1/proxy/${id}/stream`, body);
  expect([streamed.status, await streamed.text()]).toEqual([200, "done"]);
  return [polled, performance.now() - streamedFrom];
}

function peakMib(pid: number): number {
  const kib = /VmHWM:\s+(\d+) kB/.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1];
  return Number(kib) / 1024;
}

test.each(ATTACKS)(
  "$name hold up no other tenant, and cost no more memory than there is",
  async ({ begin, computedMsMax = COMPUTED_MS_MAX }) => {
    const gone = new AbortController();
    const upstream = startHostileUpstream(gone.signal);
    try {
      await using gateway = await startGateway({
        env: { TOLLGATE_UPSTREAM_TIMEOUT_MS: "120000", TOLLGATE_BLOCKED_MS: "20" },
      });
      const hostile = await tenantOf(gateway, "hostile");
      const neighbour = await tenantOf(gateway, "neighbour");
      const id = await neighbour.register({ upstream_url: `${upstream.url}done` });
      await begin({ gateway, hostile, upstream, tenant: (name) => tenantOf(gateway, name) });
      const times: number[] = [];
      for (let round = 0; round < ROUNDS; round++) {
        const body = round % 2 === 0 ? "{}" : `"${"x".repeat(MIB)}"`;
        times.push(...(await callsOf(neighbour, gateway, id, body)));
      }
      await Bun.sleep(TOLD_MS);
      const slow = times.filter((ms) => ms >= CALL_MS_MAX);
      const pauses = computedPauses(gateway.log(), computedMsMax);
      expect({ slow, pauses }).toEqual({ slow: [], pauses: [] });
      expect(peakMib(gateway.pid)).toBeLessThan(RSS_MIB_MAX);
      gone.abort();
      await gateway.kill9();
    } finally {
      gone.abort();
      await upstream.stop();
    }
  },
);
