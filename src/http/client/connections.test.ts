import { afterEach, describe, expect, test } from "bun:test";
import net from "node:net";
import { sentText } from "../../../test/support/http/answer-body.ts";
import { decodedBody } from "../../../test/support/http/encoded-body.ts";
import { hostRules } from "../../core/host.ts";
import { readBody } from "./body.ts";
import { type IdleConnection, IdleConnections } from "./connections.ts";
import { OutboundError, ReadAhead } from "./exchange.ts";
import { createOutbound } from "./outbound.ts";
import { SLICE_BYTES_MAX } from "./response-parser.ts";

const servers: net.Server[] = [];
afterEach(() => {
  for (const server of servers.splice(0)) server.close();
});

/** A server that answers whatever comes on a connection. */
async function answering(answer: (socket: net.Socket) => void): Promise<string> {
  const server = net.createServer((socket) => {
    socket.on("error", () => {});
    socket.once("data", () => answer(socket));
  });
  servers.push(server);
  const { promise, resolve } = Promise.withResolvers<void>();
  server.listen(0, "127.0.0.1", resolve);
  await promise;
  return `http://127.0.0.1:${(server.address() as net.AddressInfo).port}/`;
}

describe("a streamed answer", () => {
  const HEAD = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
  const outbound = createOutbound({ rules: hostRules({ allow: ["127.0.0.1"] }), extraCa: null });
  const post = (url: string) =>
    outbound.request(url, { method: "POST", headers: [], body: null, signal: AbortSignal.timeout(20_000) });

  test.each([
    ["closed", (socket: net.Socket) => socket.end()],
    ["destroyed", (socket: net.Socket) => socket.destroy()],
    ["reset", (socket: net.Socket) => socket.resetAndDestroy()],
  ])("gives all that came of it when its connection is %s in the same moment", async (_how, end) => {
    const url = await answering((socket) => {
      socket.write(`${HEAD}5\r\nfirst\r\n`);
      end(socket);
    });
    const read = async () => {
      const response = await post(url);
      const parts: Uint8Array[] = [];
      const reading = (async () => {
        for await (const part of decodedBody(response, { maxBytes: 100 })) parts.push(part);
      })();
      const error = await reading.catch((failed: unknown) => failed);
      return [error instanceof OutboundError && error.kind, `${Buffer.concat(parts)}`];
    };
    // The runtime's own client loses one of two of them.
    for (let time = 0; time < 50; time++) expect(await read()).toEqual(["lost", "first"]);
  });

  test("is read no faster than it is taken", async () => {
    const WHOLE = 64 * 1024 * 1024;
    let written = 0;
    const url = await answering((socket) => {
      socket.write(`HTTP/1.1 200 OK\r\nContent-Length: ${WHOLE}\r\n\r\n`);
      const pump = () => {
        for (; written < WHOLE; written += 65_536) if (!socket.write(Buffer.alloc(65_536))) break;
      };
      socket.on("drain", () => {
        written += 65_536;
        pump();
      });
      pump();
    });
    const response = await post(url);
    const reader = response.body!.getReader();
    let read = (await reader.read()).value?.length ?? 0;
    // What the sockets of both sides hold, once nothing moves any more.
    for (let before = -1; before !== written; await Bun.sleep(100)) before = written;
    expect(written).toBeLessThan(WHOLE / 2);
    for (let part = await reader.read(); part.value !== undefined; part = await reader.read()) {
      read += part.value.length;
    }
    expect(read).toBe(WHOLE);
  });

  test("is not read beyond what the kernel holds of it, however fast it comes and was", async () => {
    const WHOLE = 48 * 1024 * 1024;
    const url = await answering((socket) => {
      socket.write(`HTTP/1.1 200 OK\r\nContent-Length: ${WHOLE}\r\n\r\n`);
      socket.write(Buffer.alloc(WHOLE));
    });
    let waits = 0;
    let most = 0;
    const count = (bytes: number) => {
      waits += bytes;
      most = Math.max(most, waits);
    };
    const ahead = Object.assign(new ReadAhead(WHOLE).of("acme"), { add: count });
    const request = { method: "POST", headers: [], body: null, signal: AbortSignal.timeout(20_000), ahead };
    const response = await outbound.request(url, request);
    let read = 0;
    for await (const part of decodedBody(response, { maxBytes: WHOLE })) {
      read += part.length;
      // Time for all that can come.
      if (read % 7 === 0) await Bun.sleep(1);
    }
    expect([read, waits]).toEqual([WHOLE, 0]);
    expect(most).toBeLessThan(1024 * 1024);
  });

  test("waits unread, with all of its tenant's, when nobody takes what came: together they hold one share", async () => {
    const WHOLE = 2 * 1024 * 1024;
    const url = await answering((socket) => {
      socket.write(`HTTP/1.1 200 OK\r\nContent-Length: ${WHOLE}\r\n\r\n`);
      socket.write(Buffer.alloc(WHOLE));
    });
    const gate = new ReadAhead(4 * 1024 * 1024);
    let waits = 0;
    let most = 0;
    const readerOf = (tenant: string) => {
      const reader = gate.of(tenant);
      const { add } = reader;
      reader.add = (bytes) => {
        waits += bytes;
        most = Math.max(most, waits);
        add.call(reader, bytes);
      };
      return reader;
    };
    const ask = (tenant: string) => {
      const signal = AbortSignal.timeout(20_000);
      return outbound.request(url, {
        method: "POST",
        headers: [],
        body: null,
        signal,
        ahead: readerOf(tenant),
      });
    };
    const unread = Array.from({ length: 100 }, () => ask("greedy"));
    await Promise.any(unread);
    const other = await ask("other");
    expect((await readBody(other, { maxBytes: WHOLE, captureBytes: 0 })).size).toBe(WHOLE);
    // Without the share each of them brings a quarter of a megabyte and more.
    expect(most).toBeLessThan(10 * 1024 * 1024);
    const sizes = unread.map(
      async (answer) => (await readBody(await answer, { maxBytes: WHOLE, captureBytes: 0 })).size,
    );
    expect(new Set(await Promise.all(sizes))).toEqual(new Set([WHOLE]));
  });

  test("is in no order when it has no length and its connection is reset", async () => {
    const ending = async (end: (socket: net.Socket) => void) => {
      const url = await answering((socket) => {
        socket.write("HTTP/1.1 200 OK\r\n\r\nhello");
        end(socket);
      });
      const text = sentText(await post(url));
      return await text.catch(() => "broken");
    };
    expect(await ending((socket) => socket.end())).toBe("hello");
    expect(await ending((socket) => socket.resetAndDestroy())).toBe("broken");
  });

  test("leaves no connection for the next request when its own is closed with it: that request would be lost", async () => {
    const url = await answering((socket) => socket.end("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"));
    for (let time = 0; time < 200; time++) expect(await sentText(await post(url))).toBe("ok");
  });

  test("comes in pieces when it has many small chunks, with turns for others between them", async () => {
    const CHUNKS = 100_000;
    const url = await answering((socket) => {
      socket.write(HEAD);
      socket.end(`${"1\r\nx\r\n".repeat(CHUNKS)}0\r\n\r\n`);
    });
    const response = await post(url);
    let turns = 0;
    let isOver = false;
    const turn = () => {
      turns++;
      if (!isOver) setImmediate(turn);
    };
    setImmediate(turn);
    const pieces: number[] = [];
    for await (const piece of decodedBody(response, { maxBytes: CHUNKS })) pieces.push(piece.length);
    isOver = true;
    expect(pieces.reduce((sum, length) => sum + length)).toBe(CHUNKS);
    // Not one for each chunk, and not one for all.
    expect(pieces.length).toBeLessThan(CHUNKS / 100);
    expect(Math.max(...pieces)).toBeLessThanOrEqual(SLICE_BYTES_MAX);
    expect(turns).toBeGreaterThanOrEqual(pieces.length / 4);
  });

  test("does not mean that its request has left when it comes before that was read", async () => {
    const { promise: headCame, resolve: showHead } = Promise.withResolvers<void>();
    const url = await answering((socket) => {
      socket.pause();
      socket.write(HEAD);
      showHead();
    });
    let isSent = false;
    const { promise: letGo, resolve: sent } = Promise.withResolvers<void>();
    const response = await outbound.request(url, {
      method: "POST",
      headers: [],
      body: new Uint8Array(32 * 1024 * 1024),
      signal: AbortSignal.timeout(20_000),
      sent() {
        isSent = true;
        sent();
      },
    });
    await headCame;
    expect(isSent).toBe(false);
    await response.body?.cancel();
    await letGo;
  });

  test("lets go of its request when the connection is gone before that was read", async () => {
    const url = await answering((socket) => {
      socket.pause();
      setTimeout(() => socket.resetAndDestroy(), 50);
    });
    const { promise: letGo, resolve: sent } = Promise.withResolvers<void>();
    const body = new Uint8Array(32 * 1024 * 1024);
    const request = { method: "POST", headers: [], body, signal: AbortSignal.timeout(20_000), sent };
    expect(await outbound.request(url, request).catch(({ kind }: OutboundError) => kind)).toBe("lost");
    await letGo;
  });
});

describe("connections that are kept", () => {
  const OK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n";

  /** Asks a server of any name, which answers with the number of the connection. */
  async function numbering() {
    let connections = 0;
    const server = net.createServer((socket) => {
      const mine = ++connections % 100;
      socket.on("error", () => {});
      socket.on("data", (data) => {
        socket.write(`${OK}${`${mine}`.padEnd(2, ".")}`);
        // One more, that nobody asked for.
        if (`${data}`.includes("POST /twice")) socket.write(`${OK}no`);
      });
    });
    servers.push(server);
    const { promise, resolve } = Promise.withResolvers<void>();
    server.listen(0, "127.0.0.1", resolve);
    await promise;
    const { port } = server.address() as net.AddressInfo;
    const lookup = async () => [{ address: "127.0.0.1" }];
    const named = createOutbound({ rules: null, extraCa: null, lookup });
    return async (host: string, { path = "", tenant = "" } = {}) => {
      const signal = AbortSignal.timeout(20_000);
      const request = { method: "POST", headers: [], body: null, signal, tenant };
      return await sentText(await named.request(`http://${host}.test:${port}/${path}`, request));
    };
  }

  test("are shared by no two names, and an answer that was not asked for is none", async () => {
    const ask = await numbering();
    expect([await ask("one"), await ask("one"), await ask("two"), await ask("one")]).toEqual(["1.", "1.", "2.", "1."]);
    expect([await ask("two", { path: "twice" }), await ask("two"), await ask("two")]).toEqual(["2.", "3.", "3."]);
  });

  test("are shared by no two tenants, who use their own again", async () => {
    const ask = await numbering();
    const tenants = ["acme", "rival", "", "acme", "rival", ""];
    const answers: string[] = [];
    for (const tenant of tenants) answers.push(await ask("one", { tenant }));
    expect(answers).toEqual(["1.", "2.", "3.", "1.", "2.", "3."]);
  });

  test("are not taken from a tenant by another that calls more names than there are connections kept", async () => {
    const ask = await numbering();
    const neighbour = () => Promise.all(Array.from({ length: 20 }, (_, at) => ask(`n${at}`, { tenant: "neighbour" })));
    const before = await neighbour();
    for (let at = 0; at < 1_200; at += 20) {
      await Promise.all(Array.from({ length: 20 }, (_, next) => ask(`h${at + next}`, { tenant: "hostile" })));
    }
    expect(await neighbour()).toEqual(before);
  });
});

function connection(idleMs: number, ended: () => void = () => {}, key = "here"): IdleConnection {
  return { key, tenant: "acme", weight: 1, idleUntil: performance.now() + idleMs, end: ended };
}

test("of the connections with one key the one that was idle shortest is taken, and none that is too old", () => {
  const pool = new IdleConnections();
  let ended = 0;
  const [first, last] = [connection(60_000), connection(60_000)];
  for (const each of [first, last, connection(-1, () => ended++), connection(0, () => ended++)]) pool.add(each);
  pool.add(connection(60_000, undefined, "there"));
  expect([pool.take("here"), pool.take("here"), pool.take("here"), ended]).toEqual([last, first, null, 2]);
});

test("one that nobody takes is closed when it is too old, and the others stay", async () => {
  const pool = new IdleConnections(5);
  const young = connection(60_000);
  pool.add(young);
  await new Promise<void>((resolve) => {
    const old = connection(10, () => {
      pool.remove(old);
      resolve();
    });
    pool.add(old);
  });
  expect([pool.take("here"), pool.take("here")]).toEqual([young, null]);
});
