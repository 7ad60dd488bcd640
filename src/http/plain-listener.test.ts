import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { connect, type Socket } from "node:net";
import { until } from "../../test/support/until.ts";
import { silentLog } from "../core/log.ts";
import { listenPlain } from "./plain-listener.ts";

const CONNECTIONS = 16;
/** Of one address. */
const SHARE = 14;

type Port = Awaited<ReturnType<typeof listenPlain>>;

function open(limits: { readonly idleMs: number; readonly headMs: number }, log = silentLog): Promise<Port> {
  return listenPlain({
    host: "127.0.0.1",
    port: 0,
    variable: "TOLLGATE_TEST_PORT",
    log,
    limits: { connections: CONNECTIONS, bodyMs: 500, flushMs: 500, ...limits },
    answer: async (request) => new Response(`${request.method} ${new URL(request.url).pathname}`),
  });
}

interface Client {
  readonly socket: Socket;
  /** All that came, once it is closed. */
  readonly closed: Promise<string>;
  isClosed: boolean;
}

function dial({ port }: Port, text = "", localAddress = "127.0.0.1"): Client {
  const { promise: closed, resolve } = Promise.withResolvers<string>();
  const socket = connect({ port, host: "127.0.0.1", localAddress }, () => socket.write(text));
  const client = { socket, closed, isClosed: false };
  let received = "";
  socket.on("data", (bytes) => {
    received += bytes;
  });
  socket.on("error", () => {});
  socket.on("close", () => {
    client.isClosed = true;
    resolve(received);
  });
  return client;
}

const asking = (path: string, more = "") => `GET ${path} HTTP/1.1\r\nHost: x\r\n${more}\r\n`;
const LAST = "Connection: close\r\n";

describe("a port that is quick to close", () => {
  let port: Port;
  beforeAll(async () => {
    port = await open({ idleMs: 500, headMs: 500 });
  });
  afterAll(() => port.stop());

  test("answers one request after another on a connection", async () => {
    const received = await dial(port, asking("/a") + asking("/b", LAST)).closed;
    expect(received.match(/GET \/./g)).toEqual(["GET /a", "GET /b"]);
  });

  test.each([
    ["silent", ""],
    ["in the middle of its head", "GET / HTTP/1.1\r\nHost: x\r\n"],
    ["in the middle of its body", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx"],
    ["silent after its answer", asking("/")],
  ])("closes one that is %s", async (_, text) => {
    await dial(port, text).closed;
  });

  test("takes no head of more than 16 KiB", async () => {
    const received = await dial(port, asking("/", `x: ${"x".repeat(40_000)}\r\n`)).closed;
    expect(received).not.toContain("HTTP/1.1 200");
  });
});

test("a port has so many connections and no more, and one address leaves some to others", async () => {
  const port = await open({ idleMs: 60_000, headMs: 60_000 });
  const flood = Array.from({ length: 40 }, () => dial(port));
  const refused = flood.length - SHARE;
  await until(() => flood.filter(({ isClosed }) => isClosed).length >= refused);
  const other = await dial(port, asking("/other", LAST), "127.0.0.2").closed;
  expect(other).toContain("GET /other");
  expect(flood.filter(({ isClosed }) => isClosed)).toHaveLength(refused);
  // What is given back can be had again.
  for (const { socket } of flood) socket.destroy();
  let again = "";
  while (!again.includes("GET /again")) again = await dial(port, asking("/again", LAST)).closed;
  await port.stop();
});

test("who asks is answered, however many connections of the same address and of others stay open", async () => {
  const port = await open({ idleMs: 60_000, headMs: 60_000 });
  const addresses = [...Array.from({ length: SHARE }, () => "127.0.0.1"), "127.0.0.2", "127.0.0.3"];
  const kept = addresses.map((address) => dial(port, asking("/kept"), address));
  await Promise.all(kept.map(({ socket }) => new Promise((resolve) => socket.once("data", resolve))));
  for (const address of ["127.0.0.1", "127.0.0.2", "127.0.0.4"]) {
    expect(await dial(port, asking("/asked", LAST), address).closed).toContain("GET /asked");
  }
  await port.stop();
});

test("requests that no route could take are answered, and none of them is an error of the program", async () => {
  const errors: unknown[] = [];
  const log = { ...silentLog, error: (event: string, fields: unknown) => errors.push([event, fields]) };
  const port = await open({ idleMs: 500, headMs: 500 }, log);
  const odd = [
    "TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET http://y/%ff?a=b HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET //@[ HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx",
    "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\nx",
  ];
  const received = await Promise.all(odd.map((text) => dial(port, text).closed));
  expect(received.filter((text) => / 5\d\d /.test(text))).toEqual([]);
  expect(errors).toEqual([]);
  await port.stop();
});

test("a request that two servers could read as two is refused", async () => {
  const port = await open({ idleMs: 500, headMs: 500 });
  const smuggled = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";
  const post = (fields: string, body: string) => `POST /first HTTP/1.1\r\nHost: x\r\n${fields}\r\n${body}`;
  const texts = [
    post(`Content-Length: 4\r\nTransfer-Encoding: chunked\r\n`, `0\r\n\r\n${smuggled}`),
    post(`Content-Length: 0\r\nContent-Length: ${smuggled.length}\r\n`, smuggled),
    post(`Transfer-Encoding: xchunked\r\n`, `0\r\n\r\n${smuggled}`),
    post(`Transfer-Encoding: identity\r\nContent-Length: 0\r\n`, smuggled),
    post(`Content-Length: +0\r\n`, smuggled),
    post(`Content-Length : 0\r\n`, smuggled),
    post(`X: a\r\n Content-Length: 0\r\n`, smuggled),
  ];
  const received = await Promise.all(texts.map((text) => dial(port, text).closed));
  expect(received.map((text) => /smuggled/.test(text))).toEqual(texts.map(() => false));
  await port.stop();
});

test("a body in thousands of chunks ends its connection, whatever is in them", async () => {
  const port = await open({ idleMs: 500, headMs: 500 });
  const post = (chunks: number) =>
    `POST /a HTTP/1.1\r\nHost: x\r\n${LAST}Transfer-Encoding: chunked\r\n\r\n${"1\r\nx\r\n".repeat(chunks)}0\r\n\r\n`;
  expect(await dial(port, post(4_000)).closed).toEndWith("POST /a");
  expect(await dial(port, post(5_000)).closed).toBe("");
  await port.stop();
});

test("a port that drains answers what it was asked, and closes what is idle", async () => {
  const port = await open({ idleMs: 60_000, headMs: 60_000 });
  const idle = dial(port, asking("/idle"));
  await new Promise((resolve) => idle.socket.once("data", resolve));
  await port.drain();
  expect(await idle.closed).toContain("GET /idle");
});
