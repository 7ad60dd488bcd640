// One request on a connection and its answer. Nothing is lost: bytes that came before the connection broke are delivered
// before the error. The answer is read no faster than it is taken.

import { inTurns, mayDoAtOnce, type TurnWaiter, waitWholeTurn } from "../../kernel/turns.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import type { CallBody } from "../../wire/body.ts";
import { type Answer, ReceivedAnswer } from "./answer.ts";
import type { AnswerReadAhead, Source } from "./read-ahead.ts";
import { type ResponseHead, type ResponseParser, SLICE_BYTES_MAX } from "./response-parser.ts";
import type { TlsContext } from "./tls-contexts.ts";

/** A slice of so much is not made longer: to join parts means to copy them (measured: 8 ms for an answer of 10 MiB). */
const SLICE_ENOUGH_BYTES = SLICE_BYTES_MAX / 2;

export interface ExchangeOptions {
  readonly socket: Source;
  readonly parser: ResponseParser;
  readonly request: TransportRequest;
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

  #answer({ status, fields }: ResponseHead, body: Uint8Array | ReadableStream<Uint8Array>): void {
    const { hasBody } = this.#options.parser;
    this.#response.resolve(new ReceivedAnswer(status, fields, hasBody ? body : null));
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

/** A request that is pinned to an address. */
export interface TransportRequest {
  readonly target: DialTarget;
  /** The one of the target's host that is dialled. */
  readonly address: string;
  readonly method: string;
  /** Lines of all headers except Host and those of the connection and the length. */
  readonly fields: string;
  readonly body: CallBody | null;
  readonly signal: StopSignal;
  /** Whose connections are used, and in whose turns the answer is read. */
  readonly tenant: string;
  readonly tlsContext: TlsContext;
  /** Called with the end of the server's certificate, in milliseconds since the epoch, where a connection is made. */
  readonly certified?: ((validTo: number) => void) | undefined;
  /** Awaited on the connection, right before the first byte leaves; nothing leaves when it rejects. */
  readonly leaving?: (() => Promise<void>) | undefined;
  /** Called when the body is not needed any more: it has left, or never will. May be called more than once. */
  readonly sent?: (() => void) | undefined;
  /** The share to which answer bytes count that arrive ahead of their reader. Left out: nobody's. */
  readonly ahead?: AnswerReadAhead | undefined;
}

/** The error of an exchange without an answer, or with half of one. */
export class TransportError extends Error {
  readonly code: string;

  constructor(code: string) {
    super(code);
    this.code = code;
  }
}
