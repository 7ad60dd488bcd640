import { expect, test } from "bun:test";
import { once } from "node:events";
import { connect } from "node:net";
import { silentLog } from "../core/log.ts";
import { ListenProblem } from "../core/startup.ts";
import { type ListenerOptions, listen, mostOpen } from "./listener.ts";

const SENT = 8 * 1024 * 1024;

const OPTIONS: Omit<ListenerOptions, "answer"> = {
  host: "127.0.0.1",
  port: 0,
  reusePort: false,
  openMax: mostOpen(),
  idleSeconds: 10,
  log: silentLog,
};

test("a port that another process has is refused, or a free one is taken if that is wanted", async () => {
  const taken = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
  const at = { ...OPTIONS, port: taken.port, answer: () => new Response("free") };
  expect(() => listen(at)).toThrow(ListenProblem);
  const listener = listen({ ...at, orFreePort: true });
  expect(listener.port).not.toBe(taken.port);
  expect(await (await fetch(`http://127.0.0.1:${listener.port}`)).text()).toBe("free");
  await listener.stop(true);
  taken.stop(true);
  const usual = listen({ ...at, orFreePort: true });
  expect(usual.port).toBe(taken.port);
  await usual.stop(true);
});

test("no read of a caller's connection brings more than its receive buffer holds", async () => {
  let largest = 0;
  const listener = listen({
    ...OPTIONS,
    answer: async ({ body }) => {
      // Since this waits for each piece, it is given what one read has brought.
      for await (const piece of body ?? []) largest = Math.max(largest, piece.byteLength);
      return new Response("taken");
    },
  });
  const socket = connect(listener.port, "127.0.0.1");
  socket.write(`POST / HTTP/1.1\r\nHost: x\r\nContent-Length: ${SENT}\r\n\r\n`);
  socket.write(Buffer.alloc(SENT));
  const [answer] = await once(socket, "data");
  expect(String(answer)).toEndWith("taken");
  // Linux doubles the size that it is asked for.
  expect(largest).toBeLessThanOrEqual(64 * 1024);
  socket.destroy();
  await listener.stop(true);
});
