// Callers that ask, and do not take their answer: as many connections as are wanted, each with a small buffer.
import { connect } from "node:net";
import { keepReceiveBufferSmall } from "../../../src/http/bun/socket-options.ts";
import type { Gateway } from "../gateway/gateway.ts";

/** Resolves when the answer has begun, or never will. No more of it is read, and its connection stays. */
export function unread(gateway: Gateway, token: string, path: string): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  const socket = connect(Number(new URL(gateway.url).port), "127.0.0.1", () => {
    keepReceiveBufferSmall(socket);
    socket.write(`GET ${path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ${token}\r\n\r\n`);
  });
  socket.once("data", () => {
    socket.pause();
    resolve();
  });
  for (const event of ["close", "error"]) socket.on(event, () => resolve());
  return promise;
}
