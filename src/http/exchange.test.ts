import { expect, test } from "bun:test";
import net from "node:net";
import { Exchange } from "./exchange.ts";
import { ResponseParser } from "./response-parser.ts";

test("parts of an answer that have come are parsed in one go: they wait for one turn, not for one each", async () => {
  const socket = new net.Socket();
  const exchange = new Exchange({
    socket,
    parser: new ResponseParser(),
    request: {
      target: { isTls: false, host: "localhost", hostname: "localhost", port: "", path: "/", serverName: null },
      address: "127.0.0.1",
      method: "GET",
      fields: "",
      body: null,
      tenant: "",
      tlsContext: { name: "", secureContext: undefined },
      signal: AbortSignal.timeout(10_000),
    },
    over() {},
  });
  const answer = `HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n${"x".repeat(40_000)}`;
  for (const byte of Buffer.from(answer)) exchange.arrived(new Uint8Array([byte]));
  const pieces: number[] = [];
  for await (const piece of (await exchange.response).body ?? []) pieces.push(piece.length);
  expect([pieces.length, pieces.reduce((sum, length) => sum + length)]).toEqual([2, 40_000]);
});
