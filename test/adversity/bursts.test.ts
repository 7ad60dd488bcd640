// Connections that come while nobody takes them: a gateway that is stopped for a moment stands for a busy one.
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { connect, type Socket } from "node:net";
import { startGateway } from "../support/gateway/gateway.ts";

const BURST = 2_000;
/** A client that was not heard asks again after a second. */
const HEARD_MS = 900;
const kernelMax = Number(readFileSync("/proc/sys/net/core/somaxconn", "utf8"));

function connected(port: number, sockets: Socket[]): Promise<boolean> {
  const { promise, resolve } = Promise.withResolvers<boolean>();
  const socket = connect(port, "127.0.0.1", () => resolve(true));
  sockets.push(socket);
  socket.on("error", () => resolve(false));
  setTimeout(() => resolve(false), HEARD_MS).unref();
  return promise;
}

test.skipIf(kernelMax < BURST)(
  "two thousand connections that come while the gateway is busy wait for it (skipped where the kernel lets fewer wait)",
  async () => {
    await using gateway = await startGateway();
    const sockets: Socket[] = [];
    const port = Number(new URL(gateway.url).port);
    process.kill(gateway.pid, "SIGSTOP");
    try {
      // A few at a time, so that none is late for want of a processor.
      for (let burst = 0; burst < BURST; burst += 200) {
        const heard = await Promise.all(Array.from({ length: 200 }, () => connected(port, sockets)));
        expect([burst, heard.filter((was) => was).length]).toEqual([burst, 200]);
      }
    } finally {
      process.kill(gateway.pid, "SIGCONT");
      for (const socket of sockets) socket.destroy();
    }
    expect((await fetch(`${gateway.url}/healthz`)).status).toBe(200);
  },
);
