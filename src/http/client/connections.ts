// The HTTP client, on the runtime's sockets. The runtime's `fetch` will not do (measured on Bun 1.4.5): it reads ahead of a
// body that nobody reads (1.4 MB of each), drops what has arrived of an answer when the connection closes before it was
// read (21 of 60 answers closed right after their first part, 42 of 60 destroyed; here none), and does not tell a reset
// from a close, nor when a request has left. A version of Bun whose `fetch` does none of this makes the client unnecessary.
import net from "node:net";
import tls from "node:tls";
import { tenantCache } from "../../kernel/cache.ts";
import { createLimiter } from "../../kernel/share.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import { bodyPartsOf, type CallBody } from "../../wire/body.ts";
import { keepReceiveBufferSmall } from "../bun/socket-options.ts";
import { type Answer, isNamed } from "./answer.ts";
import { Exchange, TransportError, type TransportRequest } from "./exchange.ts";
import { ResponseParser } from "./response-parser.ts";

/** Short, since a server that drops idle connections unseen costs the call that finds out. */
const IDLE_SECONDS = 30;
/** One that may hold a TLS context of its own, with a copy of all roots (0.3 MB), counts as several. */
const OWN_CONTEXT_WEIGHT = 4;
const NOTHING = new Uint8Array();
/** How much of a body is written at a time. */
const PIECE_BYTES = 262_144;
/** A body up to this size is copied after its head, to be sent with it. */
const JOINED_BYTES_MAX = 64 * 1024;
/** If a server tells how long it keeps a connection, it is not used for the last second before that. */
const KEEP_ALIVE_MARGIN_SECONDS = 1;
const KEEP_ALIVE_TIMEOUT = /(?:^|[,;\s])timeout=(\d{1,9})\s*(?:$|[,;])/i;

/**
 * Where a connection leads, and what it shows there. Names that share an address share no connections, since their servers
 * may belong to strangers. Nor do tenants: what one has left on a connection must not meet another's request.
 */
function placeOf({ target, address, tenant, tlsContext }: TransportRequest): string {
  return JSON.stringify([tenant, target.isTls, address, target.host, target.serverName, tlsContext.name]);
}

function headOf({ target, method, fields, body }: TransportRequest): string {
  const length = body === null && method !== "POST" ? "" : `content-length: ${body?.byteLength ?? 0}\r\n`;
  return `${method} ${target.path} HTTP/1.1\r\nhost: ${target.host}\r\n${fields}${length}connection: keep-alive\r\n\r\n`;
}

/** The head and the body in one piece. */
function joined(head: string, body: Uint8Array): Uint8Array {
  const bytes = Buffer.allocUnsafe(head.length + body.length);
  bytes.write(head, "latin1");
  bytes.set(body, head.length);
  return bytes;
}

/** How long the connection can be kept after this answer. */
function keptSeconds(fields: readonly string[]): number {
  for (let at = 0; at + 1 < fields.length; at += 2) {
    if (!isNamed(fields[at] ?? "", "keep-alive")) continue;
    const timeout = KEEP_ALIVE_TIMEOUT.exec(fields[at + 1] ?? "")?.[1];
    if (timeout !== undefined) return Math.min(IDLE_SECONDS, Number(timeout) - KEEP_ALIVE_MARGIN_SECONDS);
  }
  return IDLE_SECONDS;
}

/**
 * Sockets read into this buffer, which keeps them from reading ahead; the runtime delivers no more than its size in one
 * piece. All sockets share it, because it is emptied at each read.
 */
const ARRIVALS = new Uint8Array(512 * 1024);

/** Gets what comes on a socket, so much of the buffer; set by the connection. It is there for the time of the call only. */
interface Arrivals {
  take: ((bytes: Uint8Array, length: number) => void) | null;
}

function readingInto(to: Arrivals) {
  const callback = (length: number) => {
    to.take?.(ARRIVALS, length);
    return true;
  };
  return { buffer: ARRIVALS, callback };
}

interface Dialled {
  readonly socket: net.Socket;
  readonly arrives: Arrivals;
}

class UpstreamConnection implements KeptConnection {
  readonly place: string;
  readonly tenant: string;
  /** Its part of the connections that are kept. */
  readonly weight: number;
  readonly #socket: net.Socket;
  readonly #parser = new ResponseParser();
  readonly #pool: IdleConnections<UpstreamConnection>;
  #exchange: Exchange | null = null;
  #isSending = false;
  #isClosed = false;
  /** While it waits for another request: when it is too old for one, of performance.now(). */
  idleUntil = 0;
  isOver = false;
  /** Whether any byte has come of the answer to the latest request. */
  isAnswered = false;

  constructor(
    { socket, arrives }: Dialled,
    place: string,
    request: TransportRequest,
    pool: IdleConnections<UpstreamConnection>,
  ) {
    this.place = place;
    this.tenant = request.tenant;
    this.weight = request.tlsContext.name === "" ? 1 : OWN_CONTEXT_WEIGHT;
    this.#socket = socket;
    this.#pool = pool;
    arrives.take = (bytes, length) => {
      // Nobody asked for these bytes: they must not become the answer to the next request.
      if (this.#exchange === null) return this.end();
      this.isAnswered = true;
      this.#exchange.arrived(bytes, length);
    };
    socket.on("end", () => this.#lost("closed"));
    socket.on("error", () => this.#lost("broken"));
    socket.on("close", () => {
      this.#isClosed = true;
      this.#lost("broken");
    });
  }

  /** @throws TransportError; the signal's reason */
  exchange(request: TransportRequest): Promise<Answer> {
    const socket = this.#socket;
    socket.ref();
    const exchange = new Exchange({
      socket,
      parser: this.#parser,
      request,
      over: (isClean) => {
        this.#exchange = null;
        const seconds = keptSeconds(exchange.head?.fields ?? []);
        const isReusable = isClean && this.#parser.keepsAlive && !this.#isSending && seconds > 0;
        if (isReusable && !this.isOver) return this.#wait(seconds);
        // A socket holds what it has not sent until it is closed.
        if (this.#isClosed) request.sent?.();
        else if (this.#isSending) socket.once("close", () => request.sent?.());
        this.end();
      },
    });
    this.#exchange = exchange;
    this.isAnswered = false;
    this.#isSending = true;
    const isSent = () => {
      this.#isSending = false;
      request.sent?.();
    };
    const head = headOf(request);
    const body = request.body ?? NOTHING;
    // In one write if possible: after a reset, a second write would discard what has arrived by then.
    if (body instanceof Uint8Array && body.length <= JOINED_BYTES_MAX) socket.write(joined(head, body), isSent);
    else {
      socket.write(head, "latin1");
      writeInParts(socket, body, isSent);
    }
    return exchange.response;
  }

  end(): void {
    if (this.isOver) return;
    this.isOver = true;
    this.#pool.isOver(this);
    this.#socket.destroy();
    this.#parser.free();
  }

  #wait(seconds: number): void {
    this.#socket.unref();
    this.idleUntil = performance.now() + 1000 * seconds;
    this.#pool.isFree(this);
  }

  #lost(how: "closed" | "broken"): void {
    if (this.#exchange === null) this.end();
    else this.#exchange.connectionEnded(how);
  }
}

function* piecesOf(body: CallBody): Generator<Uint8Array, void> {
  for (const part of bodyPartsOf(body)) {
    for (let at = 0; at < part.length; at += PIECE_BYTES) yield part.subarray(at, at + PIECE_BYTES);
  }
}

/** In pieces, because what a socket does not take at once is copied again and again: 32 MiB blocked the loop for 40 ms. */
function writeInParts(socket: net.Socket, body: CallBody, isSent: () => void): void {
  const pieces = piecesOf(body);
  const writeNext = (error?: Error | null) => {
    const { value } = pieces.next();
    if (error != null || value === undefined) return isSent();
    socket.write(value, writeNext);
  };
  writeNext();
}

/** @throws the socket's error; the signal's reason */
async function dialled({ socket, arrives }: Dialled, connected: string, signal: StopSignal): Promise<Dialled> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const onAbort = () => reject(signal.reason);
  const onEarly = () => reject(new TransportError("ECONNRESET"));
  signal.addEventListener("abort", onAbort, { once: true });
  arrives.take = onEarly;
  socket.once("connect", () => keepReceiveBufferSmall(socket));
  socket.once(connected, () => resolve());
  socket.on("error", reject);
  socket.once("close", onEarly);
  try {
    await promise;
    signal.throwIfAborted();
    return { socket, arrives };
  } catch (error) {
    socket.destroy();
    throw error;
  } finally {
    signal.removeEventListener("abort", onAbort);
  }
}

function dial({ target, address, tlsContext, signal, certified }: TransportRequest): Promise<Dialled> {
  const arrives: Arrivals = { take: null };
  const reading = { host: address, onread: readingInto(arrives) };
  if (!target.isTls) {
    const socket = net.connect({ ...reading, port: Number(target.port || 80), noDelay: true });
    return dialled({ socket, arrives }, "connect", signal);
  }
  const { secureContext } = tlsContext;
  const socket = tls.connect({
    ...reading,
    port: Number(target.port || 443),
    ALPNProtocols: ["http/1.1"],
    // Set explicitly, because NODE_TLS_REJECT_UNAUTHORIZED could switch it off.
    rejectUnauthorized: true,
    servername: target.serverName ?? "",
    ...(secureContext && { secureContext }),
  });
  if (certified) socket.once("secureConnect", () => certified(Date.parse(socket.getPeerCertificate().valid_to)));
  return dialled({ socket: socket.setNoDelay(true), arrives }, "secureConnect", signal);
}

/** Connections whose key is slow to sign with: so many are made at once, and each takes so long at least. */
const SLOW_AT_ONCE = 4;
const SLOW_DIAL_MS = 100;

export function openTransport() {
  const pool = new IdleConnections<UpstreamConnection>();
  const few = createLimiter({ size: SLOW_AT_ONCE, tooMany: "too many connections with long keys" });

  async function dialSlowly(request: TransportRequest): Promise<Dialled> {
    const work = () => Promise.allSettled([dial(request), Bun.sleep(SLOW_DIAL_MS)]);
    const [outcome] = await few(request.tenant, work).catch(() => {
      throw new TransportError("EBUSY");
    });
    if (outcome.status === "rejected") throw outcome.reason;
    return outcome.value;
  }

  async function dialAndSend(request: TransportRequest, place: string): Promise<Answer> {
    const dialled = await (request.tlsContext.isSlowToSign ? dialSlowly(request) : dial(request));
    return sendOn(new UpstreamConnection(dialled, place, request, pool), request);
  }

  function sendOn(connection: UpstreamConnection, request: TransportRequest): Promise<Answer> {
    return request.leaving === undefined
      ? connection.exchange(request)
      : sendAfter(request.leaving, connection, request);
  }

  async function sendAfter(leaving: () => Promise<void>, connection: UpstreamConnection, request: TransportRequest) {
    try {
      await leaving();
    } catch (error) {
      connection.end();
      throw error;
    }
    return connection.exchange(request);
  }

  /** What may happen twice is sent again: the server may have closed the connection before it saw this. */
  async function sendOnKept(request: TransportRequest, kept: UpstreamConnection): Promise<Answer> {
    try {
      return await kept.exchange(request);
    } catch (error) {
      if (kept.isAnswered || request.signal.aborted) throw error;
      return send(request);
    }
  }

  /**
   * Resolves with the final response head as it came; its body is still encoded and must be read or cancelled.
   *
   * @throws errors with a code
   */
  function send(request: TransportRequest): Promise<Answer> {
    const place = placeOf(request);
    const kept = pool.take(place);
    if (kept === null) return dialAndSend(request, place);
    return request.method === "POST" ? sendOn(kept, request) : sendOnKept(request, kept);
  }

  return { send };
}

/** A connection as far as its wait is concerned. */
export interface KeptConnection {
  readonly place: string;
  readonly tenant: string;
  /** Its part of all that may be kept. */
  readonly weight: number;
  /** When it is too old for another request, of performance.now(). */
  readonly idleUntil: number;
  end(): void;
}

/** With a share for each tenant; of a tenant's the one that has waited longest is closed first. */
const IDLE_MAX = 1024;
const SWEEP_MS = 1000;

export class IdleConnections<Connection extends KeptConnection> {
  /** By place, the one that has waited shortest last. */
  readonly #idle = new Map<string, Connection[]>();
  #isSweeping = false;
  readonly #sweepMs: number;
  readonly #kept = tenantCache<Connection, true>(IDLE_MAX, (connection) => connection.end());

  constructor(sweepMs = SWEEP_MS) {
    this.#sweepMs = sweepMs;
  }

  take(place: string): Connection | null {
    const connection = this.#idle.get(place)?.at(-1);
    if (connection === undefined) return null;
    this.#remove(connection);
    if (performance.now() < connection.idleUntil) return connection;
    connection.end();
    return this.take(place);
  }

  isFree(connection: Connection): void {
    const same = this.#idle.get(connection.place);
    if (same === undefined) this.#idle.set(connection.place, [connection]);
    else same.push(connection);
    this.#kept.set(connection.tenant, connection, true, connection.weight);
    this.#sweepLater();
  }

  isOver(connection: Connection): void {
    this.#remove(connection);
  }

  /** One timer for all: one for each wait would cost each call 0.5 µs. Who takes a connection looks at its time, too. */
  #sweepLater(): void {
    if (this.#isSweeping || this.#idle.size === 0) return;
    this.#isSweeping = true;
    setTimeout(() => {
      this.#isSweeping = false;
      const now = performance.now();
      const old = [...this.#idle.values()].flat().filter(({ idleUntil }) => idleUntil <= now);
      for (const connection of old) connection.end();
      this.#sweepLater();
    }, this.#sweepMs).unref();
  }

  #remove(connection: Connection): void {
    this.#kept.delete(connection);
    const same = this.#idle.get(connection.place) ?? [];
    const at = same.lastIndexOf(connection);
    if (at >= 0) same.splice(at, 1);
    if (same.length === 0) this.#idle.delete(connection.place);
  }
}
