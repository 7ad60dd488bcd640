// Connections to upstreams, on the runtime's sockets: dialled at an address that the host rules allow, with TLS where the URL
// says so, and pooled by tenant for further requests.
import { createPrivateKey } from "node:crypto";
import net from "node:net";
import tls from "node:tls";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { createLimiter } from "../../kernel/share.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import { bodyPartsOf, type CallBody } from "../../wire/body.ts";
import { keepReceiveBufferSmall } from "../bun/socket-options.ts";
import { type Answer, type DialTarget, Exchange, type SentRequest, TransportError } from "./exchange.ts";
import { type AnswerHeaders, ResponseParser } from "./response-parser.ts";

/** A request that goes to an address that has been resolved and judged. */
interface PinnedRequest extends SentRequest {
  readonly target: DialTarget;
  readonly address: string;
  /** The header lines, without Host, Connection and Content-Length. */
  readonly fields: string;
  readonly tenant: string;
  readonly tlsContext: TlsContext;
}

/** Short, since a call that finds its pooled connection silently dropped by the server is lost. */
const IDLE_SECONDS = 30;
/** Pool weight of a connection with a TLS context of its own, which may hold a copy of all roots (0.3 MB). */
const OWN_CONTEXT_WEIGHT = 4;
const NOTHING = new Uint8Array();
/** Bytes of one write. A socket copies unsent bytes again and again: 32 MiB in one write blocked the loop for 40 ms. */
const PIECE_BYTES = 262_144;
/** A body up to this size is sent in one write with its head: after a reset, a second write would discard received bytes. */
const JOINED_BYTES_MAX = 64 * 1024;
/** A connection is not reused in the last second of the time for which its server keeps it. */
const KEEP_ALIVE_MARGIN_SECONDS = 1;
const KEEP_ALIVE_TIMEOUT = /(?:^|[,;\s])timeout=(\d{1,9})\s*(?:$|[,;])/i;

/**
 * The pool key of a connection. Names with one address share none, since their servers may belong to different owners. Nor do
 * tenants: what one has left on a connection must not meet another's request.
 */
const poolKey = ({ target, address, tenant, tlsContext }: PinnedRequest): string =>
  JSON.stringify([tenant, target.isTls, address, target.host, target.serverName, tlsContext.name]);

function headOf({ target, method, fields, body = null }: PinnedRequest): string {
  const length = body === null && method !== "POST" ? "" : `content-length: ${body?.byteLength ?? 0}\r\n`;
  return `${method} ${target.path} HTTP/1.1\r\nhost: ${target.host}\r\n${fields}${length}connection: keep-alive\r\n\r\n`;
}

function joinedRequest(head: string, body: Uint8Array): Uint8Array {
  const bytes = Buffer.allocUnsafe(head.length + body.length);
  bytes.write(head, "latin1");
  bytes.set(body, head.length);
  return bytes;
}

/** How long the connection can be pooled after this answer, in seconds. */
function keptSeconds(headers: AnswerHeaders | undefined): number {
  const timeout = KEEP_ALIVE_TIMEOUT.exec(headers?.get("keep-alive") ?? "")?.[1];
  return timeout === undefined ? IDLE_SECONDS : Math.min(IDLE_SECONDS, Number(timeout) - KEEP_ALIVE_MARGIN_SECONDS);
}

/** Sockets read into it, so that they don't read ahead of its size. All share it, since each read is processed before the next. */
const ARRIVALS = new Uint8Array(512 * 1024);

/** Where a socket delivers received bytes. They are the first `length` of `bytes`, valid during the call only. */
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
  readonly arrivals: Arrivals;
}

type Pool = IdleConnections<UpstreamConnection>;

/** A connection that carries one exchange at a time and waits in the pool in between. */
class UpstreamConnection implements IdleConnection {
  readonly key: string;
  readonly tenant: string;
  readonly weight: number;
  readonly #socket: net.Socket;
  readonly #parser = new ResponseParser();
  readonly #pool: Pool;
  #exchange: Exchange | null = null;
  #isSending = false;
  #isClosed = false;
  idleUntil = 0;
  isEnded = false;
  /** Whether any byte of the answer to the latest request has arrived. */
  isAnswered = false;

  constructor({ socket, arrivals }: Dialled, key: string, request: PinnedRequest, pool: Pool) {
    this.key = key;
    this.tenant = request.tenant;
    this.weight = request.tlsContext.name === "" ? 1 : OWN_CONTEXT_WEIGHT;
    this.#socket = socket;
    this.#pool = pool;
    arrivals.take = (bytes, length) => {
      // Unsolicited bytes must not become the answer to the next request.
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
  exchange(request: PinnedRequest): Promise<Answer> {
    // It may have been stopped since it was dialled, and a signal that is aborted already would never end the exchange.
    if (request.signal.aborted) this.end();
    request.signal.throwIfAborted();
    // The server may have closed it since it was dialled, and the socket emits no further event. Nothing has been sent.
    if (this.isEnded) throw new TransportError("ENOTCONN");
    request.connected?.();
    const socket = this.#socket;
    socket.ref();
    const exchange = new Exchange({
      socket,
      parser: this.#parser,
      request,
      over: (isClean) => {
        this.#exchange = null;
        const seconds = keptSeconds(exchange.head?.headers);
        const isReusable = isClean && this.#parser.keepsAlive && !this.#isSending && seconds > 0;
        if (isReusable && !this.isEnded) return this.#wait(seconds);
        // A socket holds unsent bytes until it is closed.
        if (this.#isClosed) request.sent?.();
        else if (this.#isSending) socket.once("close", () => request.sent?.());
        this.end();
      },
    });
    this.#exchange = exchange;
    this.isAnswered = false;
    this.#isSending = true;
    const onSent = () => {
      this.#isSending = false;
      request.sent?.();
    };
    const head = headOf(request);
    const body = request.body ?? NOTHING;
    if (body instanceof Uint8Array && body.length <= JOINED_BYTES_MAX) socket.write(joinedRequest(head, body), onSent);
    else {
      socket.write(head, "latin1");
      writeInPieces(socket, body, onSent);
    }
    return exchange.response;
  }

  end(): void {
    if (this.isEnded) return;
    this.isEnded = true;
    this.#pool.remove(this);
    this.#socket.destroy();
    this.#parser.free();
  }

  #wait(seconds: number): void {
    this.#socket.unref();
    this.idleUntil = performance.now() + 1000 * seconds;
    this.#pool.add(this);
  }

  #lost(how: "closed" | "broken"): void {
    if (this.#exchange === null) this.end();
    else this.#exchange.connectionEnded(how);
  }
}

function* writtenPieces(body: CallBody): Generator<Uint8Array, void> {
  for (const part of bodyPartsOf(body)) {
    for (let at = 0; at < part.length; at += PIECE_BYTES) yield part.subarray(at, at + PIECE_BYTES);
  }
}

function writeInPieces(socket: net.Socket, body: CallBody, onSent: () => void): void {
  const pieces = writtenPieces(body);
  const writeNext = (error?: Error | null) => {
    const { value } = pieces.next();
    if (error != null || value === undefined) return onSent();
    socket.write(value, writeNext);
  };
  writeNext();
}

/** @throws the socket's error; the signal's reason */
async function dialled({ socket, arrivals }: Dialled, connected: string, signal: StopSignal): Promise<Dialled> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const onAbort = () => reject(signal.reason);
  const onEarly = () => reject(new TransportError("ECONNRESET"));
  signal.addEventListener("abort", onAbort, { once: true });
  arrivals.take = onEarly;
  socket.once("connect", () => keepReceiveBufferSmall(socket));
  socket.once(connected, () => resolve());
  socket.on("error", reject);
  socket.once("close", onEarly);
  try {
    await promise;
    signal.throwIfAborted();
    return { socket, arrivals };
  } catch (error) {
    socket.destroy();
    throw error;
  } finally {
    signal.removeEventListener("abort", onAbort);
  }
}

function dial({ target, address, tlsContext, signal, certified }: PinnedRequest): Promise<Dialled> {
  const arrivals: Arrivals = { take: null };
  const reading = { host: address, onread: readingInto(arrivals) };
  if (!target.isTls) {
    const socket = net.connect({ ...reading, port: Number(target.port || 80), noDelay: true });
    return dialled({ socket, arrivals }, "connect", signal);
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
  return dialled({ socket: socket.setNoDelay(true), arrivals }, "secureConnect", signal);
}

/** Connections whose key signs slowly: how many are dialled at a time, and the least time that each takes. */
const SLOW_AT_ONCE = 4;
const SLOW_DIAL_MS = 100;

export function openTransport() {
  const pool = new IdleConnections<UpstreamConnection>();
  const slowDials = createLimiter({ size: SLOW_AT_ONCE, tooMany: "too many connections with long keys" });

  /** It is watched from its first moment on: the server may close it before it is used. */
  const connect = async (request: PinnedRequest, key: string) =>
    new UpstreamConnection(await dial(request), key, request, pool);

  async function connectSlowly(request: PinnedRequest, key: string): Promise<UpstreamConnection> {
    const work = () => Promise.allSettled([connect(request, key), Bun.sleep(SLOW_DIAL_MS)]);
    const [outcome] = await slowDials(request.tenant, work).catch(() => {
      throw new TransportError("EBUSY");
    });
    if (outcome.status === "rejected") throw outcome.reason;
    return outcome.value;
  }

  const dialAndSend = async (request: PinnedRequest, key: string): Promise<Answer> =>
    sendOn(await (request.tlsContext.isSlowToSign ? connectSlowly : connect)(request, key), request);

  function sendOn(connection: UpstreamConnection, request: PinnedRequest): Promise<Answer> {
    return request.leaving === undefined
      ? connection.exchange(request)
      : sendAfter(request.leaving, connection, request);
  }

  async function sendAfter(leaving: () => Promise<void>, connection: UpstreamConnection, request: PinnedRequest) {
    try {
      await leaving();
    } catch (error) {
      connection.end();
      throw error;
    }
    return connection.exchange(request);
  }

  /** Sends an idempotent request, and retries it: the server may have closed the pooled connection before it arrived. */
  async function sendIdempotent(request: PinnedRequest, kept: UpstreamConnection): Promise<Answer> {
    try {
      return await kept.exchange(request);
    } catch (error) {
      if (kept.isAnswered || request.signal.aborted) throw error;
      return send(request);
    }
  }

  /** @throws errors with a `code`; the signal's reason */
  function send(request: PinnedRequest): Promise<Answer> {
    const key = poolKey(request);
    const kept = pool.take(key);
    if (kept === null) return dialAndSend(request, key);
    return request.method === "POST" ? sendOn(kept, request) : sendIdempotent(request, kept);
  }

  return { send };
}

/** What the pool needs to know of a connection. */
export interface IdleConnection {
  /** Connections with one key are interchangeable. */
  readonly key: string;
  readonly tenant: string;
  /** How much of the pool's size it uses. */
  readonly weight: number;
  /** When it becomes too old for another request, by performance.now(). */
  readonly idleUntil: number;
  end(): void;
}

/** The size of the pool, shared out by tenant; a tenant above its share loses the connection that has been idle longest. */
const IDLE_MAX = 1024;
const SWEEP_MS = 1000;

export class IdleConnections<Connection extends IdleConnection> {
  /** By key, the one that has been idle shortest last. */
  readonly #idle = new Map<string, Connection[]>();
  #isSweeping = false;
  readonly #sweepMs: number;
  readonly #kept = tenantCache<Connection, true>(IDLE_MAX, (connection) => connection.end());

  constructor(sweepMs = SWEEP_MS) {
    this.#sweepMs = sweepMs;
  }

  take(key: string): Connection | null {
    const connection = this.#idle.get(key)?.at(-1);
    if (connection === undefined) return null;
    this.remove(connection);
    if (performance.now() < connection.idleUntil) return connection;
    connection.end();
    return this.take(key);
  }

  add(connection: Connection): void {
    this.#idle.getOrInsertComputed(connection.key, () => []).push(connection);
    this.#kept.set(connection.tenant, connection, true, connection.weight);
    this.#sweepLater();
  }

  /** Closes old connections by one timer for all: a timer for each would cost a call 0.5 µs. `take` checks the age as well. */
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

  remove(connection: Connection): void {
    this.#kept.delete(connection);
    const same = this.#idle.get(connection.key) ?? [];
    const at = same.lastIndexOf(connection);
    if (at >= 0) same.splice(at, 1);
    if (same.length === 0) this.#idle.delete(connection.key);
  }
}

// TLS contexts of outgoing connections: a client certificate to present, and the roots to trust. Making one with roots of its
// own takes 4 ms, so contexts are cached, with a share for each tenant.

/** The certificate that a call presents to a server that asks for one. All PEM. */
export interface ClientIdentity {
  readonly cert: string;
  readonly key: string;
  /** Roots trusted for this server in addition to the default ones. */
  readonly ca: string | null;
}

export interface TlsContext {
  /** A digest of tenant, certificate and roots; empty for the default context. */
  readonly name: string;
  /** Undefined for the default roots and no certificate. */
  readonly secureContext: tls.SecureContext | undefined;
  /** Whether its key signs slowly, which blocks the event loop: RSA-4096 takes 5 ms, EC and RSA-2048 less than one. */
  readonly isSlowToSign: boolean;
}

const QUICK_RSA_BITS = 2048;

/**
 * The garbage collector is run after this many evictions, since it does not see the copy of all roots that a context with roots of
 * its own holds (440 MB for 1,000 of them). A run takes 9 ms, making as many contexts 250; a concurrent one would free none.
 */
const EVICTIONS_PER_COLLECTION = 64;

/** The certificates without duplicates: the system's roots and the built-in ones differ in line lengths mostly. */
function distinct(certificates: readonly string[]): string[] {
  return [...new Map(certificates.map((pem) => [pem.replace(/\s/g, ""), pem])).values()];
}

export function createTlsContexts(extraCa: string | null) {
  const known = tenantCache<string, TlsContext>(MAX.tlsContexts, evicted);
  let defaultRoots: string[] | null = null;
  let defaultContext: TlsContext | null = null;
  let evictions = 0;

  function evicted(): void {
    evictions++;
    if (defaultRoots !== null && evictions % EVICTIONS_PER_COLLECTION === 0) Bun.gc(true);
  }

  /** The `ca` option. It replaces the default roots, so it lists them as well; undefined leaves them as they are. */
  function roots(own: string | null): string[] | undefined {
    const extra = [extraCa, own].filter((pem) => pem !== null);
    if (extra.length === 0) return undefined;
    defaultRoots ??= distinct(tls.getCACertificates("default"));
    return [...defaultRoots, ...extra];
  }

  function makeDefaultContext(): TlsContext {
    const ca = roots(null);
    return { name: "", secureContext: ca && tls.createSecureContext({ ca }), isSlowToSign: false };
  }

  return (tenant: string, identity: ClientIdentity | null): TlsContext => {
    if (identity === null) {
      defaultContext ??= makeDefaultContext();
      return defaultContext;
    }
    const { cert, key } = identity;
    const parts = JSON.stringify([tenant, cert, key, identity.ca]);
    const name = new Bun.CryptoHasher("sha256").update(parts).digest("base64");
    const found = known.get(name);
    if (found !== undefined) return found;
    const ca = roots(identity.ca);
    const secureContext = tls.createSecureContext({ cert, key, ...(ca && { ca }) });
    const bits = createPrivateKey(key).asymmetricKeyDetails?.modulusLength ?? 0;
    const context = { name, secureContext, isSlowToSign: bits > QUICK_RSA_BITS };
    known.set(tenant, name, context);
    return context;
  };
}
