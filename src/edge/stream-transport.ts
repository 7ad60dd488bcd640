// The HTTP client for answers that are passed on as they come. The runtime's `fetch` drops what has come of an answer
// when the connection closes before it was read (measured on Bun 1.4.5: 21 of 60 answers closed right after their
// first part lost it, 42 of 60 when destroyed; here none), and tells a connection that was reset from one that was
// closed as little as it tells when a request has left.
import net from "node:net";
import tls from "node:tls";
import { during } from "../core/work.ts";
import { Exchange } from "./http-exchange.ts";
import { ResponseParser } from "./response-parser.ts";
import {
  IDLE_SECONDS,
  type Transport,
  TransportError,
  type TransportOptions,
  type TransportRequest,
} from "./transport.ts";

/** Connections of one pool that wait for another request; the one that waits longest goes first. */
const IDLE_MAX = 256;
/** Of a body that is written at a time. */
const PART_BYTES = 262_144;
/** Of a body that is copied behind its head. */
const JOINED_BYTES_MAX = 64 * 1024;
/** A server that tells how long it keeps a connection closes it then: it is not used for a second before. */
const KEEP_ALIVE_MARGIN_SECONDS = 1;
const KEEP_ALIVE_TIMEOUT = /(?:^|[,;\s])timeout=(\d{1,9})\s*(?:$|[,;])/i;

/** Where a connection leads. Names that share an address share no connections: their servers may be strangers. */
function placeOf(url: URL, { headers }: TransportRequest): string {
  return `${url.protocol}//${url.host} ${headers.get("host")}`;
}

function headOf({ pathname, search }: URL, { method, headers, body }: TransportRequest): Buffer {
  const fields = [...headers].map(([name, value]) => `${name}: ${value}\r\n`).join("");
  const length = body === null && method !== "POST" ? "" : `content-length: ${body?.length ?? 0}\r\n`;
  const head = `${method} ${pathname}${search} HTTP/1.1\r\n${fields}${length}connection: keep-alive\r\n\r\n`;
  return Buffer.from(head, "latin1");
}

/** For how long the connection can be kept after this answer. */
function keptSeconds(fields: readonly string[]): number {
  for (let at = 0; at + 1 < fields.length; at += 2) {
    if (fields[at]?.toLowerCase() !== "keep-alive") continue;
    const told = KEEP_ALIVE_TIMEOUT.exec(fields[at + 1] ?? "")?.[1];
    if (told !== undefined) return Math.min(IDLE_SECONDS, Number(told) - KEEP_ALIVE_MARGIN_SECONDS);
  }
  return IDLE_SECONDS;
}

class Connection {
  readonly #socket: net.Socket;
  readonly #parser = new ResponseParser();
  /** Told when it can carry another request. */
  readonly #isFree: (connection: Connection) => void;
  #exchange: Exchange | null = null;
  #isSending = false;
  #isClosed = false;
  #timer: ReturnType<typeof setTimeout> | undefined;
  isOver = false;
  /** Whether any byte has come of the answer to the latest request. */
  isAnswered = false;

  constructor(socket: net.Socket, isFree: (connection: Connection) => void) {
    this.#socket = socket;
    this.#isFree = isFree;
    socket.on("data", (bytes: Buffer) => {
      // Nobody asked for it: it must not become the answer to what is asked next.
      if (this.#exchange === null) return this.end();
      this.isAnswered = true;
      this.#exchange.arrived(bytes);
    });
    socket.on("end", () => this.#lost("closed"));
    socket.on("error", () => this.#lost("broken"));
    socket.on("close", () => {
      this.#isClosed = true;
      this.#lost("broken");
    });
  }

  /** @throws TransportError; the signal's reason */
  exchange(url: URL, request: TransportRequest): Promise<Response> {
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
        // Until it is closed the socket holds what it has not sent.
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
    const [head, body] = [headOf(url, request), request.body ?? new Uint8Array()];
    // In one go, if it may be: with a reset in between, the second write would take along what has come by then.
    if (body.length <= JOINED_BYTES_MAX) socket.write(Buffer.concat([head, body]), isSent);
    else {
      socket.write(head);
      writeInParts(socket, body, isSent);
    }
    return exchange.response;
  }

  end(): void {
    if (this.isOver) return;
    this.isOver = true;
    clearTimeout(this.#timer);
    this.#socket.destroy();
    this.#parser.free();
  }

  #wait(seconds: number): void {
    this.#socket.unref();
    this.#timer = setTimeout(() => this.end(), 1000 * seconds);
    this.#timer.unref();
    this.#isFree(this);
  }

  #lost(how: "closed" | "broken"): void {
    if (this.#exchange === null) this.end();
    else this.#exchange.connectionEnded(how);
  }
}

/** In one piece, what the socket does not take at once is copied again and again: 32 MiB held the loop for 40 ms. */
function writeInParts(socket: net.Socket, body: Uint8Array, isSent: () => void): void {
  let at = 0;
  const writeNext = (error?: Error | null) => {
    if (error != null || at >= body.length) return isSent();
    const part = body.subarray(at, at + PART_BYTES);
    at += part.length;
    during("send of a body", () => socket.write(part, writeNext));
  };
  writeNext();
}

/** @throws the socket's error; the signal's reason */
async function dialled(socket: net.Socket, connected: string, signal: AbortSignal): Promise<net.Socket> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const onAbort = () => reject(signal.reason);
  signal.addEventListener("abort", onAbort, { once: true });
  socket.once(connected, () => resolve());
  socket.on("error", reject);
  socket.once("close", () => reject(new TransportError("ECONNRESET")));
  try {
    await promise;
    signal.throwIfAborted();
    return socket;
  } catch (error) {
    socket.destroy();
    throw error;
  } finally {
    signal.removeEventListener("abort", onAbort);
  }
}

export function openStreamTransport({ serverName, ca, client }: TransportOptions): Transport {
  const isOwn = ca !== null || client !== null;
  const secureContext = isOwn
    ? tls.createSecureContext({ ...(ca && { ca: [...ca] }), ...client })
    : undefined;
  let idle: { readonly place: string; readonly connection: Connection }[] = [];
  let isClosed = false;

  function takeIdle(place: string): Connection | null {
    const at = idle.findLastIndex((each) => each.place === place && !each.connection.isOver);
    return at < 0 ? null : (idle.splice(at, 1)[0]?.connection ?? null);
  }

  function keep(place: string, connection: Connection): void {
    idle = idle.filter((each) => !each.connection.isOver);
    if (idle.length >= IDLE_MAX) idle.shift()?.connection.end();
    if (isClosed) connection.end();
    else idle.push({ place, connection });
  }

  function dial({ protocol, hostname, port }: URL, signal: AbortSignal): Promise<net.Socket> {
    const host = hostname.replace(/^\[|\]$/g, "");
    if (protocol === "http:") {
      return dialled(net.connect({ host, port: Number(port || 80), noDelay: true }), "connect", signal);
    }
    const socket = tls.connect({
      host,
      port: Number(port || 443),
      ALPNProtocols: ["http/1.1"],
      // Said aloud, because NODE_TLS_REJECT_UNAUTHORIZED could switch it off.
      rejectUnauthorized: true,
      servername: serverName ?? "",
      ...(secureContext && { secureContext }),
    });
    return dialled(socket.setNoDelay(true), "secureConnect", signal);
  }

  async function send(text: string, request: TransportRequest): Promise<Response> {
    const url = new URL(text);
    const place = placeOf(url, request);
    const kept = takeIdle(place);
    const connection = kept ?? new Connection(await dial(url, request.signal), (free) => keep(place, free));
    try {
      return await connection.exchange(url, request);
    } catch (error) {
      // As `fetch` does: the server may have closed the connection before it saw this.
      const isStale = kept !== null && !connection.isAnswered && request.method !== "POST";
      if (!isStale || request.signal.aborted) throw error;
      return send(text, request);
    }
  }

  return {
    send,
    close() {
      isClosed = true;
      for (const { connection } of idle.splice(0)) connection.end();
    },
  };
}
