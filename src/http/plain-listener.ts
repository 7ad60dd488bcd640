// A plain port beside the main one, for a few short answers that need no caller. Its connections are few, shared out by
// address and closed when they are silent, so that a flood of them takes no descriptor from the main port. When they are
// taken, a new one has the place of one that is only held open. So who asks at once is answered, though others hold on,
// through the same proxy or from as many addresses as there are connections.
import { createServer, type Server, type Socket } from "node:net";
import type { Log } from "../core/log.ts";
import { systemClock } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";
import { createReservedShare } from "../kernel/share.ts";
import { type ConnectionLimits, listenAt, OpenSockets, type PortAddress, serveConnections } from "./http1.ts";

export interface PlainListenerLimits extends ConnectionLimits {
  /** In all. An address alone may have seven eighths. */
  readonly connections: number;
}

const LIMITS: PlainListenerLimits = {
  connections: MAX.plainConnections,
  idleMs: 10_000,
  headMs: 5_000,
  bodyMs: 5_000,
  flushMs: 10_000,
};
/** Nobody is known here, and nothing that is shown expires. */
const ANYBODY = { expiresAt: Number.POSITIVE_INFINITY };

export interface PlainListenerOptions extends PortAddress {
  readonly log: Log;
  readonly limits?: PlainListenerLimits;
  answer(request: Request): Promise<Response>;
}

/** @throws StartupProblem when it can't have its address */
export async function listenPlain(options: PlainListenerOptions) {
  const server = createServer();
  const sockets = new OpenSockets();
  const http = admit(server, sockets, options);
  const port = await listenAt(server, options, options.log);
  const sweeping = setInterval(http.sweep, 250);

  /** Listens no more, and closes what is idle. Resolves when every connection is gone. */
  async function drain(): Promise<void> {
    server.close();
    http.closeIdle();
    await sockets.empty();
    clearInterval(sweeping);
  }

  return {
    port,
    drain,
    /** Closes everything. */
    async stop(): Promise<void> {
      sockets.closeAll();
      await drain();
    },
  };
}

function admit(server: Server, sockets: OpenSockets, options: PlainListenerOptions) {
  const { answer, variable, log, limits = LIMITS } = options;
  const bodyBytesMax = MAX.plainBodyBytes;
  const http = serveConnections<typeof ANYBODY>({ answer, bodyBytesMax, limits, clock: systemClock, log });
  /** Those that have a place, with their address. */
  const placed = new Map<Socket, string>();
  const shares = createReservedShare(limits.connections);
  let toldAt = Number.NEGATIVE_INFINITY;

  /** At once when another one has its place, else when it is closed. */
  function leave(socket: Socket): void {
    const address = placed.get(socket);
    if (address === undefined) return;
    placed.delete(socket);
    shares.giveBack(address);
  }

  function tellCrowded(): void {
    const now = performance.now();
    // Anybody can cause these log lines.
    if (now - toldAt < 10_000) return;
    toldAt = now;
    log.warn("connections_refused", { port: variable, connections_max: limits.connections });
  }

  /** An address that has any gets the place of one of its own, even if it has more than its share by now. */
  function mayEnter(address: string): boolean {
    if (shares.take(address)) return true;
    tellCrowded();
    const own = [...placed].filter(([, each]) => each === address).map(([socket]) => socket);
    const next = http.nextToClose(own.length > 0 ? own : placed.keys());
    if (next === null) return false;
    if (own.length > 0) placed.delete(next);
    else leave(next);
    next.resetAndDestroy();
    return own.length > 0 || shares.take(address);
  }

  server.on("connection", (socket) => {
    const address = socket.remoteAddress ?? "";
    if (!mayEnter(address)) {
      socket.on("error", () => {});
      socket.destroy();
      return;
    }
    placed.set(socket, address);
    sockets.add(socket, () => leave(socket));
    http.take(socket, ANYBODY);
  });
  return http;
}
