import { afterEach, describe, expect, test } from "bun:test";
import { once } from "node:events";
import net from "node:net";
import fc from "fast-check";
import { sentBytes, sentText } from "../../../test/support/http/answer-body.ts";
import { TEST_CA } from "../../../test/support/http/certificates.ts";
import {
  type Answer,
  answerOk,
  bind,
  closers,
  closeServers,
  failure,
  type Heard,
  kindOf,
  listen,
  lowerCase,
  outboundOf,
  post,
  raw,
  secure,
  to,
} from "../../../test/support/http/outbound-servers.ts";
import { readBody } from "./body.ts";
import { OutboundError } from "./exchange.ts";
import { type OutboundRequest, retryAfterMs } from "./outbound.ts";

afterEach(closeServers);

describe("a request on the wire", () => {
  test("has the name as its Host, whatever address is dialled, and nothing is added but what is ours", async () => {
    const server = await raw(answerOk);
    const outbound = outboundOf(to("127.0.0.1"));
    const url = `http://Up.test:${server.port}/a%20b/?q=1&q=2#never`;
    const response = await outbound.request(url, post({ body: Buffer.from("{}") }));
    expect(await sentText(response)).toBe("ok");
    const lines = server.requests[0]!.split("\r\n");
    expect(lines[0]).toBe("POST /a%20b/?q=1&q=2 HTTP/1.1");
    expect(lines.slice(1, -2).map(lowerCase).sort()).toEqual([
      "accept-encoding: identity",
      "accept: */*",
      "connection: keep-alive",
      "content-length: 2",
      `host: up.test:${server.port}`,
      "user-agent: tollgate",
    ]);
    expect(lines.at(-1)).toBe("{}");
  });

  test("has the caller's headers, those of the connection aside", async () => {
    const server = await raw(answerOk);
    await outboundOf().request(
      `http://127.0.0.1:${server.port}/`,
      post({
        headers: [
          ["user-agent", "mine"],
          ["Content-Type", "text/plain; x=é"],
          ["mcp-session-id", "1"],
          ["x-two", "a"],
          ["x-two", "b"],
          ["host", "evil.test"],
          ["connection", "close"],
          ["content-length", "99"],
          ["transfer-encoding", "chunked"],
          ["expect", "100-continue"],
          ["upgrade", "h2c"],
        ],
        body: Buffer.from("x"),
      }),
    );
    const [head = "", body] = server.requests[0]!.split("\r\n\r\n");
    const lines = head.split("\r\n").slice(1);
    expect(lines.map(lowerCase).sort()).toEqual([
      "accept-encoding: identity",
      "accept: */*",
      "connection: keep-alive",
      "content-length: 1",
      "content-type: text/plain; x=é",
      `host: 127.0.0.1:${server.port}`,
      "mcp-session-id: 1",
      "user-agent: mine",
      "x-two: a, b",
    ]);
    expect(body).toBe("x");
  });

  test("has a large body byte for byte", async () => {
    const server = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      fetch: async (r) => new Response(await r.bytes()),
    });
    closers.push(() => server.stop(true));
    const body = crypto.getRandomValues(new Uint8Array(65_536));
    const large = Buffer.concat(Array<Uint8Array>(100).fill(body));
    const response = await outboundOf().request(`http://127.0.0.1:${server.port}/`, post({ body: large }));
    expect(Buffer.compare(await sentBytes(response), large)).toBe(0);
  });

  test("has an encoded answer given back as it is", async () => {
    const zipped = Bun.gzipSync("hello");
    const server = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      fetch: () => new Response(zipped, { headers: { "content-encoding": "gzip" } }),
    });
    closers.push(() => server.stop(true));
    const send = () => outboundOf().request(`http://127.0.0.1:${server.port}/`, post());
    expect(Buffer.compare(await sentBytes(await send()), zipped)).toBe(0);
    expect((await readBody(await send(), { maxBytes: 5, captureBytes: 5 })).size).toBe(5);
  });

  test("has a redirect for an answer like any other", async () => {
    const target = await raw(answerOk);
    const location = `http://127.0.0.1:${target.port}/`;
    for (const status of [301, 302, 303, 307, 308]) {
      const server = await raw((socket) =>
        socket.write(`HTTP/1.1 ${status} Moved\r\nLocation: ${location}\r\nContent-Length: 0\r\n\r\n`),
      );
      const response = await outboundOf().request(`http://127.0.0.1:${server.port}/`, post());
      expect([response.status, response.headers.get("location")]).toEqual([status, location]);
    }
    expect(target.requests).toEqual([]);
  });

  test("goes over a connection that is kept and used again", async () => {
    const server = await raw(answerOk);
    const outbound = outboundOf(to("127.0.0.1"));
    for (let i = 0; i < 5; i++) {
      await sentText(await outbound.request(`http://up.test:${server.port}/`, post()));
    }
    expect(server.connections).toEqual([1, 1, 1, 1, 1]);
  });

  test("minds no proxy variable, even one that is set while running", async () => {
    const proxy = await raw((socket) => socket.end("HTTP/1.1 418 Teapot\r\nContent-Length: 0\r\n\r\n"));
    const server = await raw(answerOk);
    const names = ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];
    try {
      for (const name of names) process.env[name] = `http://127.0.0.1:${proxy.port}`;
      const response = await outboundOf(to("127.0.0.1")).request(`http://up.test:${server.port}/`, post());
      expect(response.status).toBe(200);
      const encrypted = outboundOf({ extraCa: TEST_CA, ...to("127.0.0.1") });
      const { port } = await secure();
      expect((await encrypted.request(`https://upstream.test:${port}/`, post())).status).toBe(200);
    } finally {
      for (const name of names) delete process.env[name];
    }
    expect(proxy.requests).toEqual([]);
  });
});

describe("a POST", () => {
  const bodies: Array<[string, Uint8Array | null]> = [
    ["no body", null],
    ["an empty body", new Uint8Array(0)],
    ["a small body", new Uint8Array(10)],
    ["a large body", new Uint8Array(3_000_000)],
  ];
  const endings: Array<[string, Answer]> = [
    ["closed", (socket) => socket.end()],
    ["reset", (socket) => socket.resetAndDestroy()],
    ["closed in the head", (socket) => socket.end("HTTP/1.1 200 OK\r\nContent-Le")],
  ];
  for (const [what, body] of bodies) {
    for (const [how, end] of endings) {
      test(`is not sent twice with ${what}, on a kept connection that is ${how}`, async () => {
        const server = await raw((socket, request, count) =>
          count === 1 ? answerOk(socket, request, count) : end(socket, request, count),
        );
        const outbound = outboundOf();
        const url = `http://127.0.0.1:${server.port}/`;
        await sentText(await outbound.request(url, post({ body: Buffer.from("first") })));
        expect(await kindOf(outbound.request(url, post({ body })))).toBe("lost");
        expect(server.requests.length).toBe(2);
      });
    }
  }

  test("is not sent to the next address, once it may have been sent to one", async () => {
    const first = await raw((socket) => socket.end(), "127.0.0.2");
    const outbound = outboundOf(to("127.0.0.2", "127.0.0.1"));
    const heard: Heard = { requests: [], connections: [] };
    const second = net.createServer((socket) => listen(socket, 1, heard, answerOk));
    second.listen(first.port, "127.0.0.1");
    closers.push(() => second.close());
    expect(await kindOf(outbound.request(`http://up.test:${first.port}/`, post()))).toBe("lost");
    expect([first.requests.length, heard.requests.length]).toEqual([1, 0]);
  });
});

test("a GET is sent again when its kept connection closes without an answer", async () => {
  const server = await raw((socket, request, count) =>
    count === 2 ? socket.destroy() : answerOk(socket, request, count),
  );
  const outbound = outboundOf();
  for (const method of ["POST", "GET"]) {
    const response = await outbound.request(`http://127.0.0.1:${server.port}/`, post({ method }));
    expect(await sentText(response)).toBe("ok");
  }
  expect(server.connections).toEqual([1, 1, 2]);
  const always = await raw((socket) => socket.destroy());
  const work = outbound.request(`http://127.0.0.1:${always.port}/`, post({ method: "GET" }));
  expect(await kindOf(work)).toBe("lost");
});

describe("errors of a request", () => {
  test("say that it was not sent when the connection failed", async () => {
    const server = await raw(answerOk);
    for (const close of closers.splice(0)) close();
    for (const scheme of ["http", "https"]) {
      expect(await kindOf(outboundOf().request(`${scheme}://127.0.0.1:${server.port}/`, post()))).toBe("unreached");
    }
    const unresolved = outboundOf({ lookup: () => Promise.reject(new Error("none")) });
    expect(await kindOf(unresolved.request("http://up.test/", post()))).toBe("unreached");
  });

  test("name the host, the port and the address", async () => {
    const outbound = outboundOf(to("127.0.0.1"));
    const told = async (url: string) => (await outbound.request(url, post()).catch((error) => error)).message;
    expect(await told("http://up.test:1/path?query")).toBe("up.test:1 at 127.0.0.1: ECONNREFUSED");
    expect(await told("http://127.0.0.1:1/")).toBe("127.0.0.1:1: ECONNREFUSED");
    // The scheme's port, which something on this machine may listen on.
    const refusing = outboundOf(to("127.99.99.99"));
    for (const [scheme, port] of [
      ["http", 80],
      ["https", 443],
    ]) {
      const error = await refusing.request(`${scheme}://up.test/`, post()).catch((thrown) => thrown);
      expect(error.message).toBe(`up.test:${port} at 127.99.99.99: ECONNREFUSED`);
    }
  });

  test("come at once when the server closes the connection between its dial and its first byte", async () => {
    const peer = Promise.withResolvers<net.Socket>();
    const url = `http://127.0.0.1:${await bind(net.createServer(peer.resolve), "127.0.0.1")}/`;
    const leaving = async () => {
      const socket = await peer.promise;
      const closed = once(socket, "close");
      socket.end().resume();
      await closed;
    };
    const signal = AbortSignal.timeout(10_000);
    expect(await kindOf(outboundOf().request(url, post({ signal, leaving })))).toBe("unreached");
  });

  test("come only when no address can be connected", async () => {
    const server = await raw(answerOk);
    const outbound = outboundOf(to("127.0.0.3", "::1", "127.0.0.1"));
    const response = await outbound.request(`http://up.test:${server.port}/`, post({ body: Buffer.from("b") }));
    expect(await sentText(response)).toBe("ok");
    expect(server.requests.length).toBe(1);
  });

  test("call it lost when the answer is no HTTP", async () => {
    const answers = [
      "garbage\r\n\r\n",
      "HTTP/1.1 abc OK\r\n\r\n",
      "HTTP/1.1 99 Low\r\nContent-Length: 0\r\n\r\n",
      "HTTP/1.1 000 None\r\nContent-Length: 0\r\n\r\n",
      "HTTP/1.1 099 Low\r\nContent-Length: 2\r\n\r\nok",
      "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
      "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
      "HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
      "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
      "",
    ];
    for (const answer of answers) {
      const server = await raw((socket) => socket.end(answer));
      const work = outboundOf().request(`http://127.0.0.1:${server.port}/`, post());
      expect([answer, await kindOf(work)]).toEqual([answer, "lost"]);
    }
  });

  test("call it lost when the body of the answer breaks off", async () => {
    const starts = ["Content-Length: 10\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n5\r\nabc"];
    for (const start of [...starts, "Transfer-Encoding: chunked\r\n\r\nzz\r\n"]) {
      const server = await raw((socket) => socket.end(`HTTP/1.1 200 OK\r\n${start}`));
      const response = await outboundOf().request(`http://127.0.0.1:${server.port}/`, post());
      expect(await kindOf(readBody(response, { maxBytes: 100, captureBytes: 100 }))).toBe("lost");
    }
  });

  test("end a head that never ends, in bounded memory", async () => {
    const floods: Array<[string, string]> = [
      ["HTTP/1.1 200 OK\r\n", `X-A: ${"a".repeat(1000)}\r\n`],
      ["HTTP/1.1 200 OK\r\nX: ", "a".repeat(10_000)],
      ["HTTP/1.1 200 ", "a".repeat(10_000)],
      ["", "HTTP/1.1 100 Continue\r\n\r\n"],
    ];
    for (const [start, piece] of floods) {
      const server = await raw((socket) => {
        const many = piece.repeat(Math.ceil(65_536 / piece.length));
        const pump = () => {
          while (!socket.destroyed && socket.write(many));
        };
        socket.on("drain", pump);
        socket.write(start);
        pump();
      });
      const before = process.memoryUsage.rss();
      const signal = AbortSignal.timeout(300);
      await failure(outboundOf().request(`http://127.0.0.1:${server.port}/`, post({ signal })));
      expect([start, process.memoryUsage.rss() - before < 64 * 1024 * 1024]).toEqual([start, true]);
    }
  });

  test("name no path, query, header or body", async () => {
    const server = await raw((socket) => socket.end("garbage\r\n\r\n"));
    const url = `http://127.0.0.1:${server.port}/hidden?key=hidden`;
    const calls: Array<[string, Partial<OutboundRequest>]> = [
      [url, { headers: [["authorization", "hidden"]], body: Buffer.from("hidden") }],
      [url, { headers: [["authorization", "hidden\r\nx: y"]] }],
      [url, { headers: [["authorization", "hidden\u2028"]] }],
      ["http://user:hidden@127.0.0.1/", {}],
      ["ftp://127.0.0.1/hidden", {}],
      ["http://[hidden", {}],
    ];
    for (const [target, parts] of calls) {
      const error = await failure(outboundOf().request(target, post(parts)));
      expect(error).toBeInstanceOf(OutboundError);
      expect(String(error)).not.toContain("hidden");
      expect(error).not.toHaveProperty("cause");
    }
    expect(server.requests.length).toBe(1);
  });
});

describe("a request that is stopped", () => {
  test("ends with the reason of its signal, before, while resolving and while waiting", async () => {
    const server = await raw(() => {});
    const url = `http://up.test:${server.port}/`;
    const outbound = outboundOf(to("127.0.0.1"));
    expect(await failure(outbound.request(url, post({ signal: AbortSignal.abort("before") })))).toBe("before");
    expect(server.requests).toEqual([]);

    const hanging = outboundOf({ lookup: () => Promise.withResolvers<never>().promise });
    const stop = new AbortController();
    const resolving = failure(hanging.request(url, post({ signal: stop.signal })));
    stop.abort("resolving");
    expect(await resolving).toBe("resolving");

    const late = new AbortController();
    const stopping = await raw(() => late.abort("waiting"));
    const waiting = outbound.request(`http://up.test:${stopping.port}/`, post({ signal: late.signal }));
    expect(await failure(waiting)).toBe("waiting");
  });

  test("between its dial and its first byte is not sent, and its connection is closed", async () => {
    const stopping = new AbortController();
    const received = Promise.withResolvers<string>();
    const server = net.createServer((socket) => {
      let text = "";
      socket.on("data", (data) => {
        text += data;
      });
      socket.on("close", () => received.resolve(text));
    });
    const url = `http://127.0.0.1:${await bind(server, "127.0.0.1")}/`;
    const leaving = async () => stopping.abort("stopped");
    const request = outboundOf().request(url, post({ signal: stopping.signal, leaving }));
    expect([await failure(request), await received.promise]).toEqual(["stopped", ""]);
  });

  test("closes its connection while the body comes", async () => {
    const stop = new AbortController();
    const closed = Promise.withResolvers<void>();
    const server = await raw((socket) => {
      socket.on("close", () => closed.resolve());
      socket.write("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart");
    });
    const response = await outboundOf().request(`http://127.0.0.1:${server.port}/`, post({ signal: stop.signal }));
    const work = failure(readBody(response, { maxBytes: 200, captureBytes: 10, signal: stop.signal }));
    stop.abort("enough");
    expect(await work).toBe("enough");
    await closed.promise;
  });

  test("closes its connection when the body is beyond its limit", async () => {
    const closed = Promise.withResolvers<void>();
    const server = await raw((socket) => {
      socket.on("close", () => closed.resolve());
      socket.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n");
    });
    const response = await outboundOf().request(`http://127.0.0.1:${server.port}/`, post());
    expect(await readBody(response, { maxBytes: 4, captureBytes: 2 })).toMatchObject({ tooLarge: true });
    await closed.promise;
  });
});

const NOW = Date.parse("2026-11-23T18:00:00Z");
const MOST = 30_000;

test("seconds and dates are read, and nothing is longer than the bound", () => {
  const read = [
    null,
    "0",
    "2",
    " 7 ",
    "86400",
    "Mon, 23 Nov 2026 18:00:09 GMT",
    "Mon, 23 Nov 2026 17:00:00 GMT",
    "Tue, 24 Nov 2026 18:00:00 GMT",
    "soon",
    "",
  ].map((value) => retryAfterMs(value, NOW, MOST));
  expect(read).toEqual([null, 0, 2_000, 7_000, MOST, 9_000, 0, MOST, null, null]);
});

test("whatever a server sends, it is nothing or within the bound", () => {
  const value = fc.oneof(fc.string(), fc.integer().map(String), fc.bigInt().map(String));
  fc.assert(
    fc.property(value, fc.nat(), (sent, now) => {
      const ms = retryAfterMs(sent, now, MOST);
      expect(ms === null || (ms >= 0 && ms <= MOST)).toBe(true);
    }),
  );
});
