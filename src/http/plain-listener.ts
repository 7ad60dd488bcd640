// A port without TLS beside the main one, for short responses to unauthenticated requests (metrics, health). Its connections
// are limited, shared out by address and closed when they are silent, so that a flood of them takes no descriptor from the main
// port. When all are taken, a new connection evicts an idle one. So a client that sends its request at once is answered even if
// others hold connections open, through the same proxy or from any number of addresses.
import { createServer, type Server, type Socket } from "node:net";
import { systemClock } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";
import { createReservedShare } from "../kernel/share.ts";
import { type ConnectionLimits, OpenSockets, openPort, type PortAddress, serveConnections } from "./http1.ts";

export interface PlainListenerLimits extends ConnectionLimits {
  /** Connections in all. One address may have seven eighths of them. */
  readonly connections: number;
}

const TIMES = { idleMs: 10_000, headMs: 5_000, bodyMs: 5_000, flushMs: 10_000 };
const LIMITS: PlainListenerLimits = { connections: MAX.plainConnections, ...TIMES };
/** Peers are not identified here, so no identity expires. */
const ANYBODY = { expiresAt: Number.POSITIVE_INFINITY };

export interface PlainListenerOptions extends PortAddress {
  readonly limits?: PlainListenerLimits;
  answer(request: Request): Promise<Response>;
}

/** @throws StartupProblem when it can't listen on its address */
export async function listenPlain(options: PlainListenerOptions) {
  const server = createServer();
  const sockets = new OpenSockets();
  return openPort(server, sockets, admit(server, sockets, options), options);
}

function admit(server: Server, sockets: OpenSockets, options: PlainListenerOptions) {
  const { answer, variable, log, limits = LIMITS } = options;
  const bodyBytesMax = MAX.plainBodyBytes;
  const http = serveConnections<typeof ANYBODY>({ answer, bodyBytesMax, limits, clock: systemClock, log });
  /** The admitted connections, each with its address. */
  const admitted = new Map<Socket, string>();
  const shares = createReservedShare(limits.connections);
  let loggedAt = Number.NEGATIVE_INFINITY;

  /** Frees a connection's slot: at its eviction, else when it has closed. */
  function release(socket: Socket): void {
    const address = admitted.get(socket);
    if (address === undefined) return;
    admitted.delete(socket);
    shares.giveBack(address);
  }

  function logCrowded(): void {
    const now = performance.now();
    // Rate limited, since anybody can cause these log lines.
    if (now - loggedAt < 10_000) return;
    loggedAt = now;
    log.warn("connections_refused", { port: variable, connections_max: limits.connections });
  }

  /** Admits a connection if there is a slot, or one can be evicted. An address that has connections evicts one of its own. */
  function mayEnter(address: string): boolean {
    if (shares.take(address)) return true;
    logCrowded();
    const own = [...admitted].filter(([, each]) => each === address).map(([socket]) => socket);
    const next = http.nextToClose(own.length > 0 ? own : admitted.keys());
    if (next === null) return false;
    // The slot of an own connection passes to the new one; it is not given back in between.
    if (own.length > 0) admitted.delete(next);
    else release(next);
    next.resetAndDestroy();
    return own.length > 0 || shares.take(address);
  }

  server.on("connection", (socket) => {
    const address = socket.remoteAddress ?? "";
    if (!mayEnter(address)) return void socket.on("error", () => {}).destroy();
    admitted.set(socket, address);
    sockets.add(socket, () => release(socket));
    http.take(socket, ANYBODY);
  });
  return http;
}
