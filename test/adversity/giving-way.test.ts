// Two tenants hold all that they may of the memory for bodies that come in and for decoders, and hold on to it. A third
// one that needs much of both has it soon: what is theirs shrinks when others come.
import { expect, test } from "bun:test";
import { once } from "node:events";
import { Agent, type IncomingMessage, request } from "node:http";
import net from "node:net";
import { createZstdCompress } from "node:zlib";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";

const MIB = 1024 * 1024;
/** On a busy machine too. Nobody lets go of what they hold for 30 s. */
const CALL_MS_MAX = 25_000;
const TEXT = "tollgate ".repeat(1000);

/** Of unknown length, so that its window is 8 MiB. */
async function windowed(): Promise<Uint8Array> {
  const encoder = createZstdCompress({ params: { 101: 23 } });
  encoder.write(TEXT);
  encoder.end();
  return Buffer.concat(await encoder.toArray());
}

/** Answers in windows of 8 MiB, which stay open where the path says so. */
function startWindows(answer: Uint8Array): Upstream {
  return startUpstream(async (asked) => {
    const isOpen = new URL(asked.url).pathname === "/open";
    await asked.bytes();
    const body = new ReadableStream<Uint8Array>({
      start(controller) {
        controller.enqueue(answer);
        if (!isOpen) controller.close();
      },
    });
    return new Response(body, { headers: { "content-encoding": "zstd" } });
  });
}

async function tenantOf(gateway: Gateway, tenant: string) {
  const authorization = `Bearer ${await gateway.token({ tenant, user: "u" })}`;
  const headers = { authorization, "content-type": "application/json" };
  const agent = new Agent({ maxSockets: Number.POSITIVE_INFINITY });
  return {
    headers,
    /** Without the bound on requests at once that `fetch` has. */
    begin(path: string) {
      const { promise, resolve, reject } = Promise.withResolvers<IncomingMessage>();
      const begun = request(`${gateway.url}${path}`, { method: "POST", agent, headers }, resolve);
      // The end of the gateway ends it too.
      begun.on("error", reject);
      promise.catch(() => {});
      return { begun, answered: promise };
    },
    async register(upstream_url: string): Promise<string> {
      const body = JSON.stringify({ name: crypto.randomUUID(), upstream_url });
      const response = await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers, body });
      expect(response.status).toBe(201);
      return ((await response.json()) as { id: string }).id;
    },
  };
}

type Tenant = Awaited<ReturnType<typeof tenantOf>>;

/** Bodies that stop before their ends, until one more is refused. */
async function hoardIntake({ begin, register }: Tenant): Promise<void> {
  const id = await register("http://127.0.0.1:1/");
  const refusals = Array.from({ length: 40 }, () => {
    const { begun, answered } = begin(`/v1/proxy/${id}`);
    begun.write(new Uint8Array(8 * MIB));
    return answered.then((answer) => answer.statusCode);
  });
  expect(await Promise.any(refusals)).toBe(503);
}

/** Answers that do not end, on both paths: more of them than there is memory for. */
async function hoardDecoders({ begin, register }: Tenant, upstream: Upstream): Promise<void> {
  const id = await register(`${upstream.url}open`);
  const calls = (path: string, count: number) =>
    Array.from({ length: count }, () => {
      const { begun, answered } = begin(path);
      begun.end("{}");
      return answered;
    });
  await Promise.any(calls(`/v1/proxy/${id}/stream`, 10));
  for (const { statusCode } of await Promise.all(calls(`/v1/proxy/${id}`, 20))) expect(statusCode).toBe(202);
}

/** Accepts connections, and reads nothing of what they bring. */
async function startDeaf() {
  const server = net.createServer({ pauseOnConnect: true });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const address = server.address();
  if (address === null || typeof address === "string") throw new Error("no port");
  return { url: `http://127.0.0.1:${address.port}/`, stop: () => server.close() };
}

/** Streamed calls whose bodies have come and are not taken by their upstream, until one more is refused. */
async function hoardStreams({ begin, register }: Tenant, url: string): Promise<void> {
  const id = await register(url);
  const refusals = Array.from({ length: 12 }, () => {
    const { begun, answered } = begin(`/v1/proxy/${id}/stream`);
    begun.end(new Uint8Array(30 * MIB));
    return answered.then((answer) => answer.statusCode);
  });
  expect(await Promise.any(refusals)).toBe(503);
}

/** Thousands of connections that have sent one byte of a small body; resolves when all have. */
async function hoardSmall(gateway: Gateway, { headers, register }: Tenant, count: number) {
  const id = await register("http://127.0.0.1:1/");
  const port = Number(new URL(gateway.url).port);
  const fields = ["host: x", `authorization: ${headers.authorization}`, "content-length: 4200"];
  const head = `POST /v1/proxy/${id} HTTP/1.1\r\n${fields.join("\r\n")}\r\n\r\nx`;
  const sockets: net.Socket[] = [];
  for (let at = 0; at < count; at++) {
    const socket = net.connect(port, "127.0.0.1");
    socket.on("error", () => {}).resume();
    await once(socket, "connect");
    socket.write(head);
    sockets.push(socket);
  }
  return {
    end() {
      for (const socket of sockets) socket.destroy();
    },
  };
}

async function within<T>(work: () => Promise<T>): Promise<T> {
  const began = performance.now();
  const result = await work();
  expect(performance.now() - began).toBeLessThan(CALL_MS_MAX);
  return result;
}

test("a tenant has room for large bodies and for decoders soon, whatever two others hold of it", async () => {
  const upstream = startWindows(await windowed());
  try {
    await using gateway = await startGateway({ env: { TOLLGATE_UPSTREAM_TIMEOUT_MS: "120000" } });
    const honest = await tenantOf(gateway, "honest");
    const { headers } = honest;
    const id = await honest.register(`${upstream.url}done`);
    for (const name of ["hoard-1", "hoard-2"]) {
      const hoarder = await tenantOf(gateway, name);
      await hoardDecoders(hoarder, upstream);
      await hoardIntake(hoarder);
    }
    const url = `${gateway.url}/v1/proxy/${id}`;
    const large = await within(() => fetch(url, { method: "POST", headers, body: new Uint8Array(30 * MIB) }));
    expect([large.status, await large.text()]).toEqual([202, expect.stringContaining("invocation_id")]);
    await within(async () => {
      const accepted = await fetch(url, { method: "POST", headers, body: "{}" });
      const poll = `${gateway.url}${accepted.headers.get("location")}`;
      const ended = await fetch(poll, { headers: { ...headers, prefer: "wait=30" } });
      expect(await ended.json()).toMatchObject({ status: "succeeded" });
    });
    const streams = Array.from({ length: 3 }, () =>
      within(async () => {
        const streamed = await fetch(`${url}/stream`, { method: "POST", headers, body: "{}" });
        expect([streamed.status, await streamed.text()]).toEqual([200, TEXT]);
      }),
    );
    await Promise.all(streams);
    await gateway.kill9();
  } finally {
    await upstream.stop();
  }
});

test("a tenant's large body comes in soon, whatever two others hold that their upstreams do not take", async () => {
  const deaf = await startDeaf();
  try {
    await using gateway = await startGateway({ env: { TOLLGATE_UPSTREAM_TIMEOUT_MS: "120000" } });
    const honest = await tenantOf(gateway, "honest");
    const id = await honest.register("http://127.0.0.1:1/");
    for (const name of ["hoard-1", "hoard-2"]) await hoardStreams(await tenantOf(gateway, name), deaf.url);
    const large = await within(() =>
      fetch(`${gateway.url}/v1/proxy/${id}`, {
        method: "POST",
        headers: honest.headers,
        body: new Uint8Array(30 * MIB),
      }),
    );
    expect([large.status, await large.text()]).toEqual([202, expect.stringContaining("invocation_id")]);
    await gateway.kill9();
  } finally {
    deaf.stop();
  }
});

test("thousands of small bodies that give way for large ones of another tenant end one after the other", async () => {
  await using gateway = await startGateway();
  const hoarder = await tenantOf(gateway, "hoard");
  const small = await hoardSmall(gateway, hoarder, 4000);
  try {
    await hoardIntake(hoarder);
    const { headers, register } = await tenantOf(gateway, "honest");
    const url = `${gateway.url}/v1/proxy/${await register("http://127.0.0.1:1/")}`;
    /** On a busy machine it may be refused for having waited, and comes again as it is told. */
    const send = async (): Promise<Response> => {
      const answer = await fetch(url, { method: "POST", headers, body: new Uint8Array(30 * MIB) });
      if (answer.status !== 503) return answer;
      await Bun.sleep(1000 * Number(answer.headers.get("retry-after")));
      return send();
    };
    const answers = await within(() => Promise.all([send(), send(), send()]));
    expect(answers.map(({ status }) => status)).toEqual([202, 202, 202]);
    await Promise.all(answers.map((answer) => answer.text()));
    expect((await fetch(`${gateway.url}/healthz`)).status).toBe(200);
    await gateway.kill9();
  } finally {
    small.end();
  }
});
