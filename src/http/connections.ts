// The HTTP client, on the runtime's sockets. The runtime's `fetch` will not do (measured on Bun 1.4.5): it reads ahead of a
// body that nobody reads (1.4 MB of each), drops what has arrived of an answer when the connection closes before it was
// read (21 of 60 answers closed right after their first part, 42 of 60 destroyed; here none), and does not tell a reset
// from a close, nor when a request has left.
// One per thread, since all sockets of a thread share one buffer, which is emptied at each read.
import net from "node:net";
import tls from "node:tls";
import { during } from "../concurrency/loop-profile.ts";
import { tenantCache } from "../concurrency/tenant-cache.ts";
import { type CallBody, partsOf } from "../wire/body.ts";
import { Exchange } from "./exchange.ts";
import { ResponseParser } from "./response-parser.ts";
import { keepReceiveBufferSmall } from "./socket-options.ts";
import { TransportError, type TransportRequest } from "./transport.ts";

/** Short, since a server that drops idle connections unseen costs the call that finds out. */
const IDLE_SECONDS = 30;
/**
 * Connections that wait for another request, with a share for each tenant; of a tenant's the one that has waited longest
 * is closed first. One that may hold a TLS context of its own, with a copy of all roots (0.3 MB), counts as several.
 */
const IDLE_MAX = 1024;
const OWN_CONTEXT_WEIGHT = 4;
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
function placeOf({ url, address, tenant, serverName, tlsContext }: TransportRequest): string {
  return JSON.stringify([tenant, url.protocol, address, url.host, serverName, tlsContext.name]);
}

function headOf({ url, method, headers, body }: TransportRequest): Buffer {
  let fields = "";
  headers.forEach((value, name) => {
    fields += `${name}: ${value}\r\n`;
  });
  const length = body === null && method !== "POST" ? "" : `content-length: ${body?.byteLength ?? 0}\r\n`;
  const head = `${method} ${url.pathname}${url.search} HTTP/1.1\r\n${fields}${length}connection: keep-alive\r\n\r\n`;
  return Buffer.from(head, "latin1");
}

/** How long the connection can be kept after this answer. */
function keptSeconds(fields: readonly string[]): number {
  for (let at = 0; at + 1 < fields.length; at += 2) {
    if (fields[at]?.toLowerCase() !== "keep-alive") continue;
    const timeout = KEEP_ALIVE_TIMEOUT.exec(fields[at + 1] ?? "")?.[1];
    if (timeout !== undefined) return Math.min(IDLE_SECONDS, Number(timeout) - KEEP_ALIVE_MARGIN_SECONDS);
  }
  return IDLE_SECONDS;
}

/**
 * Sockets read into this buffer, which keeps them from reading ahead; the runtime delivers no more than its size in one
 * piece. All sockets share it, because it is emptied at each read.
 */
let arrivals: Uint8Array | null = null;
const ARRIVAL_BYTES_MAX = 512 * 1024;

/** Gets what comes on a socket; set by the connection. The bytes are there for the time of the call only. */
interface Arrivals {
  take: ((bytes: Uint8Array) => void) | null;
}

function readingInto(to: Arrivals) {
  arrivals ??= new Uint8Array(ARRIVAL_BYTES_MAX);
  const buffer = arrivals;
  const callback = (length: number) => {
    to.take?.(buffer.subarray(0, length));
    return true;
  };
  return { buffer, callback };
}

interface Dialled {
  readonly socket: net.Socket;
  readonly arrives: Arrivals;
}

class UpstreamConnection {
  readonly place: string;
  readonly tenant: string;
  /** Of those that are kept. */
  readonly weight: number;
  readonly #socket: net.Socket;
  readonly #parser = new ResponseParser();
  readonly #pool: IdleConnections;
  #exchange: Exchange | null = null;
  #isSending = false;
  #isClosed = false;
  #timer: ReturnType<typeof setTimeout> | undefined;
  isOver = false;
  /** Whether any byte has come of the answer to the latest request. */
  isAnswered = false;

  constructor({ socket, arrives }: Dialled, place: string, request: TransportRequest, pool: IdleConnections) {
    this.place = place;
    this.tenant = request.tenant;
    this.weight = request.tlsContext.name === "" ? 1 : OWN_CONTEXT_WEIGHT;
    this.#socket = socket;
    this.#pool = pool;
    arrives.take = (bytes) => {
      // Nobody asked for these bytes: they must not become the answer to the next request.
      if (this.#exchange === null) return this.end();
      this.isAnswered = true;
      this.#exchange.arrived(bytes);
    };
    socket.on("end", () => this.#lost("closed"));
    socket.on("error", () => this.#lost("broken"));
    socket.on("close", () => {
      this.#isClosed = true;
      this.#lost("broken");
    });
  }

  /** @throws TransportError; the signal's reason */
  exchange(request: TransportRequest): Promise<Response> {
    clearTimeout(this.#timer);
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
    const [head, body] = [headOf(request), request.body ?? new Uint8Array()];
    // In one write if possible: after a reset, a second write would discard what has arrived by then.
    if (body instanceof Uint8Array && body.length <= JOINED_BYTES_MAX)
      socket.write(Buffer.concat([head, body]), isSent);
    else {
      socket.write(head);
      writeInParts(socket, body, isSent);
    }
    return exchange.response;
  }

  end(): void {
    if (this.isOver) return;
    this.isOver = true;
    this.#pool.isOver(this);
    clearTimeout(this.#timer);
    this.#socket.destroy();
    this.#parser.free();
  }

  #wait(seconds: number): void {
    this.#socket.unref();
    this.#timer = setTimeout(() => this.end(), 1000 * seconds);
    this.#timer.unref();
    this.#pool.isFree(this);
  }

  #lost(how: "closed" | "broken"): void {
    if (this.#exchange === null) this.end();
    else this.#exchange.connectionEnded(how);
  }
}

function* piecesOf(body: CallBody): Generator<Uint8Array, void> {
  for (const part of partsOf(body)) {
    for (let at = 0; at < part.length; at += PIECE_BYTES) yield part.subarray(at, at + PIECE_BYTES);
  }
}

/** In pieces, because what a socket does not take at once is copied again and again: 32 MiB blocked the loop for 40 ms. */
function writeInParts(socket: net.Socket, body: CallBody, isSent: () => void): void {
  const pieces = piecesOf(body);
  const writeNext = (error?: Error | null) => {
    const { value } = pieces.next();
    if (error != null || value === undefined) return isSent();
    during("send of a body", () => socket.write(value, writeNext));
  };
  writeNext();
}

/** @throws the socket's error; the signal's reason */
async function dialled({ socket, arrives }: Dialled, connected: string, signal: AbortSignal): Promise<Dialled> {
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

function dial({ url, address, serverName, tlsContext, signal, certified }: TransportRequest): Promise<Dialled> {
  const arrives: Arrivals = { take: null };
  const reading = { host: address, onread: readingInto(arrives) };
  if (url.protocol === "http:") {
    const socket = net.connect({ ...reading, port: Number(url.port || 80), noDelay: true });
    return dialled({ socket, arrives }, "connect", signal);
  }
  const { secureContext } = tlsContext;
  const socket = tls.connect({
    ...reading,
    port: Number(url.port || 443),
    ALPNProtocols: ["http/1.1"],
    // Set explicitly, because NODE_TLS_REJECT_UNAUTHORIZED could switch it off.
    rejectUnauthorized: true,
    servername: serverName ?? "",
    ...(secureContext && { secureContext }),
  });
  if (certified) socket.once("secureConnect", () => certified(Date.parse(socket.getPeerCertificate().valid_to)));
  return dialled({ socket: socket.setNoDelay(true), arrives }, "secureConnect", signal);
}

/** The connections that wait for another request. */
class IdleConnections {
  /** By place, the one that has waited shortest last. */
  readonly #idle = new Map<string, UpstreamConnection[]>();
  readonly #kept = tenantCache<UpstreamConnection, true>(IDLE_MAX, (connection) => connection.end());

  take(place: string): UpstreamConnection | null {
    const connection = this.#idle.get(place)?.at(-1) ?? null;
    if (connection !== null) this.#remove(connection);
    return connection;
  }

  isFree(connection: UpstreamConnection): void {
    const same = this.#idle.get(connection.place);
    if (same === undefined) this.#idle.set(connection.place, [connection]);
    else same.push(connection);
    this.#kept.set(connection.tenant, connection, true, connection.weight);
  }

  isOver(connection: UpstreamConnection): void {
    this.#remove(connection);
  }

  #remove(connection: UpstreamConnection): void {
    this.#kept.delete(connection);
    const same = this.#idle.get(connection.place) ?? [];
    const at = same.lastIndexOf(connection);
    if (at >= 0) same.splice(at, 1);
    if (same.length === 0) this.#idle.delete(connection.place);
  }
}

export function openTransport() {
  const pool = new IdleConnections();

  /**
   * Resolves with the final response head as it came; its body is still encoded and must be read or cancelled.
   *
   * @throws errors with a code
   */
  async function send(request: TransportRequest): Promise<Response> {
    const place = placeOf(request);
    const kept = pool.take(place);
    const connection = kept ?? new UpstreamConnection(await dial(request), place, request, pool);
    try {
      return await connection.exchange(request);
    } catch (error) {
      // The server may have closed the connection before it saw this.
      const isStale = kept !== null && !connection.isAnswered && request.method !== "POST";
      if (!isStale || request.signal.aborted) throw error;
      return send(request);
    }
  }

  return { send };
}
