import { afterEach, describe, expect, test } from "bun:test";
import net from "node:net";
import { parseAllowList } from "../core/host.ts";
import { decodedBody } from "./body.ts";
import { createOutbound, OutboundError } from "./outbound.ts";

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
  const outbound = createOutbound({ allow: parseAllowList(["127.0.0.1"]), extraCa: null, streamed: true });
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
        for await (const part of decodedBody(response, 100)) parts.push(part);
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
});
