// Parses HTTP/1.1 answers (RFC 9112) by llhttp, the strict parser of Node.js, which undici ships as WebAssembly. Node's own
// client emits every chunk separately (measured on Bun 1.4.5: 17 µs each, and 4.7 s without a pause for an upstream that sends
// one-byte chunks); here all chunks of a slice become one piece (0.2 µs each). A body with a Content-Length is only counted,
// neither parsed nor copied.
// One per thread, since the WebAssembly module calls back without naming the parser that it works for.
import { MAX } from "../../kernel/limits.ts";

/** A Content-Length that a number can hold exactly. */
const LENGTH = /^\d{1,15}$/;
/** The most bytes that are parsed at once, which takes two milliseconds at most, whatever they hold. */
export const SLICE_BYTES_MAX = 64 * 1024;
const SWITCHING_PROTOCOLS = 101;
/** Statuses whose answers have no body (RFC 9110), whatever their heads say. */
export const BODILESS: ReadonlySet<number> = new Set([204, 205, 304]);

/** Constants of llhttp: the type of parser, results, and the return values of callbacks. */
const TYPE_RESPONSE = 2;
const [OK, PAUSED] = [0, 21];
const [GO_ON, SKIP_BODY, REFUSE] = [0, 1, -1];

/** How much of a slice is decoded as text at once, for the fields in it: all of most heads. */
const TEXT_BYTES = 2048;

const NOTHING = new Uint8Array();

export interface ResponseHead {
  readonly status: number;
  readonly headers: AnswerHeaders;
}

export interface ParsedSlice {
  /** The head, if this slice completed it. */
  readonly head: ResponseHead | null;
  /** The part of the body in this slice. */
  readonly body: Uint8Array | null;
  /** A code names what breaks the protocol or a limit; everything before it is valid. */
  readonly state: "more" | "whole" | { readonly code: string };
  /** How many bytes of the slice belong to the answer. */
  readonly used: number;
}

interface Llhttp {
  readonly memory: WebAssembly.Memory;
  _initialize(): void;
  malloc(bytes: number): number;
  llhttp_alloc(type: number): number;
  llhttp_free(parser: number): void;
  llhttp_reset(parser: number): void;
  llhttp_execute(parser: number, at: number, length: number): number;
  llhttp_get_error_pos(parser: number): number;
  llhttp_message_needs_eof(parser: number): number;
}

/** The parser that is running. Callbacks come only while one runs. */
let current: ResponseParser | null = null;
let llhttp: Llhttp | null = null;
/** The module's input buffer: its address, and a view of it. */
let input = 0;
let inputView = Buffer.alloc(0);

function library(): Llhttp {
  if (llhttp !== null) return llhttp;
  const env = {
    wasm_on_url: () => GO_ON,
    wasm_on_status: (_: number, _at: number, length: number) => current?.onHeadBytes(length) ?? REFUSE,
    wasm_on_message_begin: () => current?.onMessageBegin() ?? REFUSE,
    wasm_on_header_field: (_: number, at: number, length: number) => current?.onName(at, length) ?? REFUSE,
    wasm_on_header_value: (_: number, at: number, length: number) => current?.onValue(at, length) ?? REFUSE,
    wasm_on_headers_complete: (_: number, status: number, _upgrade: number, keepsAlive: number) =>
      current?.onHead(status, keepsAlive !== 0) ?? REFUSE,
    wasm_on_body: (_: number, at: number, length: number) => current?.onBody(at, length) ?? REFUSE,
    wasm_on_message_complete: () => current?.onComplete() ?? REFUSE,
  };
  // `import` would copy each of the 60,000 bytes as a property of a module object: 50 ms of each thread's start (measured).
  const binary: Uint8Array<ArrayBuffer> = require("undici/lib/llhttp/llhttp-wasm.js");
  const instance = new WebAssembly.Instance(new WebAssembly.Module(binary), { env });
  llhttp = instance.exports as unknown as Llhttp;
  llhttp._initialize();
  input = llhttp.malloc(SLICE_BYTES_MAX);
  inputView = Buffer.from(llhttp.memory.buffer, input, SLICE_BYTES_MAX);
  return llhttp;
}

export class ResponseParser {
  readonly #llhttp = library();
  readonly #pointer = this.#llhttp.llhttp_alloc(TYPE_RESPONSE);
  #isHead = false;
  #slice: Uint8Array = NOTHING;
  /** The first TEXT_BYTES of the slice as text. */
  #start: string | null = null;
  #fields: string[] = [];
  #isNameOpen = false;
  /** Bytes of heads in the slices before this one, and of the fields in this one. */
  #headBytes = 0;
  #sliceHeadBytes = 0;
  #trailerBytes = 0;
  #interim = 0;
  #status = 0;
  #head: ResponseHead | null = null;
  #body: Uint8Array | null = null;
  #bodyBytes = 0;
  #isWhole = false;
  #keepsAlive = false;
  /** Bytes that have not arrived yet of a body with a Content-Length; null for any other body. */
  #remaining: number | null = null;
  #refusal: string | null = null;

  /** Resets the parser for the answer to another request. */
  begin(method: string): void {
    this.#llhttp.llhttp_reset(this.#pointer);
    this.#isHead = method === "HEAD";
    this.#headBytes = 0;
    this.#trailerBytes = 0;
    this.#interim = 0;
    this.#status = 0;
    this.#isWhole = false;
    this.#keepsAlive = false;
    this.#remaining = null;
    this.#refusal = null;
  }

  /** @param slice at most SLICE_BYTES_MAX; it must not change afterwards, since the body may be a view of it */
  parse(slice: Uint8Array): ParsedSlice {
    return this.#remaining === null ? this.#parse(slice) : this.#count(slice, 0);
  }

  #parse(slice: Uint8Array): ParsedSlice {
    const { memory, llhttp_execute, llhttp_get_error_pos } = this.#llhttp;
    // The view is detached when the memory of the module has grown.
    if (inputView.length === 0) inputView = Buffer.from(memory.buffer, input, SLICE_BYTES_MAX);
    inputView.set(slice);
    this.#slice = slice;
    this.#start = null;
    this.#head = null;
    this.#body = null;
    this.#bodyBytes = 0;
    this.#sliceHeadBytes = 0;
    current = this;
    const result = llhttp_execute(this.#pointer, input, slice.length);
    current = null;
    this.#slice = NOTHING;
    this.#start = null;
    const used = result === OK ? slice.length : llhttp_get_error_pos(this.#pointer) - input;
    if (this.#status === 0) this.#headBytes += used;
    if (this.#remaining !== null) return this.#count(slice, used);
    return { head: this.#head, body: this.#takeBody(), state: this.#stateOf(result), used };
  }

  /** Counts the bytes of a body with a Content-Length. @param from where the body begins in the slice */
  #count(slice: Uint8Array, from: number): ParsedSlice {
    const remaining = this.#remaining ?? 0;
    const used = Math.min(slice.length, from + remaining);
    this.#remaining = remaining - (used - from);
    this.#isWhole = this.#remaining === 0;
    const body = used > from ? slice.subarray(from, used) : null;
    const head = from > 0 ? this.#head : null;
    return { head, body, state: this.#isWhole ? "whole" : "more", used };
  }

  /** Whether the answer ends with its connection, since it has neither a length nor chunks. */
  get endsWithConnection(): boolean {
    return (
      this.#status !== 0 &&
      !this.#isWhole &&
      this.#remaining === null &&
      this.#llhttp.llhttp_message_needs_eof(this.#pointer) !== 0
    );
  }

  /** Whether the answer whose head has come may have a body. */
  get hasBody(): boolean {
    return !this.#isHead && !BODILESS.has(this.#status);
  }

  /** Whether the connection may carry another request after this answer. */
  get keepsAlive(): boolean {
    return this.#isWhole && this.#keepsAlive;
  }

  /** Frees the parser, which can't be used afterwards. */
  free(): void {
    this.#llhttp.llhttp_free(this.#pointer);
  }

  #stateOf(result: number): ParsedSlice["state"] {
    if (this.#isWhole) return "whole";
    if (this.#refusal !== null) return { code: this.#refusal };
    if (result !== OK) return { code: "InvalidHTTPResponse" };
    return this.#headBytes > MAX.upstreamHeadBytes ? { code: "HeadTooLarge" } : "more";
  }

  #takeBody(): Uint8Array | null {
    const [body, length] = [this.#body, this.#bodyBytes];
    this.#body = null;
    if (body === null || length === body.length) return body;
    // A copy, since a view would keep the whole slice in memory for a few bytes.
    return body.slice(0, length);
  }

  #refuse(code: string): number {
    this.#refusal = code;
    return REFUSE;
  }

  #text(at: number, length: number): string {
    const [from, to] = [at - input, at - input + length];
    if (to > TEXT_BYTES) return inputView.toString("latin1", from, to);
    this.#start ??= inputView.toString("latin1", 0, Math.min(this.#slice.length, TEXT_BYTES));
    return this.#start.slice(from, to);
  }

  onMessageBegin(): number {
    this.#fields = [];
    this.#isNameOpen = false;
    return GO_ON;
  }

  /** Counts bytes of the head field by field, since one slice may complete a head that is too large. */
  onHeadBytes(bytes: number): number {
    this.#sliceHeadBytes += bytes;
    const isTooLarge = this.#headBytes + this.#sliceHeadBytes > MAX.upstreamHeadBytes;
    return isTooLarge ? this.#refuse("HeadTooLarge") : GO_ON;
  }

  onName(at: number, length: number): number {
    if (this.#status !== 0) return this.#onTrailer(length);
    if (this.onHeadBytes(length) !== GO_ON) return REFUSE;
    const name = this.#text(at, length);
    if (this.#isNameOpen) this.#fields.push(`${this.#fields.pop()}${name}`);
    else if (this.#fields.length >= 2 * MAX.upstreamFields) return this.#refuse("TooManyHeaders");
    else this.#fields.push(name);
    this.#isNameOpen = true;
    return GO_ON;
  }

  onValue(at: number, length: number): number {
    if (this.#status !== 0) return this.#onTrailer(length);
    if (this.onHeadBytes(length) !== GO_ON) return REFUSE;
    const value = this.#text(at, length);
    // The callback may bring the rest of a value that began in the slice before.
    if (this.#isNameOpen) this.#fields.push(value);
    else this.#fields.push(`${this.#fields.pop()}${value}`);
    this.#isNameOpen = false;
    return GO_ON;
  }

  /** Trailers are dropped. */
  #onTrailer(length: number): number {
    this.#trailerBytes += length;
    return this.#trailerBytes > MAX.upstreamHeadBytes ? this.#refuse("HeadTooLarge") : GO_ON;
  }

  onHead(status: number, keepsAlive: boolean): number {
    // No request asks for another protocol, so 101 is refused.
    const isStatus = status >= 100 && status <= 599 && status !== SWITCHING_PROTOCOLS;
    if (!isStatus) return this.#refuse("InvalidStatus");
    if (status < 200) return ++this.#interim > MAX.interimAnswers ? this.#refuse("TooManyInterimAnswers") : GO_ON;
    this.#status = status;
    this.#keepsAlive = keepsAlive;
    const headers = new FieldHeaders(this.#fields);
    this.#head = { status, headers };
    if (!this.hasBody) return SKIP_BODY;
    this.#remaining = lengthOf(headers);
    return this.#remaining === null ? GO_ON : SKIP_BODY;
  }

  onBody(at: number, length: number): number {
    const start = at - input;
    if (this.#body === null) {
      this.#body = this.#slice.subarray(start, start + length);
      this.#bodyBytes = length;
      return GO_ON;
    }
    // From the second part of a slice on the parts are joined.
    if (this.#body.buffer === this.#slice.buffer) {
      const whole = new Uint8Array(this.#slice.length);
      whole.set(this.#body);
      this.#body = whole;
    }
    const end = this.#bodyBytes;
    // Up to 32 bytes a loop copies faster than `set`, which needs a view.
    if (length < 32) {
      for (let i = 0; i < length; i++) this.#body[end + i] = this.#slice[start + i] ?? 0;
    } else this.#body.set(this.#slice.subarray(start, start + length), end);
    this.#bodyBytes = end + length;
    return GO_ON;
  }

  onComplete(): number {
    if (this.#status === 0) return GO_ON;
    this.#isWhole = this.#remaining === null;
    return PAUSED;
  }
}

/** The Content-Length of a body that is not chunked; null for any other body. The parser has refused contradictions. */
function lengthOf(headers: AnswerHeaders): number | null {
  const length = headers.get("content-length");
  if (length === null || !LENGTH.test(length) || headers.has("transfer-encoding")) return null;
  return Number(length);
}

/** Names are given in lower case. The runtime's Headers has this form too, but took 2 of the 38 µs of a small call (Bun 1.4.5). */
export interface AnswerHeaders extends Iterable<[name: string, value: string]> {
  /** All values of the name, joined by commas. */
  get(name: string): string | null;
  has(name: string): boolean;
}

/** The fields of a head that the parser let through. */
export class FieldHeaders implements AnswerHeaders {
  readonly #fields: readonly string[];

  /** @param fields names and values alternately, as they were sent */
  constructor(fields: readonly string[]) {
    this.#fields = fields;
  }

  get(name: string): string | null {
    let found: string | null = null;
    for (let at = 0; at + 1 < this.#fields.length; at += 2) {
      if (!isNamed(this.#fields[at] ?? "", name)) continue;
      const value = bareValue(this.#fields[at + 1] ?? "");
      found = found === null ? value : `${found}, ${value}`;
    }
    return found;
  }

  has(name: string): boolean {
    for (let at = 0; at < this.#fields.length; at += 2) if (isNamed(this.#fields[at] ?? "", name)) return true;
    return false;
  }

  *[Symbol.iterator](): Iterator<[string, string]> {
    for (let at = 0; at + 1 < this.#fields.length; at += 2) {
      yield [(this.#fields[at] ?? "").toLowerCase(), bareValue(this.#fields[at + 1] ?? "")];
    }
  }
}

/** Whether a field has this name, given in lower case. Most names differ in length, which is cheap to see. */
const isNamed = (field: string, name: string): boolean => field.length === name.length && field.toLowerCase() === name;

const BLANKS = new Set([0x09, 0x0a, 0x0d, 0x20]);

/**
 * A value without blanks around it (RFC 9110, section 5.5, and the Fetch standard). A regular expression for trailing blanks would
 * start over at each blank in the middle, of which a hostile upstream may send 60,000.
 */
export function bareValue(value: string): string {
  let [from, to] = [0, value.length];
  while (from < to && BLANKS.has(value.charCodeAt(from))) from++;
  while (to > from && BLANKS.has(value.charCodeAt(to - 1))) to--;
  return value.slice(from, to);
}
