import { describe, expect, test } from "bun:test";
import { connect } from "node:net";
import { bodyChunks } from "../../http/client/body.ts";
import { type Ended, relayBody, startExchangeTimeouts } from "./exchange.ts";

const chunksOf = (response: Response) => bodyChunks(response, { maxBytes: Number.MAX_SAFE_INTEGER });
const LIMITS = { headMs: 1000, silenceMs: 1000, callerMs: 1000 };

/** Read as a server does: a piece is given back when the next one is asked for. */
async function textOf(body: ReadableStream<Uint8Array>): Promise<string> {
  let text = "";
  for await (const piece of body) text += Buffer.from(piece).toString();
  return text;
}

test("a whole answer ends whole, though it is stopped while its end is being recorded", async () => {
  const timeouts = startExchangeTimeouts(LIMITS, new AbortController().signal, "acme");
  const told: Ended[] = [];
  const body = relayBody({
    chunks: chunksOf(new Response("abc")),
    timeouts,
    filter: null,
    comments: null,
    piece() {},
    async ended(how) {
      told.push(how);
      timeouts.stop("shutdown");
      return true;
    },
  });
  expect([await textOf(body), told]).toEqual(["abc", ["whole"]]);
});

/** A server whose answer relays `pieces` and then breaks off at once, and all that a client on the socket gets of it. */
async function receivedOf(
  pieces: readonly Uint8Array[],
  comments: Parameters<typeof relayBody>[0]["comments"] = null,
): Promise<{ text: string; how: Ended[] }> {
  const how: Ended[] = [];
  using server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    development: false,
    error: () => new Response(null, { status: 500 }),
    fetch(request) {
      let next = 0;
      const upstream = new ReadableStream<Uint8Array>(
        {
          pull(controller) {
            const piece = pieces[next++];
            if (piece === undefined) controller.error(new Error("gone"));
            else controller.enqueue(piece);
          },
        },
        { highWaterMark: 0 },
      );
      const body = relayBody({
        chunks: chunksOf(new Response(upstream)),
        timeouts: startExchangeTimeouts(LIMITS, request.signal, "acme"),
        filter: null,
        comments,
        piece() {},
        async ended(end) {
          how.push(end);
          return true;
        },
      });
      return new Response(body, { headers: { "x-told": "yes" } });
    },
  });
  let text = "";
  const { promise: closed, resolve } = Promise.withResolvers<void>();
  const socket = connect(Number(server.port), "127.0.0.1");
  socket.on("data", (bytes) => {
    text += bytes.toString("latin1");
  });
  socket.on("error", () => {});
  socket.on("close", () => resolve());
  socket.write("GET / HTTP/1.1\r\nHost: relay.test\r\n\r\n");
  await closed;
  return { text, how };
}

describe("an answer that breaks off in the moment in which its parts come", () => {
  test.each([
    ["one small part", 1, 5],
    ["several small parts", 7, 100],
    ["large parts", 20, 262_144],
  ])("reaches its caller with its head and %s, and never ends cleanly", async (_name, count, size) => {
    const { text, how } = await receivedOf(Array.from({ length: count }, () => new Uint8Array(size).fill(120)));
    expect(text).toMatch(/^HTTP\/1\.1 200 OK\r\n(.+\r\n)*x-told: yes\r\n/i);
    expect(text.split("x".repeat(size)).length - 1).toBe(count);
    expect(text).not.toContain("\r\n0\r\n");
    expect(how).toEqual(["broken"]);
  });

  test("reaches its caller with its head when there is no part", async () => {
    const { text } = await receivedOf([]);
    expect(text).toMatch(/^HTTP\/1\.1 200 OK\r\n(.+\r\n)*x-told: yes\r\n/i);
    expect(text).not.toContain("\r\n0\r\n");
  });

  test("reaches its caller with its whole head when it is an event stream", async () => {
    const { text } = await receivedOf([], { firstMs: 1000, nextMs: null });
    expect(text).toContain("x-told: yes\r\n");
    expect(text).toEndWith("\r\n\r\n3\r\n:\n\n\r\n");
  });
});

test("pieces whose memory is given back when the next one is asked for reach a slow reader as they were", async () => {
  const pieces = Array.from({ length: 60 }, (_, at) =>
    crypto.getRandomValues(new Uint8Array(1 + ((at * 7919) % 65_536))),
  );
  const sent = Buffer.concat(pieces);
  async function* chunks() {
    yield* pieces;
  }
  using server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) =>
      new Response(
        relayBody({
          chunks: chunks(),
          timeouts: startExchangeTimeouts(LIMITS, request.signal, "acme"),
          filter: null,
          comments: null,
          piece() {},
          ended: async () => true,
        }),
      ),
  });
  const reader = (await fetch(server.url)).body?.getReader();
  const parts: Uint8Array[] = [];
  for (;;) {
    const { value } = (await reader?.read()) ?? {};
    if (value === undefined) break;
    parts.push(value);
    for (let turn = 0; turn < 5; turn++) await new Promise(setImmediate);
  }
  expect(Buffer.compare(Buffer.concat(parts), sent)).toBe(0);
  expect(pieces.every(({ byteLength }) => byteLength === 0)).toBe(true);
});

test("a comment stands between two lines, and never within one", async () => {
  async function* chunks() {
    for (const piece of ["data: 1\n", "data: ", "2\n\n"]) {
      yield new TextEncoder().encode(piece);
      await Bun.sleep(30);
    }
  }
  const body = relayBody({
    chunks: chunks(),
    timeouts: startExchangeTimeouts(LIMITS, new AbortController().signal, "acme"),
    filter: null,
    comments: { firstMs: 1000, nextMs: 10 },
    piece() {},
    ended: async () => true,
  });
  expect((await textOf(body)).replaceAll(/(:\n)+/g, ":\n")).toBe("data: 1\n:\ndata: 2\n\n:\n");
});

/** What a caller gets of an event stream that begins with silence, with the opening comment after `firstMs` of it. */
async function relayed(firstMs: number, pieces: readonly string[]) {
  const sent = pieces.map((piece) => Uint8Array.from(Buffer.from(piece, "latin1")));
  async function* chunks() {
    await Bun.sleep(50);
    yield* sent;
  }
  const recorded: string[] = [];
  const body = relayBody({
    chunks: chunks(),
    timeouts: startExchangeTimeouts(LIMITS, new AbortController().signal, "acme"),
    filter: null,
    comments: { firstMs, nextMs: null },
    piece: (bytes) => void recorded.push(Buffer.from(bytes).toString("latin1")),
    ended: async () => true,
  });
  let text = "";
  for await (const piece of body) {
    expect(piece.length).toBeGreaterThan(0);
    text += Buffer.from(piece).toString("latin1");
  }
  expect(recorded).toEqual([...pieces]);
  expect(sent.every(({ byteLength }) => byteLength === 0)).toBe(true);
  return text;
}

describe("a byte order mark at the start of an event stream", () => {
  test.each([
    [["\xef\xbb\xbfdata: 1\n\n", "data: 2\n\n"], "data: 1\n\ndata: 2\n\n"],
    [["\xef\xbb\xbf", "data: 1\n\n"], "data: 1\n\n"],
    [["\xef", "\xbb", "\xbfdata: 1\n\n"], "data: 1\n\n"],
    [["\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\n"], "\xef\xbb\xbfdata: 1\n\n"],
    [["\xef", "\xbb", "\xbedata: 1\n\n"], "\xef\xbb\xbedata: 1\n\n"],
    [["data: 1\n\n", "\xef\xbb\xbfdata: 2\n\n"], "data: 1\n\n\xef\xbb\xbfdata: 2\n\n"],
  ])("is left out behind the opening comment, and only there: %j", async (pieces, left) => {
    expect(await relayed(10, pieces)).toBe(`:\n\n${left}`);
    expect(await relayed(10_000, pieces)).toBe(pieces.join(""));
  });
});

test("pieces that pass a filter are its own", async () => {
  const pieces = [new Uint8Array(10).fill(1), new Uint8Array(10).fill(2)];
  async function* chunks() {
    yield* pieces;
  }
  const body = relayBody({
    chunks: chunks(),
    timeouts: startExchangeTimeouts(LIMITS, new AbortController().signal, "acme"),
    filter: (all) => all,
    comments: null,
    piece() {},
    ended: async () => true,
  });
  expect((await new Response(body).bytes()).byteLength).toBe(20);
  expect(pieces.map(({ byteLength }) => byteLength)).toEqual([10, 10]);
});
