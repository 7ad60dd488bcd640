// One request on a connection and its answer, of which nothing is lost: what came before a breach is given before that
// is told. The answer is read no faster than it is taken.
import type { Socket } from "node:net";
import { type Head, type ResponseParser, SLICE_BYTES_MAX } from "./response-parser.ts";
import { TransportError, type TransportRequest } from "./transport.ts";
import { inTurns } from "./turns.ts";

/** What has come and is not parsed yet, and in how many parts: while it is more, the connection is not read. */
const UNPARSED_BYTES_MAX = 64 * 1024;
const UNPARSED_PARTS_MAX = 256;

export interface ExchangeOptions {
  readonly socket: Socket;
  readonly parser: ResponseParser;
  readonly request: TransportRequest;
  /** @param isClean whether the connection stands where another request can follow */
  over(isClean: boolean): void;
}

export class Exchange {
  readonly #options: ExchangeOptions;
  readonly #response = Promise.withResolvers<Response>();
  #head: Head | null = null;
  readonly #unparsed: Uint8Array[] = [];
  #unparsedBytes = 0;
  #isParsed = false;
  #connectionEnd: "closed" | "broken" | null = null;
  /** Of the body: what is next, and what comes after that, if that is known. */
  #piece: Uint8Array | null = null;
  #end: "whole" | TransportError | null = null;
  #wanted: PromiseWithResolvers<void> | null = null;

  constructor(options: ExchangeOptions) {
    this.#options = options;
    const { parser, request } = options;
    parser.begin(request.method);
    request.signal.addEventListener("abort", this.#abort, { once: true });
    // Told through `response`; nobody may be waiting for that any more.
    this.#response.promise.catch(() => {});
  }

  /** Its body is still encoded. */
  get response(): Promise<Response> {
    return this.#response.promise;
  }

  get head(): Head | null {
    return this.#head;
  }

  arrived(bytes: Uint8Array): void {
    this.#unparsed.push(bytes);
    this.#unparsedBytes += bytes.length;
    if (this.#isFull()) this.#options.socket.pause();
    inTurns(this.#step, this.#options.request.tenant);
  }

  /** What has come before is still parsed and given. @param how whether the server has closed it in good order */
  connectionEnded(how: "closed" | "broken"): void {
    this.#connectionEnd ??= how;
    inTurns(this.#step, this.#options.request.tenant);
  }

  readonly #abort = (): void => {
    this.#response.reject(this.#options.request.signal.reason);
    this.#finish(new TransportError("ECONNRESET"), false);
  };

  /** Parses the next slice, if that is wanted. */
  readonly #step = (): boolean => {
    if (this.#end !== null || this.#isParsed || (this.#head !== null && this.#wanted === null)) return false;
    const slice = this.#nextSlice();
    if (slice === null) {
      if (this.#connectionEnd !== null) this.#endWithConnection(this.#connectionEnd);
      return false;
    }
    const { head, body, state, used } = this.#options.parser.parse(slice);
    if (head !== null) this.#open(head);
    if (body !== null) this.#piece = body;
    if (state === "whole") this.#endWhole(used === slice.length);
    else if (state !== "more") this.#finish(new TransportError(state.code), false);
    if (body !== null) this.#give();
    return this.#end === null && !this.#isParsed;
  };

  /** What has come right behind the answer is seen first: the end of the connection, or what nobody asked for. */
  #endWhole(isAll: boolean): void {
    this.#isParsed = true;
    setImmediate(() => {
      const isQuiet = this.#unparsedBytes === 0 && this.#connectionEnd === null;
      this.#finish("whole", isAll && isQuiet);
    });
  }

  #isFull(): boolean {
    return this.#unparsedBytes > UNPARSED_BYTES_MAX || this.#unparsed.length > UNPARSED_PARTS_MAX;
  }

  /** Of all that has come, however many parts it came in: a slice for each would be a turn for each. */
  #nextSlice(): Uint8Array | null {
    const wasFull = this.#isFull();
    const parts: Uint8Array[] = [];
    let left = SLICE_BYTES_MAX;
    while (left > 0) {
      const part = this.#unparsed.shift();
      if (part === undefined) break;
      const taken = part.subarray(0, left);
      if (taken.length < part.length) this.#unparsed.unshift(part.subarray(taken.length));
      parts.push(taken);
      left -= taken.length;
    }
    this.#unparsedBytes -= SLICE_BYTES_MAX - left;
    if (wasFull && !this.#isFull()) this.#options.socket.resume();
    return parts.length > 1 ? Buffer.concat(parts) : (parts[0] ?? null);
  }

  #open(head: Head): void {
    this.#head = head;
    const { status, fields } = head;
    const headers = new Headers();
    for (let at = 0; at + 1 < fields.length; at += 2) headers.append(fields[at] ?? "", fields[at + 1] ?? "");
    const body = this.#options.parser.hasBody ? this.#body() : null;
    this.#response.resolve(new Response(body, { status, headers }));
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

  #finish(end: "whole" | TransportError, isClean: boolean): void {
    if (this.#end !== null) return;
    this.#end = end;
    this.#options.request.signal.removeEventListener("abort", this.#abort);
    if (end !== "whole") this.#response.reject(end);
    this.#give();
    this.#options.over(isClean);
  }
}
