// One request on a connection and its answer. Nothing is lost: bytes that came before the connection broke are delivered
// before the error. The answer is read no faster than it is taken, and no faster than the share of its tenant allows.

import { createFairShare, type FairShare } from "../../kernel/share.ts";
import { inTurns, mayDoAtOnce, type TurnWaiter, waitWholeTurn } from "../../kernel/turns.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import type { CallBody } from "../../wire/body.ts";
import { type AnswerHeaders, type ResponseHead, type ResponseParser, SLICE_BYTES_MAX } from "./response-parser.ts";

/**
 * `blocked`: the host rules refuse it. `unreached`: it certainly never reached the upstream, so it may be sent
 * again. `lost`: anything after sending may have begun.
 */
export type OutboundErrorKind = "blocked" | "unreached" | "lost";

/** The message is for the log: it names hosts and error codes, never a path, a query or a header. */
export class OutboundError extends Error {
  readonly kind: OutboundErrorKind;

  constructor(kind: OutboundErrorKind, detail: string) {
    super(detail);
    this.name = "OutboundError";
    this.kind = kind;
  }
}

/** The error of an exchange without an answer, or with half of one. */
export class TransportError extends Error {
  readonly code: string;

  constructor(code: string) {
    super(code);
    this.code = code;
  }
}

export function errorCode(error: unknown): string {
  if (typeof error !== "object" || error === null) return "unknown";
  if ("code" in error && typeof error.code === "string") return error.code;
  return "name" in error && typeof error.name === "string" ? error.name : "unknown";
}

/** A connection that failed after sending may have begun. */
export function lost(error: unknown): OutboundError {
  return new OutboundError("lost", `connection lost: ${errorCode(error)}`);
}

/** The runtime's Response has this form too, but with its streams it took 7 of the 38 µs of a small call (Bun 1.4.5). */
export interface Answer {
  readonly status: number;
  readonly ok: boolean;
  readonly headers: AnswerHeaders;
  /** Still encoded, as it comes; it must be read or cancelled. Null for an answer that has none, or has come whole. */
  readonly body: ReadableStream<Uint8Array> | null;
  /** All of the body, if it came with its head. */
  readonly whole?: Uint8Array | null;
}

/** What a URL says of where a request goes. */
export interface DialTarget {
  readonly isTls: boolean;
  readonly host: string;
  readonly hostname: string;
  /** Empty for the one of the scheme. */
  readonly port: string;
  /** With its query. */
  readonly path: string;
  /**
   * The name for SNI and certificate, without the dots at its end (RFC 6066 section 3); null for plain HTTP and for
   * hosts that are addresses.
   */
  readonly serverName: string | null;
}

/** What is sent, and what is told of it. */
export interface SentRequest {
  readonly method: string;
  readonly body?: CallBody | null | undefined;
  /** The only time limit; its reason is what an aborted request rejects with. It covers the body too. */
  readonly signal: StopSignal;
  /** Awaited on the connection, right before the first byte leaves. Nothing has left when it rejects. */
  readonly leaving?: (() => Promise<void>) | undefined;
  /** Called when the body is not needed any more, unless it never left. May be called more than once. */
  readonly sent?: (() => void) | undefined;
  /** Called with the end of the server's certificate, in milliseconds since the epoch, where a connection is made. */
  readonly certified?: ((validTo: number) => void) | undefined;
  /** The share to which answer bytes count that arrive ahead of their reader. Left out: nobody's. */
  readonly ahead?: AnswerReadAhead | undefined;
}

// Answer bytes that have arrived and are not taken yet, because their readers wait for memory or for a caller that does
// not read. A connection delivers what it has in one go, half a megabyte and more, so thousands of them would fill the
// memory before any could be paused. So each tenant has a share. When it is used up, none of the tenant's connections is
// read, head or body, until some of it is taken; what is not read stays with its sender.

/** How a connection is paused. Both may be called again. */
export interface Source {
  pause(): void;
  resume(): void;
}

/** How many are resumed at a time, since each may have much to deliver. */
const RESUMED_AT_ONCE = 16;
/** A tenant is read again when it may have this much more. */
const RESUMED_ROOM_BYTES = 64 * 1024;

/** The answers of a tenant that are arriving. */
interface TenantAnswers {
  readonly read: Set<AnswerReadAhead>;
  readonly stopped: Set<AnswerReadAhead>;
  /** What has come of all of them and is not taken. */
  bytes: number;
}

export class ReadAhead {
  readonly #share: FairShare;
  readonly #tenants = new Map<string, TenantAnswers>();
  /** The tenants of which some are stopped. */
  readonly #short = new Set<string>();
  #isScheduled = false;

  constructor(bytesMax: number) {
    this.#share = createFairShare({ size: bytesMax, least: 0 });
  }

  get inUse(): number {
    return this.#share.inUse;
  }

  of(tenant: string): AnswerReadAhead {
    return new AnswerReadAhead(this, tenant);
  }

  enter(answer: AnswerReadAhead): void {
    const tenant = this.#tenants.get(answer.tenant) ?? { read: new Set(), stopped: new Set(), bytes: 0 };
    this.#tenants.set(answer.tenant, tenant);
    const isStopped = this.#short.has(answer.tenant);
    (isStopped ? tenant.stopped : tenant.read).add(answer);
    if (isStopped) answer.source?.pause();
  }

  leave(answer: AnswerReadAhead): void {
    const tenant = this.#tenants.get(answer.tenant);
    tenant?.read.delete(answer);
    tenant?.stopped.delete(answer);
    this.charge(answer, -answer.bytes);
    if (tenant?.read.size === 0 && tenant.stopped.size === 0) this.#tenants.delete(answer.tenant);
  }

  charge(answer: AnswerReadAhead, bytes: number): void {
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

  resumeStopped(answer: AnswerReadAhead): void {
    const tenant = this.#tenants.get(answer.tenant);
    if (tenant?.stopped.delete(answer) !== true) return;
    tenant.read.add(answer);
    answer.source?.resume();
  }

  #stopAll(name: string): void {
    const tenant = this.#tenants.get(name);
    if (tenant === undefined) return;
    for (const answer of tenant.read) {
      if (answer.isExempt) continue;
      tenant.read.delete(answer);
      tenant.stopped.add(answer);
      answer.source?.pause();
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

  /** If nothing of the tenant is left to be taken, one is resumed whatever others hold: it waits for no other tenant. */
  #resumeOf(name: string, { bytes, stopped }: TenantAnswers): boolean {
    const hasRoom = this.#share.roomOf(name) >= RESUMED_ROOM_BYTES;
    if (!hasRoom && bytes > 0) return false;
    for (const answer of [...stopped.values().take(hasRoom ? RESUMED_AT_ONCE : 1)]) this.resumeStopped(answer);
    return true;
  }
}

/** The part of one answer in what is read ahead. */
export class AnswerReadAhead {
  readonly tenant: string;
  readonly #all: ReadAhead;
  /** Null while no connection brings the answer. */
  source: Source | null = null;
  /** What has arrived and is not taken, and how much of it the share had room for. The rest has arrived all the same. */
  bytes = 0;
  charged = 0;
  isExempt = false;

  constructor(all: ReadAhead, tenant: string) {
    this.#all = all;
    this.tenant = tenant;
  }

  /** From now on this connection brings the answer. */
  open(source: Source): void {
    this.close();
    this.source = source;
    this.#all.enter(this);
  }

  /** Counts what has arrived; a negative number is what has been taken of it. */
  add(bytes: number): void {
    if (this.source !== null) this.#all.charge(this, bytes);
  }

  /** The answer is read on, whatever the share: its reader holds memory that others wait for. */
  exempt(): void {
    if (this.source === null) return;
    this.isExempt = true;
    this.#all.resumeStopped(this);
  }

  /** The connection brings nothing more, and nothing that came is left. */
  close(): void {
    if (this.source === null) return;
    this.#all.leave(this);
    this.source = null;
    this.isExempt = false;
  }
}

/** A slice of so much is not made longer: to join parts means to copy them (measured: 8 ms for an answer of 10 MiB). */
const SLICE_ENOUGH_BYTES = SLICE_BYTES_MAX / 2;

export interface ExchangeOptions {
  readonly socket: Source;
  readonly parser: ResponseParser;
  readonly request: SentRequest & { readonly tenant: string };
  /** @param isClean whether the connection stands where another request can follow */
  over(isClean: boolean): void;
}

export class Exchange implements Source, TurnWaiter {
  readonly #options: ExchangeOptions;
  readonly #response = Promise.withResolvers<Answer>();
  #head: ResponseHead | null = null;
  #isAnswered = false;
  readonly #unparsed: Uint8Array[] = [];
  #unparsedBytes = 0;
  #isParsed = false;
  /** Whether all that came with the end of the answer belongs to it. */
  #isAll = false;
  #connectionEnd: "closed" | "broken" | null = null;
  /** The share of the tenant is used up. */
  #isStopped = false;
  #isPaused = false;
  #isArriving = false;
  /** Of the body: what is next, and what comes after that, if that is known. */
  #piece: Uint8Array | null = null;
  #end: "whole" | TransportError | null = null;
  #wanted: PromiseWithResolvers<void> | null = null;

  constructor(options: ExchangeOptions) {
    this.#options = options;
    const { parser, request } = options;
    parser.begin(request.method);
    request.ahead?.open(this);
    request.signal.addEventListener("abort", this.#abort, { once: true });
  }

  /** The share of the tenant is used up. */
  pause(): void {
    this.#isStopped = true;
    this.#regulate();
  }

  resume(): void {
    this.#isStopped = false;
    this.#regulate();
  }

  /** Its body is still encoded. */
  get response(): Promise<Answer> {
    return this.#response.promise;
  }

  get head(): ResponseHead | null {
    return this.#head;
  }

  /** @param bytes of which the first `length` are copied, in pieces of which each can be released by itself */
  arrived(bytes: Uint8Array, length = bytes.length): void {
    if (this.#isReadAtOnce(length)) this.#parse(bytes.slice(0, length));
    else this.#arrivedLater(bytes, length);
  }

  #arrivedLater(bytes: Uint8Array, length: number): void {
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

  /** Only up to the head: pieces of a body wait for each other, because a piece for each would cost more. */
  #isReadAtOnce(length: number): boolean {
    // So much of a head is parsed without waiting for a turn, and with it all of most answers.
    if (this.#head !== null || this.#isParsed || this.#end !== null || length > 16 * 1024) return false;
    return this.#unparsed.length === 0 && !this.#isStopped && mayDoAtOnce();
  }

  /** What came before is still parsed and delivered. @param how whether the server closed the connection in good order */
  connectionEnded(how: "closed" | "broken"): void {
    this.#connectionEnd ??= how;
    inTurns(this.#step, this.#options.request.tenant);
  }

  readonly #abort = (): void => {
    this.#reject(this.#options.request.signal.reason);
    this.#finish(new TransportError("ECONNRESET"), false);
  };

  /** Parses the next slice, if that is wanted. */
  readonly #step = (): boolean => {
    if (this.#end !== null || this.#isParsed || (this.#head !== null && this.#wanted === null)) return false;
    const slice = this.#nextSlice();
    if (slice !== null) {
      this.#parse(slice);
      return this.#end === null && !this.#isParsed;
    }
    if (this.#connectionEnd !== null) this.#endWithConnection(this.#connectionEnd);
    return false;
  };

  #parse(slice: Uint8Array): void {
    const { head, body, state, used } = this.#options.parser.parse(slice);
    if (body !== null) this.#piece = body;
    // A short answer arrives whole with its head, and is delivered whole.
    if (head !== null) this.#open(head, state === "whole");
    if (state === "whole") this.#endWhole(used === slice.length);
    else if (state !== "more") this.#finish(new TransportError(state.code), false);
    if (body !== null) this.#give();
  }

  /** Waits a turn to see what follows right after the answer: the end of the connection, or bytes nobody asked for. */
  #endWhole(isAll: boolean): void {
    this.#isParsed = true;
    this.#isAll = isAll;
    waitWholeTurn(this);
  }

  /** A whole turn after the answer was parsed. */
  turned(): void {
    // While it was paused nobody looked.
    const isQuiet = this.#unparsedBytes === 0 && this.#connectionEnd === null && !this.#isPaused;
    this.#finish("whole", this.#isAll && isQuiet);
  }

  /** While more is received and not parsed yet, the connection is not read. */
  #isFull(): boolean {
    return this.#unparsedBytes > 64 * 1024 || this.#unparsed.length > 256;
  }

  /**
   * The connection is read while there is room. While it delivers what it has, it is paused only after that: what comes
   * after a pause is joined again for each part of it, in memory that nobody counts.
   */
  #regulate(): void {
    const isPaused = this.#isStopped || this.#isFull();
    if (isPaused === this.#isPaused || this.#end !== null) return;
    this.#isPaused = isPaused;
    const { socket } = this.#options;
    if (!isPaused) socket.resume();
    else if (!this.#isArriving) socket.pause();
    else
      setImmediate(() => {
        if (this.#isPaused) socket.pause();
      });
  }

  /** The next parts in one slice, because a slice for each part would take a turn for each. */
  #nextSlice(): Uint8Array | null {
    const parts: Uint8Array[] = [];
    let taken = 0;
    while (taken < SLICE_ENOUGH_BYTES) {
      const part = this.#unparsed[0];
      // A part is not divided: the next slices would have to be joined, too.
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

  #open(head: ResponseHead, isWhole: boolean): void {
    this.#head = head;
    if (!isWhole) this.#answer(head, this.#body());
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
            this.#wanted = Promise.withResolvers();
            inTurns(this.#step, this.#options.request.tenant);
            await this.#wanted.promise;
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

  #give(): void {
    this.#wanted?.resolve();
    this.#wanted = null;
  }

  #endWithConnection(how: "closed" | "broken"): void {
    const isWhole = how === "closed" && this.#options.parser.endsWithConnection;
    this.#finish(isWhole ? "whole" : new TransportError("ECONNRESET"), false);
  }

  #reject(reason: unknown): void {
    // Maybe nobody waits for it any more.
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
    if (this.#head !== null && !this.#isAnswered) this.#answer(this.#head, this.#piece?.slice() ?? new Uint8Array());
    this.#give();
  }
}
