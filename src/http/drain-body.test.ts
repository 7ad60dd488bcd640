import { afterEach, describe, expect, test } from "bun:test";
import { once } from "node:events";
import { connect, type Socket } from "node:net";
import { Fault } from "../core/fault.ts";
import { silentLog } from "../core/log.ts";
import { routes } from "./elysia.ts";
import { createBodyDrainer, type DrainLimits } from "./intake.ts";
import { empty } from "./responses.ts";
import { createEdge, type Edge, scopeOf } from "./server.ts";

const MIB = 1024 * 1024;
const SIZE = 32 * MIB;

const servers: Bun.Server<undefined>[] = [];
afterEach(() => Promise.all(servers.splice(0).map((server) => server.stop(true))));

function serve(fetch: (request: Request) => Promise<Response>): number {
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    maxRequestBodySize: Number.MAX_SAFE_INTEGER,
    fetch,
  });
  servers.push(server);
  return Number(server.port);
}

interface Sending {
  readonly path?: string;
  readonly method?: string;
  /** Null: in chunks. */
  readonly length?: number | null;
  readonly size?: number;
  readonly token?: string;
  readonly connection?: string;
}

/** A client that reads nothing before it has written all, as some libraries do; what it reads then, to the end. */
async function writeFirst(port: number, sending: Sending = {}): Promise<string> {
  const { path = "/v1/x", method = "POST", size = SIZE, length = size } = sending;
  const { token = "bad", connection = "close" } = sending;
  const socket = connect(port, "127.0.0.1");
  socket.pause();
  const written = writeAll(socket, [
    `${method} ${path} HTTP/1.1\r\nHost: edge.test\r\nConnection: ${connection}\r\nAuthorization: ${token}\r\n`,
    length === null ? "Transfer-Encoding: chunked\r\n\r\n" : `Content-Length: ${length}\r\n\r\n`,
    ...pieces(size, length === null),
  ]);
  await written;
  let text = "";
  socket.on("data", (bytes) => {
    text += bytes.toString("latin1");
    if (connection !== "close" && text.includes("\r\n\r\n")) socket.end();
  });
  socket.resume();
  if (!socket.closed) await once(socket, "close").catch(() => {});
  return text;
}

function* pieces(size: number, inChunks: boolean): Generator<string | Uint8Array> {
  const piece = new Uint8Array(MIB).fill(65);
  for (let left = size; left > 0; left -= MIB) {
    const next = piece.subarray(0, Math.min(left, MIB));
    if (inChunks) yield `${next.length.toString(16)}\r\n`;
    yield next;
    if (inChunks) yield "\r\n";
  }
  if (inChunks) yield "0\r\n\r\n";
}

/** @throws when the other end takes no more */
async function writeAll(socket: Socket, parts: Iterable<string | Uint8Array>): Promise<void> {
  for (const part of parts) {
    await new Promise<void>((resolve, reject) => {
      socket.once("error", reject);
      socket.write(part, (error) => {
        socket.off("error", reject);
        if (error) reject(error);
        else resolve();
      });
    });
  }
}

describe("a client that writes its whole body first", () => {
  const app = routes()
    .post(
      "/v1/taken",
      async ({ request }) => {
        const { caller, intake } = scopeOf(request);
        await intake.readBytes(request, caller.tenant, MIB);
        return empty();
      },
      { parse: "none" },
    )
    .delete("/v1/unread", () => empty(), { parse: "none" });

  function edgeOf(): Edge {
    return createEdge({
      app,
      log: silentLog,
      authenticate(header) {
        if (header !== "good") throw new Fault("unauthenticated", "no");
        return { tenant: "t", user: "u", scopes: new Set() };
      },
    });
  }

  test.each<[string, number, Sending]>([
    ["an unknown token", 401, {}],
    ["an unknown token, in chunks", 401, { length: null }],
    ["an unknown route", 404, { token: "good" }],
    ["another method", 405, { token: "good", path: "/v1/taken", method: "PUT" }],
    ["a length beyond the limit", 413, { token: "good", path: "/v1/taken" }],
    ["chunks beyond the limit", 413, { token: "good", path: "/v1/taken", length: null }],
    ["a body that nobody wants", 204, { token: "good", path: "/v1/unread", method: "DELETE" }],
    ["an unknown token, on a connection that stays", 401, { connection: "keep-alive" }],
    [
      "chunks beyond the limit, on a connection that stays",
      413,
      {
        token: "good",
        path: "/v1/taken",
        length: null,
        connection: "keep-alive",
      },
    ],
  ])("is told of a refusal for %s: %d", async (_why, status, sending) => {
    const edge = edgeOf();
    const port = serve((request) => edge.fetch(request));
    expect(await writeFirst(port, sending)).toStartWith(`HTTP/1.1 ${status} `);
  });

  test.each([SIZE, null])("is told of the end of the process with 503, though answers close then", async (length) => {
    const edge = edgeOf();
    edge.drain();
    const port = serve((request) => edge.fetch(request));
    expect(await writeFirst(port, { length, connection: "keep-alive" })).toStartWith("HTTP/1.1 503 ");
  });
});

describe("draining the rest of a request's body", () => {
  const LIMITS: DrainLimits = {
    bytesMax: 4 * MIB,
    msMax: 20_000,
    silenceMsMax: 10_000,
    countMax: 3,
  };

  /** A request of which `sent` bytes come, and the rest does not. */
  function halfSent(sent: number, headers: Record<string, string> = {}) {
    const pipe = new TransformStream<Uint8Array<ArrayBuffer>, Uint8Array<ArrayBuffer>>();
    const writer = pipe.writable.getWriter();
    writer.write(new Uint8Array(sent)).catch(() => {});
    const request = new Request("http://edge.test/", {
      method: "POST",
      body: pipe.readable,
      headers: { connection: "close", ...headers },
    });
    return { request, writer };
  }

  const answer = () => new Response(null, { status: 401 });
  const isOver = (work: Promise<unknown> | undefined) =>
    Promise.race([
      Promise.resolve(work).then(() => true),
      new Promise<false>((resolve) => setImmediate(resolve, false)),
    ]);

  test("ends with the body", async () => {
    const { request, writer } = halfSent(10);
    const drained = createBodyDrainer(LIMITS)(request, answer(), "");
    expect(await isOver(drained)).toBe(false);
    await writer.close();
    await drained;
  });

  test("begins where somebody else gave up reading", async () => {
    const { request, writer } = halfSent(10);
    const reader = request.body!.getReader();
    await reader.read();
    reader.releaseLock();
    const drained = createBodyDrainer(LIMITS)(request, answer(), "");
    await writer.write(new Uint8Array(10));
    await writer.close();
    await drained;
  });

  test("leaves a body that is being read alone, one that was read, and one that is too long", async () => {
    const drainBody = createBodyDrainer(LIMITS);
    const held = halfSent(10).request;
    const reader = held.body!.getReader();
    await drainBody(held, answer(), "");
    expect((await reader.read()).value?.length).toBe(10);
    const read = new Request("http://edge.test/", {
      method: "POST",
      body: "x",
      headers: { connection: "close" },
    });
    await read.bytes();
    await drainBody(read, answer(), "");
    await drainBody(halfSent(10, { "content-length": String(LIMITS.bytesMax + 1) }).request, answer(), "");
  });

  test("is the server's where the connection stays open, unless the answer closes it", async () => {
    const drainBody = createBodyDrainer(LIMITS);
    await drainBody(halfSent(10, { connection: "keep-alive" }).request, answer(), "");
    const { request, writer } = halfSent(10, { connection: "keep-alive" });
    const drained = drainBody(request, new Response(null, { headers: { connection: "close" } }), "");
    expect(await isOver(drained)).toBe(false);
    await writer.close();
    await drained;
  });

  test("ends when the client goes", async () => {
    const { request, writer } = halfSent(10);
    const drained = createBodyDrainer(LIMITS)(request, answer(), "");
    await writer.abort(new Error("gone"));
    await drained;
  });

  test.each<[string, Partial<DrainLimits>]>([
    ["bytes", { bytesMax: 100 }],
    ["time", { msMax: 50 }],
    ["silence", { silenceMsMax: 50 }],
  ])("is bounded in %s", async (_what, limits) => {
    const { request, writer } = halfSent(101);
    await createBodyDrainer({ ...LIMITS, ...limits })(request, answer(), "");
    expect(
      await writer.write(new Uint8Array(1)).then(
        () => "taken",
        () => "refused",
      ),
    ).toBe("refused");
  });

  test("is bounded in how many at a time, of one caller and in all", async () => {
    const drainBody = createBodyDrainer(LIMITS);
    const begin = (caller: string) => {
      const { request, writer } = halfSent(10);
      return { drained: drainBody(request, answer(), caller), writer };
    };
    const strangers = [begin(""), begin("")];
    expect(await isOver(begin("").drained)).toBe(true);
    const known = begin("t");
    expect(await isOver(known.drained)).toBe(false);
    expect(await isOver(begin("u").drained)).toBe(true);
    await strangers[0]!.writer.close();
    await strangers[0]!.drained;
    const next = begin("u");
    expect(await isOver(next.drained)).toBe(false);
    for (const { writer, drained } of [strangers[1]!, known, next]) {
      await writer.close();
      await drained;
    }
  });
});
