// An HTTP/1.1 server for connections that a port has accepted itself, because it limits or authenticates each of them: the
// plain port and the facilitator's mutual-TLS port. It answers one request after another on a connection, and enforces a time
// limit on each phase, since Bun's node:http enforces none on a connection that is handed to it (measured). Bodies are read
// before the request is answered, up to a bound; responses are small.
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { Server, Socket } from "node:net";
import type { Log } from "../core/log.ts";
import { listenProblem } from "../core/startup.ts";
import type { Clock } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";
import { createInFlight } from "../kernel/wait.ts";
import { keepReceiveBufferSmall, SMALL_BODIES_BUFFER_BYTES } from "./bun/socket-options.ts";
import { MALFORMED_HTTP } from "./responses.ts";

export interface PortAddress {
  readonly host: string;
  /** 0 takes a free port. */
  readonly port: number;
  /** The variable that sets the port. */
  readonly variable: string;
  readonly log: Log;
}

type Admitted = Record<"sweep" | "closeIdle", () => void>;

/** Listens, and sweeps the connections that the caller admits. @throws StartupProblem when it can't listen on its address */
export async function openPort(server: Server, sockets: OpenSockets, connections: Admitted, options: PortAddress) {
  const port = await listenAt(server, options);
  const sweeping = setInterval(connections.sweep, 250);

  /** Stops listening and closes idle connections. Resolves when every connection has closed. */
  async function drain(): Promise<void> {
    server.close();
    connections.closeIdle();
    await sockets.empty();
    clearInterval(sweeping);
  }

  return {
    port,
    drain,
    /** Closes all connections at once. */
    async stop(): Promise<void> {
      sockets.closeAll();
      await drain();
    },
  };
}

function listenAt(server: Server, { host, port, variable, log }: PortAddress): Promise<number> {
  const { promise, resolve, reject } = Promise.withResolvers<number>();
  const refuse = (cause: Error) => reject(listenProblem(host, port, variable, cause));
  server.once("error", refuse);
  server.listen({ host, port }, () => {
    server.off("error", refuse);
    keepReceiveBufferSmall(server, SMALL_BODIES_BUFFER_BYTES);
    server.on("error", (error) => log.error("listener_failed", { port: variable, error }));
    const address = server.address();
    resolve(typeof address === "object" && address !== null ? address.port : port);
  });
  return promise;
}

/** The open connections of a port. */
export class OpenSockets {
  readonly #sockets = new Set<Socket>();
  readonly #open = createInFlight();

  get size(): number {
    return this.#sockets.size;
  }

  /** @param closed called when the socket has closed */
  add(socket: Socket, closed: () => void): void {
    const leave = this.#open.enter();
    this.#sockets.add(socket);
    socket.on("error", () => socket.destroy());
    socket.on("close", () => {
      this.#sockets.delete(socket);
      closed();
      leave();
    });
  }

  closeAll(): void {
    for (const socket of this.#sockets) socket.destroy();
  }

  empty(): Promise<void> {
    return this.#open.idle();
  }
}

/** The client at the other end of a connection, as the port has identified it. */
export interface KnownPeer {
  /** Milliseconds since the epoch; from then on no request of the peer is answered. */
  readonly expiresAt: number;
}

/** Time limits of the phases of a connection. Routes limit the time of making a response themselves. */
export interface ConnectionLimits {
  /** From a response, or the handshake, to the first byte of the next request. */
  readonly idleMs: number;
  /** From the first byte of a request to the end of its head. */
  readonly headMs: number;
  /** From the end of the head to the end of the body. */
  readonly bodyMs: number;
  /** For the peer to take the response. */
  readonly flushMs: number;
}

export interface HttpOptions<P extends KnownPeer> {
  /** Never rejects. A body beyond `bodyBytesMax` is truncated to one byte more than that, so that its excess shows. */
  answer(request: Request, peer: P): Promise<Response>;
  readonly bodyBytesMax: number;
  readonly limits: ConnectionLimits;
  readonly clock: Clock;
  readonly log: Log;
}

interface CallerSocket<P> {
  readonly socket: Socket;
  readonly peer: P;
  phase: "idle" | "head" | "body" | "answer" | "flush";
  /** By performance.now(). */
  deadline: number;
  /** Bytes received in all when the last response was sent. */
  bytesSeen: number;
  /** Requests that are not answered yet. */
  open: number;
  /** Settles when all requests so far are answered. */
  last: Promise<void>;
  /** Whether no further request is answered. */
  isClosing: boolean;
}

export function serveConnections<P extends KnownPeer>({ answer, bodyBytesMax, limits, clock, log }: HttpOptions<P>) {
  const connections = new Map<object, CallerSocket<P>>();
  // Bun only announces keepAliveTimeout to the peer; sweep() enforces it.
  const server = createServer({ maxHeaderSize: MAX.plainHeadBytes, keepAliveTimeout: limits.idleMs });
  server.on("request", (request, response) => {
    const connection = connections.get(request.socket);
    if (connection === undefined) request.socket.destroy();
    else enqueue(connection, request, response);
  });
  server.on("clientError", (_error, socket) => {
    // While a response is being sent, these bytes would be taken for a part of it.
    if (connections.get(socket)?.open === 0 && socket.writable) socket.write(MALFORMED_HTTP);
    socket.destroy();
  });

  function enter(connection: CallerSocket<P>, phase: CallerSocket<P>["phase"], ms: number): void {
    connection.phase = phase;
    connection.deadline = performance.now() + ms;
  }

  function enqueue(connection: CallerSocket<P>, request: IncomingMessage, response: ServerResponse): void {
    connection.open++;
    if (connection.open > MAX.plainPipelined + 1) return void connection.socket.resetAndDestroy();
    connection.last = connection.last
      .then(() => exchange(connection, request, response))
      .catch((error) => {
        log.error("request_failed", { error });
        connection.socket.destroy();
      })
      .finally(() => {
        connection.open--;
        if (connection.open > 0) return;
        connection.bytesSeen = connection.socket.bytesRead;
        enter(connection, "idle", limits.idleMs);
      });
  }

  async function exchange(connection: CallerSocket<P>, incoming: IncomingMessage, outgoing: ServerResponse) {
    const { socket, peer } = connection;
    if (connection.isClosing) return void socket.destroy();
    enter(connection, "body", limits.bodyMs);
    const body = await readBody(incoming, bodyBytesMax);
    if (body === null || socket.destroyed) return;
    // The handshake checked the certificate's dates, but a connection may outlive the certificate.
    if (clock.now() >= peer.expiresAt) return void socket.destroy();
    enter(connection, "answer", Number.POSITIVE_INFINITY);
    const response = await answer(requestOf(incoming, body), peer);
    const bytes = await response.bytes();
    if (socket.destroyed) return;
    enter(connection, "flush", limits.flushMs);
    await send(outgoing, response, bytes, incoming.complete && !connection.isClosing);
  }

  return {
    take(socket: Socket, peer: P): void {
      connections.set(socket, newConnection(socket, peer, limits));
      socket.on("close", () => connections.delete(socket));
      server.emit("connection", socket);
    },
    /** Closes connections that have exceeded a time limit; to be called periodically. */
    sweep(): void {
      const now = performance.now();
      for (const connection of connections.values()) {
        const { phase, socket, bytesSeen } = connection;
        if (phase === "idle" && socket.bytesRead > bytesSeen) enter(connection, "head", limits.headMs);
        // Without the reset, bytes that the peer does not take keep the socket open for another ten seconds (measured).
        if (now > connection.deadline) socket.resetAndDestroy();
      }
    },
    /** The socket with the earliest deadline; null while all of them are being answered. */
    nextToClose(sockets: Iterable<Socket>): Socket | null {
      let next: Socket | null = null;
      let first = Number.POSITIVE_INFINITY;
      for (const socket of sockets) {
        const deadline = connections.get(socket)?.deadline ?? Number.POSITIVE_INFINITY;
        if (deadline < first) [next, first] = [socket, deadline];
      }
      return next;
    },
    /** Closes idle connections; the edge closes the others with their response. */
    closeIdle(): void {
      for (const { open, socket } of connections.values()) if (open === 0) socket.destroy();
    },
    /** Closes the connections of peers that are not trusted: idle ones at once, others after their response. */
    keep(isTrusted: (peer: P) => boolean): void {
      for (const connection of connections.values()) {
        if (isTrusted(connection.peer)) continue;
        connection.isClosing = true;
        if (connection.open === 0) connection.socket.destroy();
      }
    },
  };
}

function newConnection<P>(socket: Socket, peer: P, { idleMs }: ConnectionLimits): CallerSocket<P> {
  const [deadline, bytesSeen] = [performance.now() + idleMs, socket.bytesRead];
  return { socket, peer, phase: "idle", deadline, bytesSeen, open: 0, last: Promise.resolve(), isClosing: false };
}

/** Null when the body ended early. */
function readBody(incoming: IncomingMessage, bytesMax: number): Promise<Uint8Array<ArrayBuffer> | null> {
  const { promise, resolve } = Promise.withResolvers<Uint8Array<ArrayBuffer> | null>();
  const parts: Uint8Array[] = [];
  let [size, pieces] = [0, 0];
  const whole = () => resolve(Uint8Array.from(Buffer.concat(parts).subarray(0, bytesMax + 1)));
  incoming.on("data", (part: Uint8Array) => {
    if (size <= bytesMax) parts.push(part);
    size += part.length;
    if (++pieces === MAX.plainPieces) incoming.socket.destroy();
    if (size > MAX.plainDrainedBytes) whole();
  });
  incoming.on("end", whole);
  incoming.on("error", () => resolve(null));
  incoming.on("close", () => resolve(null));
  return promise;
}

/** The request for the router. Its host is a placeholder: routes read the path only. */
function requestOf(incoming: IncomingMessage, body: Uint8Array<ArrayBuffer>): Request {
  const headers = new Headers();
  for (const [name, value] of Object.entries(incoming.headers)) if (typeof value === "string") headers.set(name, value);
  const method = incoming.method ?? "GET";
  const url = `https://localhost${targetOf(incoming.url ?? "/")}`;
  return new Request(url, body.length === 0 ? { method, headers } : { method, headers, body });
}

/** The path and query of a request target in origin form or absolute form (RFC 9112 section 3.2). */
function targetOf(url: string): string {
  if (url.startsWith("/")) return url;
  const absolute = URL.parse(url);
  return absolute === null ? "/*" : absolute.pathname + absolute.search;
}

/** Resolves when the response has been handed to the system, or the connection is closed. */
function send(outgoing: ServerResponse, response: Response, bytes: Uint8Array, staysOpen: boolean): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  outgoing.on("finish", resolve);
  outgoing.on("close", resolve);
  outgoing.statusCode = response.status;
  for (const [name, value] of response.headers) outgoing.setHeader(name, value);
  outgoing.setHeader("content-length", bytes.length);
  if (!staysOpen) outgoing.setHeader("connection", "close");
  outgoing.end(bytes);
  return promise;
}
