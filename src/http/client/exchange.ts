// One request on a connection and its answer. Bytes that arrived before the connection broke are delivered before the error.
// The answer is received no faster than its reader takes it, and no faster than its tenant's share of memory allows.
import { errorName } from "../../core/fault.ts";
import type { ErrorDetail } from "../../core/states.ts";
import { createFairShare, type FairShare } from "../../kernel/share.ts";
import { inTurns, mayDoAtOnce, waitWholeTurn } from "../../kernel/turns.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import type { CallBody } from "../../wire/body.ts";
import { type AnswerHeaders, type ResponseHead, type ResponseParser, SLICE_BYTES_MAX } from "./response-parser.ts";

/** The message is for the log: it names hosts and error codes, never a path, a query or a header. */
export class OutboundError extends Error {
  /** `blocked`: by the host rules. `unreached`: certainly not sent, so it may be retried. `lost`: perhaps sent, in part at least. */
  readonly kind: "blocked" | "unreached" | "lost";
  /** For the tenant, who may not know the message; null where no value fits. */
  readonly reason: ErrorDetail | null;

  constructor(kind: OutboundError["kind"], detail: string, reason: ErrorDetail | null = null) {
    super(detail);
    this.name = "OutboundError";
    this.kind = kind;
    this.reason = kind === "blocked" ? "host_blocked" : reason;
  }
}

/** The error of an exchange without a complete answer. */
export class TransportError extends Error {
  readonly code: string;

  constructor(code: string) {
    super(code);
    this.code = code;
  }
}

/** Codes of the verification of the server's certificate, before the request is sent. EPROTO, which may come later, is none. */
export const UNTRUSTED_SERVER =
  /^(CERT_|UNABLE_TO_|SELF_SIGNED_|DEPTH_ZERO_|ERR_TLS_CERT_|INVALID_CA$|INVALID_PURPOSE$|PATH_LENGTH_|HOSTNAME_)/;

/** Networks that lead nowhere refuse a connection as well as a server does. */
const REASONS: readonly (readonly [codes: RegExp, reason: ErrorDetail])[] = [
  [UNTRUSTED_SERVER, "tls"],
  [/^(EPROTO$|ERR_SSL_|ERR_TLS_)/, "tls"],
  [/^(ECONNREFUSED|EHOSTUNREACH|EHOSTDOWN|ENETUNREACH|ENETDOWN)$/, "connection_refused"],
  [/^(ECONNRESET|ENOTCONN|EPIPE)$/, "connection_reset"],
  [/^ETIMEDOUT$/, "connect_timeout"],
];

/** @param code of a connection's error */
export const reasonOf = (code: string): ErrorDetail | null => REASONS.find(([codes]) => codes.test(code))?.[1] ?? null;

/** The error of a connection that failed when the request may have been sent. */
export function lost(error: unknown): OutboundError {
  const code = errorName(error);
  return new OutboundError("lost", `connection lost: ${code}`, reasonOf(code));
}

/** An upstream's answer. The runtime's Response with its streams took 7 of the 38 µs of a small call (Bun 1.4.5). */
export interface Answer {
  readonly status: number;
  readonly ok: boolean;
  readonly headers: AnswerHeaders;
  /** The body, still encoded; it must be read or cancelled. Null when there is none, or `whole` holds it. */
  readonly body: ReadableStream<Uint8Array> | null;
  /** The whole body, if it arrived together with the head. */
  readonly whole?: Uint8Array | null;
}

/** The parts of a URL that say where a request goes. */
export interface DialTarget {
  readonly isTls: boolean;
  readonly host: string;
  readonly hostname: string;
  /** Empty for the scheme's default port. */
  readonly port: string;
  /** The path with its query. */
  readonly path: string;
  /** The name for SNI and certificate, without trailing dots (RFC 6066 section 3); null for plain HTTP and for addresses. */
  readonly serverName: string | null;
}

/** A request, and the callbacks that follow its way. */
export interface SentRequest {
  readonly method: string;
  readonly body?: CallBody | null | undefined;
  /** The only time limit, which covers the answer's body too. An aborted request rejects with its reason. */
  readonly signal: StopSignal;
  /** Called when there is a connection for the request, a new one or one from the pool. */
  readonly connected?: (() => void) | undefined;
  /** Awaited when the connection is open, right before the first byte is sent. If it rejects, nothing is sent. */
  readonly leaving?: (() => Promise<void>) | undefined;
  /** Called when the body is no longer needed, unless it was never sent. May be called more than once. */
  readonly sent?: (() => void) | undefined;
  /** Called for a new TLS connection with the expiry of the server's certificate, in milliseconds since the epoch. */
  readonly certified?: ((validTo: number) => void) | undefined;
  /** The share that is charged for answer bytes that arrive ahead of their reader; none when omitted. */
  readonly ahead?: AnswerReadAhead | undefined;
}

// Read-ahead: answer bytes that have arrived but are not taken yet, because their readers wait for memory or for a caller that
// does not read. A connection delivers half a megabyte and more at once, so thousands of them would fill the memory before any
// could be paused. So each tenant has a share. When it is used up, none of the tenant's connections is read, head or body,
// until some bytes are taken; flow control keeps the rest with its sender.

/** A connection that can be paused. Both methods may be called repeatedly. */
export interface Source {
  pause(): void;
  resume(): void;
}

/** How many connections are resumed at a time, since each may deliver much. */
const RESUMED_AT_ONCE = 16;
/** A tenant's connections are resumed when its share has this much room. */
const RESUMED_ROOM_BYTES = 64 * 1024;

/** An answer that is arriving. */
interface ArrivingAnswer {
  readonly tenant: string;
  readonly source: Source;
  /** Bytes that have arrived and are not taken. */
  bytes: number;
  /** How many of them the share had room for. */
  charged: number;
  isExempt: boolean;
}

interface TenantAnswers {
  readonly read: Set<ArrivingAnswer>;
  readonly stopped: Set<ArrivingAnswer>;
  /** Bytes of all of them that have arrived and are not taken. */
  bytes: number;
}

export class ReadAhead {
  readonly #share: FairShare;
  readonly #tenants = new Map<string, TenantAnswers>();
  /** The tenants with stopped answers. */
  readonly #short = new Set<string>();
  #isScheduled = false;

  constructor(bytesMax: number) {
    this.#share = createFairShare({ size: bytesMax, least: 0 });
  }

  get inUse(): number {
    return this.#share.inUse;
  }

  /** The read-ahead of one answer. */
  of(tenant: string) {
    let answer: ArrivingAnswer | null = null;
    /** Ends the answer: nothing more of it arrives, and nothing is left to be taken. */
    const close = (): void => {
      if (answer !== null) this.#leave(answer);
      answer = null;
    };
    return {
      /** Begins the answer on this connection. */
      open: (source: Source): void => {
        close();
        answer = { tenant, source, bytes: 0, charged: 0, isExempt: false };
        this.#enter(answer);
      },
      /** Counts arrived bytes, or taken ones if the number is negative. */
      add: (bytes: number): void => {
        if (answer !== null) this.#charge(answer, bytes);
      },
      /** Reads the answer on even if the share is used up, since its reader holds memory that others wait for. */
      exempt: (): void => {
        if (answer === null) return;
        answer.isExempt = true;
        this.#resume(answer);
      },
      close,
    };
  }

  #enter(answer: ArrivingAnswer): void {
    const fresh = () => ({ read: new Set<ArrivingAnswer>(), stopped: new Set<ArrivingAnswer>(), bytes: 0 });
    const tenant = this.#tenants.getOrInsertComputed(answer.tenant, fresh);
    const isStopped = this.#short.has(answer.tenant);
    (isStopped ? tenant.stopped : tenant.read).add(answer);
    if (isStopped) answer.source.pause();
  }

  #leave(answer: ArrivingAnswer): void {
    const tenant = this.#tenants.get(answer.tenant);
    tenant?.read.delete(answer);
    tenant?.stopped.delete(answer);
    this.#charge(answer, -answer.bytes);
    if (tenant?.read.size === 0 && tenant.stopped.size === 0) this.#tenants.delete(answer.tenant);
  }

  #charge(answer: ArrivingAnswer, bytes: number): void {
    const { tenant } = answer;
    answer.bytes += bytes;
    const all = this.#tenants.get(tenant);
    if (all !== undefined) all.bytes += bytes;
    if (bytes > 0) {
      const taken = Math.min(bytes, this.#share.roomOf(tenant));
      if (taken > 0) this.#share.take(tenant, null, taken);
      answer.charged += taken;
      if (taken < bytes) this.#stopAll(tenant);
      return;
    }
    const back = answer.charged - answer.bytes;
    if (back > 0) {
      answer.charged -= back;
      this.#share.giveBack(tenant, null, back);
    }
    this.#resumeSoon();
  }

  #resume(answer: ArrivingAnswer): void {
    const tenant = this.#tenants.get(answer.tenant);
    if (tenant?.stopped.delete(answer) !== true) return;
    tenant.read.add(answer);
    answer.source.resume();
  }

  #stopAll(name: string): void {
    const tenant = this.#tenants.get(name);
    if (tenant === undefined) return;
    for (const answer of tenant.read) {
      if (answer.isExempt) continue;
      tenant.read.delete(answer);
      tenant.stopped.add(answer);
      answer.source.pause();
    }
    if (tenant.stopped.size > 0) this.#short.add(name);
  }

  #resumeSoon(): void {
    if (this.#isScheduled || this.#short.size === 0) return;
    this.#isScheduled = true;
    setImmediate(() => this.#resumeSome());
  }

  #resumeSome(): void {
    this.#isScheduled = false;
    let isMore = false;
    for (const name of this.#short) {
      const tenant = this.#tenants.get(name);
      if (tenant === undefined || tenant.stopped.size === 0) this.#short.delete(name);
      else if (this.#resumeOf(name, tenant)) isMore = true;
    }
    if (isMore) this.#resumeSoon();
  }

  /** Resumes answers of a tenant if there is room; one answer whatever others hold, if none of its bytes waits to be taken. */
  #resumeOf(name: string, { bytes, stopped }: TenantAnswers): boolean {
    const hasRoom = this.#share.roomOf(name) >= RESUMED_ROOM_BYTES;
    if (!hasRoom && bytes > 0) return false;
    for (const answer of [...stopped.values().take(hasRoom ? RESUMED_AT_ONCE : 1)]) this.#resume(answer);
    return true;
  }
}

export type AnswerReadAhead = ReturnType<ReadAhead["of"]>;

/** A slice of this size is not extended by further parts: joining them is a copy (measured: 8 ms for an answer of 10 MiB). */
const SLICE_ENOUGH_BYTES = SLICE_BYTES_MAX / 2;

export interface ExchangeOptions {
  readonly socket: Source;
  readonly parser: ResponseParser;
  readonly request: SentRequest & { readonly tenant: string };
  /** Called when the exchange has ended. @param isClean whether the connection can carry another request */
  over(isClean: boolean): void;
}

export class Exchange implements Source {
  readonly #options: ExchangeOptions;
  readonly #response = Promise.withResolvers<Answer>();
  /** The answer; its body is still encoded. */
  readonly response = this.#response.promise;
  head: ResponseHead | null = null;
  #isAnswered = false;
  readonly #unparsed: Uint8Array[] = [];
  #unparsedBytes = 0;
  #isParsed = false;
  /** Whether the last slice held no bytes beyond the end of the answer. */
  #isAll = false;
  #connectionEnd: "closed" | "broken" | null = null;
  /** Whether the tenant's share is used up. */
  #isStopped = false;
  #isPaused = false;
  #isArriving = false;
  /** The next piece of the body, if it is there. */
  #piece: Uint8Array | null = null;
  /** How the answer ended, after that piece; null while it goes on. */
  #end: "whole" | TransportError | null = null;
  #pendingRead: PromiseWithResolvers<void> | null = null;

  constructor(options: ExchangeOptions) {
    this.#options = options;
    const { parser, request } = options;
    parser.begin(request.method);
    request.ahead?.open(this);
    request.signal.addEventListener("abort", this.#abort, { once: true });
  }

  /** Called when the tenant's share is used up. */
  pause(): void {
    this.#isStopped = true;
    this.#regulate();
  }

  resume(): void {
    this.#isStopped = false;
    this.#regulate();
  }

  /** Takes received bytes. @param bytes their first `length` are copied, in pieces that can be released one by one */
  arrived(bytes: Uint8Array, length = bytes.length): void {
    if (this.#isReadAtOnce(length)) return void this.#parse(bytes.slice(0, length));
    for (let at = 0; at < length; at += SLICE_BYTES_MAX) {
      this.#unparsed.push(bytes.slice(at, Math.min(at + SLICE_BYTES_MAX, length)));
    }
    this.#unparsedBytes += length;
    this.#isArriving = true;
    this.#regulate();
    this.#options.request.ahead?.add(length);
    this.#isArriving = false;
    inTurns(this.#step, this.#options.request.tenant);
  }

  /** Whether the bytes are parsed without waiting for a turn. After the head they wait, since larger pieces cost less. */
  #isReadAtOnce(length: number): boolean {
    // 16 KiB hold the head of any honest answer, and all of most answers.
    if (this.head !== null || this.#isParsed || this.#end !== null || length > 16 * 1024) return false;
    return this.#unparsed.length === 0 && !this.#isStopped && mayDoAtOnce();
  }

  /** Takes the end of the connection. Received bytes are still parsed and delivered. @param how `closed`: by an orderly FIN */
  connectionEnded(how: "closed" | "broken"): void {
    this.#connectionEnd ??= how;
    inTurns(this.#step, this.#options.request.tenant);
  }

  readonly #abort = (): void => {
    this.#reject(this.#options.request.signal.reason);
    this.#finish(new TransportError("ECONNRESET"), false);
  };

  /** Parses the next slice if the head is missing or the reader waits for a piece. */
  readonly #step = (): boolean => {
    if (this.#end !== null || this.#isParsed || (this.head !== null && this.#pendingRead === null)) return false;
    const slice = this.#nextSlice();
    if (slice !== null) {
      this.#parse(slice);
      return this.#end === null && !this.#isParsed;
    }
    if (this.#connectionEnd === null) return false;
    const isWhole = this.#connectionEnd === "closed" && this.#options.parser.endsWithConnection;
    this.#finish(isWhole ? "whole" : new TransportError("ECONNRESET"), false);
    return false;
  };

  #parse(slice: Uint8Array): void {
    const { head, body, state, used } = this.#options.parser.parse(slice);
    if (body !== null) this.#piece = body;
    // A short answer that arrives with its head is delivered whole.
    if (head !== null) this.head = head;
    if (head !== null && state !== "whole") this.#answer(head, this.#body());
    if (state === "whole") this.#endWhole(used === slice.length);
    else if (state !== "more") this.#finish(new TransportError(state.code), false);
    if (body !== null) this.#resolveRead();
  }

  /** Waits a turn of the event loop, to see whether the end of the connection or unsolicited bytes follow the answer. */
  #endWhole(isAll: boolean): void {
    this.#isParsed = true;
    this.#isAll = isAll;
    waitWholeTurn(this.#turned);
  }

  /** Called a whole turn after the answer was parsed. */
  readonly #turned = (): void => {
    // A paused connection may hold more bytes, which nobody has seen.
    const isQuiet = this.#unparsedBytes === 0 && this.#connectionEnd === null && !this.#isPaused;
    this.#finish("whole", this.#isAll && isQuiet);
  };

  /** Whether so much is received but not parsed that the connection is to be paused. */
  #isFull(): boolean {
    return this.#unparsedBytes > 64 * 1024 || this.#unparsed.length > 256;
  }

  /** Pauses or resumes the connection; after it has delivered, since the runtime would join what follows a pause, uncharged. */
  #regulate(): void {
    const isPaused = this.#isStopped || this.#isFull();
    if (isPaused === this.#isPaused || this.#end !== null) return;
    this.#isPaused = isPaused;
    const { socket } = this.#options;
    if (!isPaused) socket.resume();
    else if (!this.#isArriving) socket.pause();
    else setImmediate(() => this.#isPaused && socket.pause());
  }

  /** Joins the next parts into one slice, since each slice takes a turn of the event loop. */
  #nextSlice(): Uint8Array | null {
    const parts: Uint8Array[] = [];
    let taken = 0;
    while (taken < SLICE_ENOUGH_BYTES) {
      const part = this.#unparsed[0];
      // A part is not divided, since its rest would have to be joined with the next one.
      if (part === undefined || taken + part.length > SLICE_BYTES_MAX) break;
      this.#unparsed.shift();
      parts.push(part);
      taken += part.length;
    }
    this.#unparsedBytes -= taken;
    this.#regulate();
    this.#options.request.ahead?.add(-taken);
    return parts.length > 1 ? Buffer.concat(parts) : (parts[0] ?? null);
  }

  #answer({ status, headers }: ResponseHead, body: Uint8Array | ReadableStream<Uint8Array>): void {
    const isWhole = body instanceof Uint8Array;
    const { hasBody } = this.#options.parser;
    this.#response.resolve({
      status,
      ok: status >= 200 && status < 300,
      headers,
      body: hasBody && !isWhole ? body : null,
      whole: hasBody && isWhole ? body : null,
    });
    this.#isAnswered = true;
  }

  #body(): ReadableStream<Uint8Array> {
    return new ReadableStream<Uint8Array>(
      {
        pull: async (controller) => {
          if (this.#piece === null && this.#end === null) {
            this.#pendingRead = Promise.withResolvers();
            inTurns(this.#step, this.#options.request.tenant);
            await this.#pendingRead.promise;
          }
          const piece = this.#piece;
          this.#piece = null;
          if (piece !== null) controller.enqueue(piece);
          else if (this.#end === "whole") controller.close();
          else controller.error(this.#end);
        },
        cancel: () => this.#finish(new TransportError("ECONNRESET"), false),
      },
      { highWaterMark: 0 },
    );
  }

  #resolveRead(): void {
    this.#pendingRead?.resolve();
    this.#pendingRead = null;
  }

  #reject(reason: unknown): void {
    // Nobody may be waiting for the answer any more.
    this.#response.promise.catch(() => {});
    this.#response.reject(reason);
  }

  #finish(end: "whole" | TransportError, isClean: boolean): void {
    if (this.#end !== null) return;
    this.#end = end;
    this.#unparsed.length = 0;
    this.#options.request.ahead?.close();
    if (this.#isPaused) this.#options.socket.resume();
    this.#isPaused = false;
    this.#options.request.signal.removeEventListener("abort", this.#abort);
    if (end !== "whole") this.#reject(end);
    this.#options.over(isClean);
    if (this.head !== null && !this.#isAnswered) this.#answer(this.head, this.#piece?.slice() ?? new Uint8Array());
    this.#resolveRead();
  }
}
