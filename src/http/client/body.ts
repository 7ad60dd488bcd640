// Bodies of answers: read within bounds, and decoded from their Content-Encoding meanwhile. Sizes count decoded bytes. Nothing
// is decoded before it is asked for, nor before the most memory that its codings may take is counted, so a sender of little
// that unpacks to much, or of much that unpacks to nothing, gets only its share.

import { joined } from "../../core/bytes.ts";
import { MAX } from "../../kernel/limits.ts";
import { ReclaimableShare } from "../../kernel/share.ts";
import { inThreadTurn } from "../../kernel/turns.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import type { BodyReader } from "../body-buffer.ts";
import {
  type DecoderFormat,
  NativeDecoder,
  ROOM_BYTES,
  ZSTD_WINDOW_LOG_MAX,
  ZSTD_WINDOW_TOO_LARGE,
} from "../bun/native-decoders.ts";
import { type Answer, lost } from "./exchange.ts";
import type { AnswerHeaders } from "./response-parser.ts";

export type Chunks = AsyncIterableIterator<Uint8Array, void, undefined>;

/** The body, or what a layer of its encoding unpacks to, went beyond the limit. */
export class BodyTooLarge extends Error {}

/** The answer came in an encoding that is understood but not accepted. The message is for the log. */
export class Undecodable extends Error {
  override readonly name = "Undecodable";
}

type Coding = "gzip" | "deflate" | "br" | "zstd";

const CODINGS: Readonly<Record<string, Coding>> = {
  gzip: "gzip",
  "x-gzip": "gzip",
  deflate: "deflate",
  br: "br",
  zstd: "zstd",
};

/** What a body is encoded with, by its Content-Encoding and for its transfer, and why that is not taken. */
interface Codings {
  /** To be undone, outermost first. Empty too when one is unknown: then the body stays as it is. */
  readonly list: readonly Coding[];
  readonly problem: string | null;
}

const NONE: Codings = { list: [], problem: null };

const isPlain = (headers: AnswerHeaders): boolean =>
  !headers.has("content-encoding") && (headers.get("transfer-encoding") ?? "chunked").toLowerCase() === "chunked";

const namesIn = (list: string): string[] => list.split(",").map((name) => name.trim().toLowerCase());

function codingsIn(headers: AnswerHeaders): Codings {
  if (isPlain(headers)) return NONE;
  const [content, sent] = [headers.get("content-encoding") ?? "", headers.get("transfer-encoding") ?? ""];
  // No honest answer has a longer list of them, which is parsed for every answer.
  if (content.length + sent.length > 256) return { list: [], problem: "a very long list of encodings" };
  // The transfer encodes the body once more, and `chunked` only frames it (RFC 9112, section 7).
  const hops = namesIn(sent);
  if (hops.slice(0, -1).includes("chunked")) return { list: [], problem: "chunked is not the last transfer coding" };
  const transfer = hops.filter((name) => name !== "" && name !== "chunked");
  const names = [...namesIn(content), ...transfer];
  const list: Coding[] = [];
  for (const name of names.filter((each) => each !== "" && each !== "identity").reverse()) {
    const coding = Object.hasOwn(CODINGS, name) ? CODINGS[name] : undefined;
    if (coding === undefined) return { list: [], problem: transfer.length === 0 ? null : "an unknown transfer coding" };
    list.push(coding);
  }
  if (list.length > MAX.encodings) return { list, problem: `more than ${MAX.encodings} encodings` };
  if (list.filter((coding) => coding === "zstd").length > 1) return { list, problem: "zstd within zstd" };
  return { list, problem: null };
}

/** Whether decoding changes the bytes, so that headers that describe the sent ones no longer apply. */
export function isEncoded(headers: AnswerHeaders): boolean {
  return codingsIn(headers).list.length > 0;
}

/** For whom a body is decoded. */
export interface DecodedFor {
  readonly tenant: string;
  /**
   * Resolves when so many bytes of memory may be held, with what gives them back.
   *
   * @param signal its reason ends the wait
   * @param evict called when others need them: they are to be given back soon
   */
  decoderMemory(bytes: number, signal: StopSignal, evict: () => void): Promise<() => void>;
}

/** For answers of servers that the operator configured. */
const NOBODY: DecodedFor = { tenant: "", decoderMemory: async () => () => {} };

export type DecoderShare = ReturnType<typeof createDecoderShare>;

/**
 * The memory of all decoders of a thread, shared out by tenant first. An answer of a few hundred bytes can make its decoder
 * hold 16 MiB for as long as it stays open. So one of a tenant that holds more than its part is evicted when others wait: see
 * kernel/share.ts.
 */
export function createDecoderShare(size: number) {
  const memory = new ReclaimableShare(size);
  return {
    /** As `DecodedFor.decoderMemory`. What it resolves with is to be called once. */
    async take(
      { tenant, agent }: { readonly tenant: string; readonly agent: string },
      bytes: number,
      signal: StopSignal,
      evict: () => void,
    ): Promise<() => void> {
      signal.throwIfAborted();
      const holding = memory.hold(tenant, agent);
      holding.evict = evict;
      await holding.take(bytes, signal);
      return () => holding.giveBack();
    },
    inUse: (): number => memory.inUse,
  };
}

const KIB = 1024;
const MIB = 1024 * KIB;

const BROTLI_TABLES_BYTES = 4 * MIB;

/** The most that the decoder of each coding may hold. */
const NEEDS: Readonly<Record<Coding, number>> = {
  // The window of 32 KiB, tables, and what surrounds them.
  gzip: 64 * KIB + ROOM_BYTES,
  deflate: 64 * KIB + ROOM_BYTES,
  // The largest window, and up to 256 tables of each of three kinds.
  br: 16 * MIB + BROTLI_TABLES_BYTES + ROOM_BYTES,
  // The largest window that is taken, for each frame may name its own; tables, and a block of each side.
  zstd: 2 ** ZSTD_WINDOW_LOG_MAX + 384 * KIB + ROOM_BYTES,
};

/** Input of one step, which costs time even if nothing comes out. */
const INPUT_BYTES = 16 * KIB;
/** No honest answer gives a layer more input than this that is also so many times its output. */
const INPUT_FREE_BYTES = MIB;
const INPUT_PER_OUTPUT_MAX = 64;

async function* slicesOf(chunks: Chunks): Chunks {
  for await (const chunk of chunks) {
    for (let at = 0; at < chunk.length; at += INPUT_BYTES) yield chunk.subarray(at, at + INPUT_BYTES);
  }
}

/** By its first byte (RFC 7932, section 9.1). @throws Undecodable */
function brotliWindowOf(firstByte: number): number {
  if ((firstByte & 1) === 0) return 2 ** 16;
  const [high, low] = [(firstByte >> 1) & 0b111, (firstByte >> 4) & 0b111];
  if (high !== 0) return 2 ** (17 + high);
  if (low === 1) throw new Undecodable("a large window of brotli");
  return 2 ** (low === 0 ? 17 : 8 + low);
}

/** The most that the decoders of a body with this first byte may hold: an inner layer has not been seen. */
function needsOf(codings: readonly Coding[], firstByte: number): number {
  if (codings.length === 1 && codings[0] === "br") {
    return brotliWindowOf(firstByte) + BROTLI_TABLES_BYTES + ROOM_BYTES;
  }
  return codings.reduce((sum, coding) => sum + NEEDS[coding], 0);
}

/** @throws Undecodable */
function formatOf(coding: Coding, firstByte: number): DecoderFormat {
  if (coding === "br") brotliWindowOf(firstByte);
  // Means the zlib format (RFC 9110 section 8.4.1.2), but some servers send bare deflate: the method bits of the zlib
  // header tell them apart.
  return coding === "deflate" && (firstByte & 0x0f) !== 8 ? "deflate-raw" : coding;
}

function notDecoded(error: unknown): never {
  const isWindow = error instanceof Error && "code" in error && error.code === ZSTD_WINDOW_TOO_LARGE;
  throw isWindow ? new Undecodable("a zstd window above 8 MiB") : error;
}

interface DecodingOptions {
  /** Outermost first. */
  readonly codings: readonly Coding[];
  /** Each layer may unpack to this much: a small body can hide gigabytes between two layers. */
  readonly maxBytes: number;
  readonly decodedFor: DecodedFor;
  /** Called when others need its memory: it has to be closed. */
  evict(): void;
}

/** The decoding of one body, with a layer for each encoding, in turns by tenant. */
class Decoding {
  readonly #options: DecodingOptions;
  readonly #closing = new AbortController();
  readonly #decoders: NativeDecoder[] = [];
  /** Null until its memory is counted. */
  #giveBack: (() => void) | null = null;

  constructor(options: DecodingOptions) {
    this.#options = options;
  }

  chunks(raw: Chunks): Chunks {
    return this.#options.codings.reduce((source, coding) => this.#decode(source, coding), raw);
  }

  /** At once, whatever it waits for. */
  close(): void {
    if (this.#closing.signal.aborted) return;
    this.#closing.abort(new Error("the body was closed"));
    for (const decoder of this.#decoders) decoder.close();
    this.#giveBack?.();
  }

  async *#decode(source: Chunks, coding: Coding): Chunks {
    const { maxBytes, decodedFor } = this.#options;
    let decoder: NativeDecoder | null = null;
    let [taken, given] = [0, 0];
    for await (const input of slicesOf(source)) {
      decoder ??= await this.#open(coding, input[0] ?? 0);
      for await (const output of this.#outputsOf(decoder, input)) {
        if (output.length > 0) yield output;
        given += output.length;
        if (given > maxBytes) throw new BodyTooLarge(`a layer of ${coding} is too large`);
      }
      taken += input.length;
      const isMuch = taken > INPUT_FREE_BYTES + INPUT_PER_OUTPUT_MAX * given;
      if (isMuch) throw new Undecodable(`much ${coding} that comes to nothing`);
    }
    // No bytes are an empty body in any encoding.
    if (decoder !== null) await inThreadTurn(decodedFor.tenant, () => decoder.finish());
  }

  async *#outputsOf(decoder: NativeDecoder, input: Uint8Array): Chunks {
    const { tenant } = this.#options.decodedFor;
    for (let [left, hasMore] = [input, true]; hasMore; ) {
      const { output, used, isFull } = await inThreadTurn(tenant, () => decoder.decode(left)).catch(notDecoded);
      this.#closing.signal.throwIfAborted();
      yield output;
      [left, hasMore] = [left.subarray(used), isFull];
    }
  }

  async #open(coding: Coding, firstByte: number): Promise<NativeDecoder> {
    const format = formatOf(coding, firstByte);
    if (this.#giveBack === null) await this.#takeMemory(firstByte);
    this.#closing.signal.throwIfAborted();
    const decoder = new NativeDecoder(format);
    this.#decoders.push(decoder);
    return decoder;
  }

  /** Takes all that its layers may come to need, so that nobody who holds some waits for more. */
  async #takeMemory(firstByte: number): Promise<void> {
    const { codings, decodedFor, evict } = this.#options;
    const { signal } = this.#closing;
    const giveBack = await decodedFor.decoderMemory(needsOf(codings, firstByte), signal, evict);
    if (signal.aborted) giveBack();
    signal.throwIfAborted();
    this.#giveBack = giveBack;
  }
}

export interface BodyRead {
  /** Decoded bytes; when `tooLarge`, those that were seen. */
  readonly size: number;
  /** The first `captureBytes` of the body. */
  readonly captured: Uint8Array;
  /** Whether the body is longer than what was captured. */
  readonly truncated: boolean;
  /** The body went beyond `maxBytes`, and the connection was closed. */
  readonly tooLarge: boolean;
}

interface OpenOptions {
  readonly maxBytes: number;
  /** Nobody when it is left out. */
  readonly decodedFor?: DecodedFor;
  /** Needed only beside the request's own signal, which covers the body as well. */
  readonly signal?: AbortSignal;
}

export interface BodyLimits extends OpenOptions {
  readonly captureBytes: number;
  /** Called before this many bytes in all are kept. The body is not read on before the returned promise settles. */
  readonly grow?: (bytes: number) => Promise<void> | undefined;
  /** Called with what comes after the first `captureBytes`, piece by piece, and with a getter for those first bytes. */
  readonly beyond?: (rest: Uint8Array, start: () => Uint8Array) => void;
}

/** A body up to this size that came whole is taken as it is. */
const SMALL_BYTES = 64 * KIB;

const DONE = { done: true, value: undefined } as const;

/**
 * The chunks of an open body, got one by one as a generator would give them. A generator hands each on through several
 * turns of the microtask queue: with two of them the first bytes of a short stream reached their reader 30 µs later
 * (measured). To leave it closes the body at once, even while a chunk is awaited.
 */
class BodyChunks implements Chunks {
  readonly #read: () => Promise<{ readonly value?: Uint8Array | undefined }>;
  readonly #close: () => void;
  readonly #signals: readonly AbortSignal[];
  #isOver = false;

  constructor(
    read: () => Promise<{ readonly value?: Uint8Array | undefined }>,
    close: () => void,
    signals: readonly AbortSignal[],
  ) {
    this.#read = read;
    this.#close = close;
    this.#signals = signals;
    for (const signal of signals) signal.addEventListener("abort", close, { once: true });
  }

  /** @throws OutboundError, BodyTooLarge, Undecodable, the reason of a signal */
  async next(): Promise<IteratorResult<Uint8Array, void>> {
    if (this.#isOver) return DONE;
    try {
      this.#check();
      const { value } = await this.#read();
      if (value !== undefined) return { done: false, value };
      // A body closed by a signal ends like an ordinary one.
      this.#check();
    } catch (error) {
      this.#finish();
      this.#check();
      throw error instanceof BodyTooLarge || error instanceof Undecodable ? error : lost(error);
    }
    this.#finish();
    return DONE;
  }

  async return(): Promise<IteratorResult<Uint8Array, void>> {
    this.#finish();
    return DONE;
  }

  #check(): void {
    for (const signal of this.#signals) signal.throwIfAborted();
  }

  #finish(): void {
    if (this.#isOver) return;
    this.#isOver = true;
    for (const signal of this.#signals) signal.removeEventListener("abort", this.#close);
    this.#close();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }
}

type BodyBytes = Pick<BodyReader, "read" | "cancel">;

/** The body as it was sent. */
function sentBody({ whole, body }: Answer): BodyBytes {
  if (body !== null) return body.getReader();
  let value = whole?.length ? whole : undefined;
  return {
    async read() {
      const piece = value;
      value = undefined;
      return { done: piece === undefined, value: piece };
    },
    async cancel() {},
  };
}

async function* sentChunks(reader: BodyBytes): Chunks {
  for (let next = await reader.read(); next.value !== undefined; next = await reader.read()) yield next.value;
}

/**
 * The decoded body, for a reader that reads to the end, leaves, or stops by the signal. Its errors are OutboundErrors,
 * BodyTooLarge when a layer of an encoding unpacks to more than `maxBytes`, Undecodable, or the signal's reason.
 */
export function bodyChunks(response: Answer, { maxBytes, decodedFor = NOBODY, signal }: OpenOptions): Chunks {
  const reader = sentBody(response);
  const cancel = () => void reader.cancel().catch(() => {});
  const signals = signal === undefined ? [] : [signal];
  if (isPlain(response.headers)) return new BodyChunks(() => reader.read(), cancel, signals);
  const crowded = new AbortController();
  const evict = () => crowded.abort(new Undecodable("others need the memory of its decoder"));
  const { list: codings, problem } = codingsIn(response.headers);
  const decoding = new Decoding({ codings, maxBytes, decodedFor, evict });
  const chunks = decoding.chunks(sentChunks(reader));
  const hasBody = response.body !== null || Boolean(response.whole);
  const next = async () => {
    if (hasBody && problem !== null) throw new Undecodable(problem);
    const { value } = await chunks.next();
    return { value: value ?? undefined };
  };
  const close = () => {
    decoding.close();
    cancel();
  };
  return new BodyChunks(next, close, [...signals, crowded.signal]);
}

/** What `readBody` gives, if it need not wait: of a small answer that came whole, and is not encoded. */
export function bodyAtOnce({ whole, headers }: Answer, limits: BodyLimits): BodyRead | null {
  const { maxBytes, captureBytes, beyond, signal } = limits;
  if (whole === undefined || whole === null || whole.length > Math.min(maxBytes, SMALL_BYTES)) return null;
  if (signal !== undefined || !isPlain(headers)) return null;
  const truncated = whole.length > captureBytes;
  const captured = truncated ? whole.slice(0, captureBytes) : whole;
  if (truncated) beyond?.(whole.subarray(captureBytes), () => captured);
  return { size: whole.length, captured, truncated, tooLarge: false };
}

/** The part of a chunk that is kept, once there is memory for it. `size` bytes came before it. */
async function startOf(chunk: Uint8Array, size: number, { captureBytes, grow }: BodyLimits): Promise<Uint8Array> {
  await grow?.(Math.min(size + chunk.length, captureBytes));
  const room = captureBytes - size;
  // A copy, because keeping a part would keep the whole chunk in memory.
  return chunk.length > room ? chunk.slice(0, room) : chunk;
}

/**
 * Reads a body to its end, keeping only its start.
 *
 * @throws OutboundError `lost` when it breaks off or its encoding is corrupt; Undecodable; the signal's reason
 */
export async function readBody(response: Answer, limits: BodyLimits): Promise<BodyRead> {
  const small = bodyAtOnce(response, limits);
  if (small !== null) return small;
  const { maxBytes, captureBytes, beyond } = limits;
  const kept: Uint8Array[] = [];
  let size = 0;
  let tooLarge = false;
  try {
    for await (const chunk of bodyChunks(response, limits)) {
      if (size < captureBytes) kept.push(await startOf(chunk, size, limits));
      const room = Math.max(captureBytes - size, 0);
      if (chunk.length > room) beyond?.(chunk.subarray(room), () => joined(kept));
      size += chunk.length;
      if (size > maxBytes) throw new BodyTooLarge("the body is too large");
    }
  } catch (error) {
    if (!(error instanceof BodyTooLarge)) throw error;
    tooLarge = true;
  }
  return { size, captured: joined(kept), truncated: tooLarge || size > captureBytes, tooLarge };
}
