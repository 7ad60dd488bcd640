// Calls that hang in the middle of a long answer, by the hundred, and callers that never read what is streamed to them:
// each of them holds little, all of a tenant together a bounded share, and other tenants are served.
import { expect, setDefaultTimeout, test } from "bun:test";
import { readFileSync } from "node:fs";
import net from "node:net";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { until } from "../support/until.ts";

setDefaultTimeout(120_000);

const MIB = 1024 * 1024;
const RSS_MIB_MAX = 700;
const CALLS = 600;
const AGENTS = 12;
const RPC = { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name: "x" } };

/** Answers by the path of a request: what starts an answer, as fast as it is taken, and never more. */
const STARTS: Readonly<Record<string, string>> = {
  "/whole": "content-length: 2\r\n\r\nok",
  "/http": `content-length: ${64 * MIB}\r\n\r\n`,
  "/mcp": 'content-type: text/event-stream\r\n\r\ndata: {"jsonrpc":"2.0","id":1,"result":{"t":"',
};

/** One for all calls: making 4 MiB for each of them costs more than the calls. */
const GOES_ON = Buffer.alloc(4 * MIB, "y");

async function hangingUpstream() {
  const server = net.createServer((socket) => {
    socket.on("error", () => {});
    socket.on("data", (request) => {
      const path = /^\w+ (\S+)/.exec(`${request}`)?.[1] ?? "";
      socket.write(`HTTP/1.1 200 OK\r\n${STARTS[path]}`);
      if (path !== "/whole") socket.write(GOES_ON);
    });
  });
  const { promise, resolve } = Promise.withResolvers<void>();
  server.listen(0, "127.0.0.1", resolve);
  await promise;
  const { port } = server.address() as net.AddressInfo;
  return { url: `http://127.0.0.1:${port}`, [Symbol.dispose]: () => void server.close() };
}

const rssOf = ({ pid }: Gateway) =>
  Number(/VmRSS:\s+(\d+) kB/.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1]) / 1024;

async function clientOf(gateway: Gateway, tenant: string) {
  const authorization = `Bearer ${await gateway.token({ tenant, user: "me" })}`;
  const headers = { authorization, "content-type": "application/json" };
  const post = (path: string, body: unknown, more = {}) =>
    fetch(`${gateway.url}${path}`, {
      method: "POST",
      headers: { ...headers, ...more },
      body: JSON.stringify(body),
    });
  return {
    authorization,
    post,
    async agent(upstream_url: string, protocol: "http" | "mcp" = "http"): Promise<string> {
      const transport = protocol === "mcp" ? { mcp_transport: "streamable_http" } : {};
      const agent = { name: crypto.randomUUID(), upstream_url, protocol, ...transport };
      return ((await (await post("/v1/agents", agent)).json()) as { id: string }).id;
    },
    async call(id: string): Promise<unknown> {
      const accepted = await post(`/v1/proxy/${id}`, {}, { prefer: "wait=30" });
      const poll = await fetch(`${gateway.url}${accepted.headers.get("location")}`, { headers });
      return ((await poll.json()) as { status: unknown }).status;
    },
    async running(): Promise<number> {
      const list = await fetch(`${gateway.url}/v1/invocations?status=running&limit=1`, { headers });
      return ((await list.json()) as { total: number }).total;
    },
  };
}

/** The most memory that it takes until the calls run and another tenant has been served again and again. */
async function mostWhile(gateway: Gateway, upstream: string, isUnderWay: () => Promise<boolean>): Promise<number> {
  let most = 0;
  const watch = setInterval(() => {
    most = Math.max(most, rssOf(gateway));
  }, 20);
  try {
    await until(isUnderWay);
    const other = await clientOf(gateway, "other");
    const id = await other.agent(`${upstream}/whole`);
    for (let time = 0; time < 20; time++) expect(await other.call(id)).toBe("succeeded");
    return most;
  } finally {
    clearInterval(watch);
  }
}

test.each(["http", "mcp"] as const)(
  "polled calls that hang in mid-answer (%s) stay within bounded memory",
  async (protocol) => {
    using upstream = await hangingUpstream();
    await using gateway = await startGateway();
    const client = await clientOf(gateway, "hanging");
    const agents = Array.from({ length: AGENTS }, () => client.agent(`${upstream.url}/${protocol}`, protocol));
    const ids = await Promise.all(agents);
    const calls = Array.from({ length: CALLS }, (_, i) => client.post(`/v1/proxy/${ids[i % AGENTS]}`, RPC));
    for (const accepted of await Promise.all(calls)) expect(accepted.status).toBe(202);
    const most = await mostWhile(gateway, upstream.url, async () => (await client.running()) === CALLS);
    expect(most).toBeLessThan(RSS_MIB_MAX);
    await gateway.kill9();
  },
);

test("callers that never read what is streamed to them stay within bounded memory", async () => {
  using upstream = await hangingUpstream();
  await using gateway = await startGateway();
  const client = await clientOf(gateway, "hanging");
  const ids = await Promise.all(Array.from({ length: AGENTS }, () => client.agent(`${upstream.url}/http`)));
  const { port } = new URL(gateway.url);
  const callers = Array.from({ length: CALLS }, (_, i) => {
    const socket = net.connect({ port: Number(port), host: "127.0.0.1" });
    socket.on("error", () => {});
    socket.pause();
    socket.write(
      `POST /v1/proxy/${ids[i % AGENTS]}/stream HTTP/1.1\r\nHost: x\r\nAuthorization: ${client.authorization}\r\nContent-Length: 2\r\n\r\n{}`,
    );
    return socket;
  });
  const most = await mostWhile(gateway, upstream.url, async () => (await client.running()) === CALLS);
  expect(most).toBeLessThan(RSS_MIB_MAX);
  for (const caller of callers) caller.destroy();
  await gateway.kill9();
});
