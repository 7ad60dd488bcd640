import { expect, test } from "bun:test";
import net from "node:net";
import { Exchange } from "./exchange.ts";
import { ResponseParser } from "./response-parser.ts";

/** @param over called with whether the connection can be used again */
function exchanging(over: (isClean: boolean) => void = () => {}): Exchange {
  return new Exchange({
    socket: new net.Socket(),
    parser: new ResponseParser(),
    request: {
      method: "GET",
      tenant: "",
      signal: AbortSignal.timeout(10_000),
    },
    over,
  });
}

test("parts of an answer that have come are parsed in one go: they wait for one turn, not for one each", async () => {
  const exchange = exchanging();
  const answer = `HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n${"x".repeat(40_000)}`;
  for (const byte of Buffer.from(answer)) exchange.arrived(new Uint8Array([byte]));
  const pieces: number[] = [];
  for await (const piece of (await exchange.response).body ?? []) pieces.push(piece.length);
  expect([pieces.length, pieces.reduce((sum, length) => sum + length)]).toEqual([2, 40_000]);
});

test("a connection is not used again when nothing was read of it while its answer ended: nobody saw what follows", async () => {
  const endOf = async (begin: (exchange: Exchange) => void) => {
    const { promise, resolve } = Promise.withResolvers<boolean>();
    const exchange = exchanging(resolve);
    begin(exchange);
    exchange.arrived(Buffer.from("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"));
    return promise;
  };
  expect(await endOf(() => {})).toBe(true);
  expect(await endOf((exchange) => exchange.pause())).toBe(false);
});
