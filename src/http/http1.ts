// HTTP/1.1 on connections that a port has accepted itself, because it tells them apart or counts them: one request after
// another on each, and every part of one within a time limit, since Bun's node:http enforces none on a connection that is
// handed to it (measured). Bodies are read before they are judged, up to a bound; answers are small.
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { Server, Socket } from "node:net";
import type { Log } from "../core/log.ts";
import { listenProblem } from "../core/startup.ts";
import type { Clock } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";
import { keepReceiveBufferSmall, SMALL_BODIES_BUFFER_BYTES } from "./bun/socket-options.ts";
import { MALFORMED_HTTP } from "./responses.ts";

export interface PortAddress {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  /** Where the operator has set the port. */
  readonly variable: string;
}

/** @returns the port; @throws StartupProblem when the server can't have its address */
export function listenAt(server: Server, { host, port, variable }: PortAddress, log: Log): Promise<number> {
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
  readonly #awaitEmpty: (() => void)[] = [];

  get size(): number {
    return this.#sockets.size;
  }

  /** @param closed called when it is gone */
  add(socket: Socket, closed: () => void): void {
    this.#sockets.add(socket);
    socket.on("error", () => socket.destroy());
    socket.on("close", () => {
      this.#sockets.delete(socket);
      closed();
      if (this.size === 0) for (const tell of this.#awaitEmpty.splice(0)) tell();
    });
  }

  closeAll(): void {
    for (const socket of this.#sockets) socket.destroy();
  }

  async empty(): Promise<void> {
    if (this.size > 0) await new Promise<void>((resolve) => this.#awaitEmpty.push(resolve));
  }
}

/** Who is at the other end. */
export interface KnownPeer {
  /** Milliseconds since the epoch: no request is answered from then on. */
  readonly expiresAt: number;
}

/** Milliseconds. There is none for making an answer, which has a limit of its own. */
export interface ConnectionLimits {
  /** From an answer, or the handshake, to the first byte of the next request. */
  readonly idleMs: number;
  /** From then to the end of its head. */
  readonly headMs: number;
  /** From then to the end of its body. */
  readonly bodyMs: number;
  /** For the peer to take the answer. */
  readonly flushMs: number;
}

export interface HttpOptions<P extends KnownPeer> {
  /** Never rejects. A body beyond `bodyBytesMax` is handed over cut to one byte more than that. */
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
  /** On the scale of performance.now(). */
  deadline: number;
  /** What had come in when the last answer was sent. */
  bytesSeen: number;
  /** Requests that are not answered yet. */
  open: number;
  /** Settles when they all are. */
  last: Promise<void>;
  /** No further request is answered. */
  isLeaving: boolean;
}

export function serveConnections<P extends KnownPeer>({ answer, bodyBytesMax, limits, clock, log }: HttpOptions<P>) {
  const connections = new Map<object, CallerSocket<P>>();
  // Bun only tells the peer of this time; the sweep enforces it.
  const server = createServer({ maxHeaderSize: MAX.plainHeadBytes, keepAliveTimeout: limits.idleMs });
  server.on("request", (request, response) => {
    const connection = connections.get(request.socket);
    if (connection === undefined) request.socket.destroy();
    else enqueue(connection, request, response);
  });
  server.on("clientError", (_error, socket) => {
    // While an answer is being sent, this would be taken for a part of it.
    if (connections.get(socket)?.open === 0 && socket.writable) socket.write(MALFORMED_HTTP);
    socket.destroy();
  });

  function enter(connection: CallerSocket<P>, phase: CallerSocket<P>["phase"], ms: number): void {
    connection.phase = phase;
    connection.deadline = performance.now() + ms;
  }

  function rest(connection: CallerSocket<P>): void {
    connection.bytesSeen = connection.socket.bytesRead;
    enter(connection, "idle", limits.idleMs);
  }

  function enqueue(connection: CallerSocket<P>, request: IncomingMessage, response: ServerResponse): void {
    connection.open++;
    if (connection.open > MAX.plainPipelined + 1) {
      connection.socket.resetAndDestroy();
      return;
    }
    connection.last = connection.last
      .then(() => exchange(connection, request, response))
      .catch((error) => {
        log.error("request_failed", { error });
        connection.socket.destroy();
      })
      .finally(() => {
        connection.open--;
        if (connection.open === 0) rest(connection);
      });
  }

  async function exchange(connection: CallerSocket<P>, incoming: IncomingMessage, outgoing: ServerResponse) {
    const { socket, peer } = connection;
    if (connection.isLeaving) {
      socket.destroy();
      return;
    }
    enter(connection, "body", limits.bodyMs);
    const body = await readBody(incoming, bodyBytesMax);
    if (body === null || socket.destroyed) return;
    // The handshake looked at the certificate's dates, but a connection may outlive them.
    if (clock.now() >= peer.expiresAt) {
      socket.destroy();
      return;
    }
    enter(connection, "answer", Number.POSITIVE_INFINITY);
    const response = await answer(requestOf(incoming, body), peer);
    const bytes = await response.bytes();
    if (socket.destroyed) return;
    enter(connection, "flush", limits.flushMs);
    await send(outgoing, response, bytes, incoming.complete && !connection.isLeaving);
  }

  return {
    take(socket: Socket, peer: P): void {
      connections.set(socket, newConnection(socket, peer, limits));
      socket.on("close", () => connections.delete(socket));
      server.emit("connection", socket);
    },
    /** Closes connections whose time is up: to be called every now and then. */
    sweep(): void {
      const now = performance.now();
      for (const connection of connections.values()) {
        const { phase, socket, bytesSeen } = connection;
        if (phase === "idle" && socket.bytesRead > bytesSeen) enter(connection, "head", limits.headMs);
        // Without the reset, what the peer does not take keeps the socket for another ten seconds (measured).
        if (now > connection.deadline) socket.resetAndDestroy();
      }
    },
    /** Among the sockets, the one whose time is up first; null while all of them are being answered. */
    nextToClose(sockets: Iterable<Socket>): Socket | null {
      let next: Socket | null = null;
      let first = Number.POSITIVE_INFINITY;
      for (const socket of sockets) {
        const deadline = connections.get(socket)?.deadline ?? Number.POSITIVE_INFINITY;
        if (deadline < first) [next, first] = [socket, deadline];
      }
      return next;
    },
    /** Closes what is idle; the answer of the edge closes the others. */
    closeIdle(): void {
      for (const { open, socket } of connections.values()) if (open === 0) socket.destroy();
    },
    /** Closes the connections of all others: at once, or with the answer that they are at work on. */
    keep(isTrusted: (peer: P) => boolean): void {
      for (const each of connections.values()) if (!isTrusted(each.peer)) leave(each);
    },
  };
}

function newConnection<P>(socket: Socket, peer: P, { idleMs }: ConnectionLimits): CallerSocket<P> {
  return {
    socket,
    peer,
    phase: "idle",
    deadline: performance.now() + idleMs,
    bytesSeen: socket.bytesRead,
    open: 0,
    last: Promise.resolve(),
    isLeaving: false,
  };
}

function leave(connection: CallerSocket<KnownPeer>): void {
  connection.isLeaving = true;
  if (connection.open === 0) connection.socket.destroy();
}

/** Null when the connection ended early. */
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

/** The host in it means nothing: routes look at the path. */
function requestOf(incoming: IncomingMessage, body: Uint8Array<ArrayBuffer>): Request {
  const headers = new Headers();
  for (const [name, value] of Object.entries(incoming.headers)) {
    if (typeof value === "string") headers.set(name, value);
  }
  const method = incoming.method ?? "GET";
  const url = `https://localhost${targetOf(incoming.url ?? "/")}`;
  return new Request(url, body.length === 0 ? { method, headers } : { method, headers, body });
}

/** The path and query, of the absolute form too (RFC 9112 section 3.2). */
function targetOf(url: string): string {
  if (url.startsWith("/")) return url;
  const absolute = URL.parse(url);
  return absolute === null ? "/*" : absolute.pathname + absolute.search;
}

/** Resolves when the answer has been taken over, or the connection is gone. */
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
