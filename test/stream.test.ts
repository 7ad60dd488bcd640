// The streaming path at its limits: a slow reader, thousands of calls that break at every stage, a gateway that stops
// or is killed under them.
import { expect, setDefaultTimeout, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { connect } from "node:net";
import { eachDatabase, type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { type RawConnection, startRawUpstream, startUpstream, type Upstream } from "./support/http/upstream.ts";
import { until } from "./support/until.ts";

setDefaultTimeout(120_000);

const ALICE = { tenant: "acme", user: "alice" };
const MIB = 1024 * 1024;

interface Row {
  readonly id: string;
  readonly status: string;
  readonly error_class: string | null;
  readonly upstream_status: number | null;
  readonly resp_size: number | null;
}

async function clientOf(gateway: Gateway) {
  const authorization = `Bearer ${await gateway.token(ALICE)}`;
  const headers = { authorization, "content-type": "application/json" };
  const get = async (path: string) => (await fetch(`${gateway.url}${path}`, { headers })).json();
  return {
    authorization,
    async agent(upstream_url: string, fields: object = {}): Promise<string> {
      const body = JSON.stringify({ name: crypto.randomUUID(), upstream_url, ...fields });
      const response = await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers, body });
      return ((await response.json()) as { id: string }).id;
    },
    stream: (id: string, signal?: AbortSignal) =>
      fetch(`${gateway.url}/v1/proxy/${id}/stream`, {
        method: "POST",
        headers,
        body: "{}",
        ...(signal !== undefined && { signal }),
      }),
    rows: async (query = "") => (await get(`/v1/invocations${query}`)) as { data: Row[]; total: number },
  };
}

type Client = Awaited<ReturnType<typeof clientOf>>;

async function untilTotal(client: Client, query: string, total: number): Promise<void> {
  await until(async () => (await client.rows(query)).total === total);
}

const rssOf = ({ pid }: Gateway) =>
  Number(/VmRSS:\s+(\d+) kB/.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1]) * 1024;
const socketsOf = ({ pid }: Gateway) => readdirSync(`/proc/${pid}/fd`).length;

/** Sends pieces of a chunked body for as long as they are taken. */
function endless(piece: Buffer, pieces: number): Upstream {
  const head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
  const chunk = Buffer.concat([Buffer.from(`${piece.length.toString(16)}\r\n`), piece, Buffer.from("\r\n")]);
  const server = Bun.listen<{ left: number; rest: Buffer }>({
    hostname: "127.0.0.1",
    port: 0,
    socket: {
      open(socket) {
        socket.data = { left: pieces, rest: Buffer.from(head) };
      },
      data: flush,
      drain: flush,
      error() {},
    },
  });
  function flush(socket: Bun.Socket<{ left: number; rest: Buffer }>): void {
    const state = socket.data;
    for (;;) {
      const written = socket.write(state.rest);
      if (written < state.rest.length) {
        state.rest = state.rest.subarray(Math.max(written, 0));
        return;
      }
      if (state.left === 0) return;
      state.left--;
      state.rest = state.left === 0 ? Buffer.from("0\r\n\r\n") : chunk;
    }
  }
  const { port } = server;
  return { url: `http://127.0.0.1:${port}/`, port, stop: async () => server.stop(true) };
}

/** Three times what memory may grow by. */
const PIECES = 6_144;

test("a slow reader of 384 MiB keeps memory flat", async () => {
  await using gateway = await startGateway();
  const upstream = endless(Buffer.alloc(65_536, "x"), PIECES + 1);
  const client = await clientOf(gateway);
  const id = await client.agent(upstream.url);
  // Warm, so that what is measured is the stream.
  await (await client.stream(await client.agent(endless(Buffer.alloc(65_536), 500).url))).bytes();
  const before = rssOf(gateway);
  const socket = connect(Number(new URL(gateway.url).port), "127.0.0.1");
  socket.setEncoding("latin1");
  socket.write(
    `POST /v1/proxy/${id}/stream HTTP/1.1\r\nHost: x\r\nAuthorization: ${client.authorization}\r\nContent-Length: 2\r\n\r\n{}`,
  );
  let received = 0;
  let most = 0;
  const done = Promise.withResolvers<void>();
  socket.on("data", (bytes) => {
    received += bytes.length;
    if (String(bytes).endsWith("0\r\n\r\n")) done.resolve();
  });
  socket.on("close", () => done.resolve());
  // It stops reading again and again, once for long.
  const pauses = setInterval(() => {
    most = Math.max(most, rssOf(gateway));
    socket.pause();
    setTimeout(() => socket.resume(), received < 100 * MIB ? 200 : 20);
  }, 100);
  await done.promise;
  clearInterval(pauses);
  socket.destroy();
  expect(received).toBeGreaterThan(PIECES * 65_536);
  expect((most - before) / MIB).toBeLessThan(128);
  await untilTotal(client, "?status=succeeded", 2);
  expect((await client.rows()).data[0]).toMatchObject({ resp_size: PIECES * 65_536 });
  await upstream.stop();
});

const HEAD = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";

/** What goes wrong, and how the caller goes about it: `leaves` in the middle, or stays until the end. */
const STAGES: readonly { upstream: (peer: RawConnection) => void; leaves: boolean; error_class: string }[] = [
  { upstream: () => {}, leaves: true, error_class: "cancelled" },
  { upstream: (peer) => peer.write("HTTP/1.1 200 OK\r\nA: b\r\n"), leaves: true, error_class: "cancelled" },
  { upstream: (peer) => peer.write(HEAD), leaves: true, error_class: "cancelled" },
  { upstream: (peer) => peer.write(HEAD), leaves: false, error_class: "timeout" },
  { upstream: () => {}, leaves: false, error_class: "timeout" },
  { upstream: (peer) => peer.reset(), leaves: false, error_class: "upstream_5xx" },
  { upstream: (peer) => [peer.write(HEAD), peer.reset()], leaves: false, error_class: "upstream_5xx" },
  {
    upstream: (peer) => [peer.write(`${HEAD}ff\r\nhalf`), peer.end()],
    leaves: false,
    error_class: "upstream_5xx",
  },
  {
    upstream: (peer) => peer.write(`HTTP/1.1 200 OK\r\n${"X-Endless: and so on\r\n".repeat(50_000)}`),
    leaves: false,
    error_class: "upstream_5xx",
  },
];
const CALLS = 3_000;
const AT_ONCE = 100;

test("three thousand calls that break at every stage leave neither sockets nor memory behind", async () => {
  await using gateway = await startGateway({
    // Long enough that on a busy machine a call whose upstream breaks off does not reach it first.
    env: { TOLLGATE_UPSTREAM_TIMEOUT_MS: "2000", TOLLGATE_AGENT_CONCURRENCY: "1000" },
  });
  const client = await clientOf(gateway);
  const upstreams = STAGES.map(({ upstream }) => startRawUpstream(upstream));
  const agents = await Promise.all(upstreams.map(({ url }) => client.agent(url)));
  const one = async (index: number) => {
    const stage = index % STAGES.length;
    const signal = STAGES[stage]?.leaves ? AbortSignal.timeout(50 + (index % 50)) : undefined;
    const response = await client.stream(agents[stage] ?? "", signal).catch(() => null);
    await response?.bytes().catch(() => {});
  };
  const round = async (calls: number) => {
    let next = 0;
    const worker = async () => {
      while (next < calls) await one(next++);
    };
    await Promise.all(Array.from({ length: AT_ONCE }, worker));
  };
  await round(500);
  await untilTotal(client, "?status=running", 0);
  const [sockets, memory] = [socketsOf(gateway), rssOf(gateway)];
  await round(CALLS);
  await untilTotal(client, "?status=running", 0);
  expect((await client.rows()).total).toBeGreaterThanOrEqual((500 + CALLS) * 0.9);
  expect((await client.rows("?status=succeeded")).total).toBe(0);
  for (const [index, { error_class }] of STAGES.entries()) {
    const all = (await client.rows(`?agent_id=${agents[index]}`)).total;
    const right = (await client.rows(`?agent_id=${agents[index]}&error_class=${error_class}`)).total;
    // A machine that stands still for two seconds lets the hundred calls that are under way time out.
    expect(right, `stage ${index}: ${error_class}`).toBeGreaterThan(0.85 * all);
  }
  // Connections to callers that are idle may still be open.
  expect(socketsOf(gateway) - sockets).toBeLessThan(AT_ONCE);
  // What is not collected yet will be.
  await until(() => (rssOf(gateway) - memory) / MIB < 80);
  for (const upstream of upstreams) await upstream.stop();
});

/** An answer that goes on until the test ends it. */
function pending() {
  const arrived = Promise.withResolvers<void>();
  const pieces = new TransformStream<Uint8Array, Uint8Array>();
  const writer = pieces.writable.getWriter();
  const server = startUpstream(() => {
    arrived.resolve();
    void writer.write(new TextEncoder().encode("hello")).catch(() => {});
    return new Response(pieces.readable);
  });
  const end = () => void writer.close().catch(() => {});
  return { ...server, arrived: arrived.promise, end };
}

// Side by side, for on Postgres the end of a dead replica is known only when its lease has run out.
eachDatabase((database) => {
  test.concurrent("a stop lets a stream end, and takes no new one", async () => {
    await using gateway = await startGateway({ database });
    const client = await clientOf(gateway);
    const upstream = pending();
    const response = await client.stream(await client.agent(upstream.url));
    await upstream.arrived;
    const stopped = gateway.stop();
    await Bun.sleep(300);
    upstream.end();
    expect(await response.text()).toBe("hello");
    await stopped;
    await gateway.restart();
    expect((await client.rows()).data).toMatchObject([{ status: "succeeded", resp_size: 5 }]);
    await upstream.stop();
  });

  test.concurrent("a stop that can't wait breaks a stream off, which ends as internal", async () => {
    await using gateway = await startGateway({ database, env: { TOLLGATE_DRAIN_MS: "300" } });
    const client = await clientOf(gateway);
    const upstream = pending();
    const response = await client.stream(await client.agent(upstream.url));
    await upstream.arrived;
    const read = response.text().then(
      () => "whole",
      () => "broken",
    );
    await gateway.stop();
    expect(await read).toBe("broken");
    await gateway.restart();
    expect((await client.rows()).data).toMatchObject([
      { status: "failed", error_class: "internal", upstream_status: 200 },
    ]);
    await upstream.stop();
  });

  test.concurrent("a kill ends a stream as internal, and its call is never made again", async () => {
    await using gateway = await startGateway({ database });
    const client = await clientOf(gateway);
    const upstream = pending();
    const response = await client.stream(await client.agent(upstream.url));
    await upstream.arrived;
    const read = response.text().then(
      () => "whole",
      () => "broken",
    );
    await gateway.kill9();
    expect(await read).toBe("broken");
    await gateway.restart();
    await untilTotal(client, "?error_class=internal", 1);
    expect((await client.rows()).data).toMatchObject([{ status: "failed" }]);
    await upstream.stop();
  });
});

test("a streamed call to an address that is not allowed is not dialled: 502, ssrf_blocked", async () => {
  await using gateway = await startGateway();
  const client = await clientOf(gateway);
  const id = await client.agent("http://127.0.0.1:9/");
  await gateway.stop();
  await gateway.restart({ TOLLGATE_ALLOW_HOSTS: "" });
  expect((await client.stream(id)).status).toBe(502);
  expect((await client.rows()).data).toMatchObject([{ error_class: "ssrf_blocked", upstream_status: null }]);
});

test("equal calls that come together leave no place taken when they are over", async () => {
  const upstream = startUpstream(() => new Response("answer"));
  try {
    await using gateway = await startGateway({ env: { TOLLGATE_AGENT_CONCURRENCY: "4" } });
    const client = await clientOf(gateway);
    const id = await client.agent(upstream.url);
    const headers = { authorization: client.authorization };
    const call = (key: number) =>
      fetch(`${gateway.url}/v1/proxy/${id}/stream`, {
        method: "POST",
        headers: { ...headers, "idempotency-key": `key-${key}` },
      });
    for (let round = 0; round < 10; round++) {
      const answers = await Promise.all(Array.from({ length: 4 }, () => call(round)));
      await Promise.all(answers.map((answer) => answer.text()));
      expect(answers.filter(({ status }) => status === 200)).toHaveLength(1);
      expect(answers.filter(({ status }) => status === 409)).toHaveLength(3);
    }
    expect((await client.stream(id)).status).toBe(200);
  } finally {
    await upstream.stop();
  }
});
