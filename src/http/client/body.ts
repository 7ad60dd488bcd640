// Reads the bodies of answers within bounds, and decodes their Content-Encoding. Sizes count decoded bytes. A body is decoded
// only as its reader asks for it, and only after the most memory that its codings may need has been charged, so neither a
// decompression bomb nor endless input without output takes more than its tenant's share.
import { joined } from "../../core/bytes.ts";
import { errorCode } from "../../core/fault.ts";
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

/** The body, or the output of a layer of its encoding, is larger than the limit. */
export class BodyTooLarge extends Error {}

/** The answer has an encoding that is known but not accepted. The message is for the log. */
export class Undecodable extends Error {
  override readonly name = "Undecodable";
}

type Coding = keyof typeof DECODER_BYTES;

const isCoding = (name: string): name is Coding => Object.hasOwn(DECODER_BYTES, name);

interface Codings {
  /** Codings to decode, outermost first. Empty also when one is unknown, in which case the body stays as it is. */
  readonly list: readonly Coding[];
  /** Why the body is not accepted; null when it is. */
  readonly problem: string | null;
}

const NONE: Codings = { list: [], problem: null };

const isPlain = (headers: AnswerHeaders): boolean =>
  !headers.has("content-encoding") && (headers.get("transfer-encoding") ?? "chunked").toLowerCase() === "chunked";

const namesIn = (list: string): string[] => list.split(",").map((name) => name.trim().toLowerCase());

function codingsIn(headers: AnswerHeaders): Codings {
  if (isPlain(headers)) return NONE;
  const [content, sent] = [headers.get("content-encoding") ?? "", headers.get("transfer-encoding") ?? ""];
  // The list is parsed for every answer, and no honest one is longer.
  if (content.length + sent.length > 256) return { list: [], problem: "a very long list of encodings" };
  // Transfer codings are applied after the content codings; `chunked` only frames the body (RFC 9112, section 7).
  const hops = namesIn(sent);
  if (hops.slice(0, -1).includes("chunked")) return { list: [], problem: "chunked is not the last transfer coding" };
  const transfer = hops.filter((name) => name !== "" && name !== "chunked");
  const names = [...namesIn(content), ...transfer];
  const list: Coding[] = [];
  for (const name of names.filter((each) => each !== "" && each !== "identity").reverse()) {
    const coding = name === "x-gzip" ? "gzip" : name;
    if (!isCoding(coding)) return { list: [], problem: transfer.length === 0 ? null : "an unknown transfer coding" };
    list.push(coding);
  }
  if (list.length > MAX.encodings) return { list, problem: `more than ${MAX.encodings} encodings` };
  if (list.filter((coding) => coding === "zstd").length > 1) return { list, problem: "zstd within zstd" };
  return { list, problem: null };
}

/** Whether decoding changes the bytes, so that headers that describe the encoded ones no longer apply. */
export const isEncoded = (headers: AnswerHeaders): boolean => codingsIn(headers).list.length > 0;

export interface DecodedFor {
  readonly tenant: string;
  /** Resolves with a function that gives the memory back, which must happen soon after `evict`. @throws the signal's reason */
  decoderMemory(bytes: number, signal: StopSignal, evict: () => void): Promise<() => void>;
}

/** For answers of servers that the operator configured: nothing is charged. */
const NOBODY: DecodedFor = { tenant: "", decoderMemory: async () => () => {} };

export type DecoderShare = ReturnType<typeof createDecoderShare>;

/**
 * The memory of all decoders of a thread, shared out by tenant and then by agent. An answer of a few hundred bytes can make its
 * decoder hold 16 MiB while it is open, so a decoder of a tenant above its share is evicted when others wait (kernel/share.ts).
 */
export function createDecoderShare(size: number) {
  const memory = new ReclaimableShare(size);
  return {
    /** As `DecodedFor.decoderMemory`. The function that it resolves with must be called once. */
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

/** The most memory that the decoder of each coding may hold, in bytes. */
const DECODER_BYTES = {
  // The window of 32 KiB, tables, and overhead.
  gzip: 64 * KIB + ROOM_BYTES,
  deflate: 64 * KIB + ROOM_BYTES,
  // The largest window, and up to 256 tables for each of three kinds of symbols.
  br: 16 * MIB + BROTLI_TABLES_BYTES + ROOM_BYTES,
  // The largest window that is accepted, since each frame may name another; tables, and a block of input and of output.
  zstd: 2 ** ZSTD_WINDOW_LOG_MAX + 384 * KIB + ROOM_BYTES,
};

/** The most input of one step, which costs time even if it yields no output. */
const INPUT_BYTES = 16 * KIB;
/** No honest layer has more than INPUT_PER_OUTPUT_MAX bytes of input for each byte of output, beyond INPUT_FREE_BYTES. */
const INPUT_FREE_BYTES = MIB;
const INPUT_PER_OUTPUT_MAX = 64;

async function* slicesOf(chunks: Chunks): Chunks {
  for await (const chunk of chunks) {
    for (let at = 0; at < chunk.length; at += INPUT_BYTES) yield chunk.subarray(at, at + INPUT_BYTES);
  }
}

/** The window in bytes, by the body's first byte (RFC 7932, section 9.1). @throws Undecodable for a large window */
function brotliWindowOf(firstByte: number): number {
  if ((firstByte & 1) === 0) return 2 ** 16;
  const [high, low] = [(firstByte >> 1) & 0b111, (firstByte >> 4) & 0b111];
  if (high !== 0) return 2 ** (17 + high);
  if (low === 1) throw new Undecodable("a large window of brotli");
  return 2 ** (low === 0 ? 17 : 8 + low);
}

/** The most memory that the decoders of a body with this first byte may hold. Of an inner layer no byte is known yet. */
function decoderBytes(codings: readonly Coding[], firstByte: number): number {
  if (codings.length === 1 && codings[0] === "br") return brotliWindowOf(firstByte) + BROTLI_TABLES_BYTES + ROOM_BYTES;
  return codings.reduce((sum, coding) => sum + DECODER_BYTES[coding], 0);
}

/** @throws Undecodable */
function formatOf(coding: Coding, firstByte: number): DecoderFormat {
  if (coding === "br") brotliWindowOf(firstByte);
  // `deflate` means the zlib format (RFC 9110 section 8.4.1.2), but some servers send raw deflate: the method bits of the
  // zlib header tell them apart.
  return coding === "deflate" && (firstByte & 0x0f) !== 8 ? "deflate-raw" : coding;
}

function decodeFailed(error: unknown): never {
  throw errorCode(error) === ZSTD_WINDOW_TOO_LARGE ? new Undecodable("a zstd window above 8 MiB") : error;
}

interface DecodingOptions {
  /** Outermost first. */
  readonly codings: readonly Coding[];
  /** The most output of each layer: a small body can hide gigabytes between two layers. */
  readonly maxBytes: number;
  readonly decodedFor: DecodedFor;
  /** Called when others need the memory; the decoding must then be closed. */
  evict(): void;
}

/** The decoding of one body, with a decoder for each coding; tenants take turns in the runtime's thread pool. */
class Decoding {
  readonly #options: DecodingOptions;
  readonly #closing = new AbortController();
  readonly #decoders: NativeDecoder[] = [];
  /** Null until the memory is charged. */
  #giveBack: (() => void) | null = null;

  constructor(options: DecodingOptions) {
    this.#options = options;
  }

  chunks(raw: Chunks): Chunks {
    return this.#options.codings.reduce((source, coding) => this.#decode(source, coding), raw);
  }

  /** Closes the decoders at once, whatever they wait for. */
  close(): void {
    if (this.#closing.signal.aborted) return;
    this.#closing.abort(new Error("the body was closed"));
    for (const decoder of this.#decoders) decoder.close();
    this.#giveBack?.();
  }

  async *#decode(source: Chunks, coding: Coding): Chunks {
    const { maxBytes, decodedFor } = this.#options;
    let decoder: NativeDecoder | null = null;
    let [inputBytes, outputBytes] = [0, 0];
    for await (const input of slicesOf(source)) {
      decoder ??= await this.#open(coding, input[0] ?? 0);
      for await (const output of this.#outputsOf(decoder, input)) {
        if (output.length > 0) yield output;
        outputBytes += output.length;
        if (outputBytes > maxBytes) throw new BodyTooLarge(`a layer of ${coding} is too large`);
      }
      inputBytes += input.length;
      const isWasteful = inputBytes > INPUT_FREE_BYTES + INPUT_PER_OUTPUT_MAX * outputBytes;
      if (isWasteful) throw new Undecodable(`too much ${coding} input for its output`);
    }
    // An empty body is valid in any coding.
    if (decoder !== null) await inThreadTurn(decodedFor.tenant, () => decoder.finish());
  }

  async *#outputsOf(decoder: NativeDecoder, input: Uint8Array): Chunks {
    const { tenant } = this.#options.decodedFor;
    for (let [left, hasMore] = [input, true]; hasMore; ) {
      const { output, used, isFull } = await inThreadTurn(tenant, () => decoder.decode(left)).catch(decodeFailed);
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

  /** Takes the memory of all layers at once, so that no body that holds memory waits for more. */
  async #takeMemory(firstByte: number): Promise<void> {
    const { codings, decodedFor, evict } = this.#options;
    const { signal } = this.#closing;
    const giveBack = await decodedFor.decoderMemory(decoderBytes(codings, firstByte), signal, evict);
    if (signal.aborted) giveBack();
    signal.throwIfAborted();
    this.#giveBack = giveBack;
  }
}

export interface BodyRead {
  /** Decoded bytes of the body; when `tooLarge`, those that were read. */
  readonly size: number;
  /** The first `captureBytes` of the body. */
  readonly captured: Uint8Array;
  /** Whether the body is larger than `maxBytes`, so that the connection was closed. */
  readonly tooLarge: boolean;
}

interface OpenOptions {
  readonly maxBytes: number;
  /** Nothing is charged when omitted. */
  readonly decodedFor?: DecodedFor;
  /** A second signal: the request's own covers the body as well. */
  readonly signal?: AbortSignal;
}

export interface BodyLimits extends OpenOptions {
  readonly captureBytes: number;
  /** Called before `bytes` in all are kept. The body is not read on before the returned promise settles. */
  readonly grow?: (bytes: number) => Promise<void> | undefined;
  /** Called with each piece after the first `captureBytes`, and with a getter for those first bytes. */
  readonly beyond?: (rest: Uint8Array, start: () => Uint8Array) => void;
}

/** A body up to this size that arrived whole is returned without being streamed. */
const SMALL_BYTES = 64 * KIB;

const DONE = { done: true, value: undefined } as const;

/**
 * An iterator over the chunks of an open body. It is not a generator, since that passes each chunk on through several turns of
 * the microtask queue: with two generators the first bytes of a short stream reached their reader 30 µs later (measured).
 * `return` closes the body at once, even while a chunk is awaited.
 */
function chunksOf(
  read: () => Promise<{ readonly value?: Uint8Array | undefined }>,
  close: () => void,
  signals: readonly AbortSignal[],
): Chunks {
  let isDone = false;
  for (const signal of signals) signal.addEventListener("abort", close, { once: true });

  function check(): void {
    for (const signal of signals) signal.throwIfAborted();
  }

  function finish(): void {
    if (isDone) return;
    isDone = true;
    for (const signal of signals) signal.removeEventListener("abort", close);
    close();
  }

  return {
    /** @throws OutboundError, BodyTooLarge, Undecodable, the reason of a signal */
    async next() {
      if (isDone) return DONE;
      try {
        check();
        const { value } = await read();
        if (value !== undefined) return { done: false, value };
        // A body closed by a signal ends like an ordinary one.
        check();
      } catch (error) {
        finish();
        check();
        throw error instanceof BodyTooLarge || error instanceof Undecodable ? error : lost(error);
      }
      finish();
      return DONE;
    },
    async return() {
      finish();
      return DONE;
    },
    [Symbol.asyncIterator]() {
      return this;
    },
  };
}

type BodyBytes = Pick<BodyReader, "read" | "cancel">;

/** A reader of the body as it was sent, still encoded. */
function sentBody({ whole, body }: Answer): BodyBytes {
  if (body !== null) return body.getReader();
  const left = whole?.length ? [whole] : [];
  return { read: async () => ({ done: left.length === 0, value: left.pop() }), cancel: async () => {} };
}

async function* sentChunks(reader: BodyBytes): Chunks {
  for (let next = await reader.read(); next.value !== undefined; next = await reader.read()) yield next.value;
}

/**
 * The decoded body, to be read to its end, returned early, or aborted by the signal.
 * @throws OutboundError; BodyTooLarge when the output of a coding is larger than `maxBytes`; Undecodable; the signal's reason
 */
export function bodyChunks(response: Answer, { maxBytes, decodedFor = NOBODY, signal }: OpenOptions): Chunks {
  const reader = sentBody(response);
  const cancel = () => void reader.cancel().catch(() => {});
  const signals = signal === undefined ? [] : [signal];
  if (isPlain(response.headers)) return chunksOf(() => reader.read(), cancel, signals);
  const evicted = new AbortController();
  const evict = () => evicted.abort(new Undecodable("others need the decoder's memory"));
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
  return chunksOf(next, close, [...signals, evicted.signal]);
}

/** As `readBody`, without waiting: for a small answer that arrived whole and is not encoded. Null for any other. */
export function bodyAtOnce({ whole, headers }: Answer, limits: BodyLimits): BodyRead | null {
  const { maxBytes, captureBytes, beyond, signal } = limits;
  if (whole == null || whole.length > Math.min(maxBytes, SMALL_BYTES)) return null;
  if (signal !== undefined || !isPlain(headers)) return null;
  const truncated = whole.length > captureBytes;
  const captured = truncated ? whole.slice(0, captureBytes) : whole;
  if (truncated) beyond?.(whole.subarray(captureBytes), () => captured);
  return { size: whole.length, captured, tooLarge: false };
}

/** The part of a chunk that is captured, once there is memory for it. `size` bytes came before the chunk. */
async function startOf(chunk: Uint8Array, size: number, { captureBytes, grow }: BodyLimits): Promise<Uint8Array> {
  await grow?.(Math.min(size + chunk.length, captureBytes));
  const room = captureBytes - size;
  // A copy, since a view would keep the whole chunk in memory.
  return chunk.length > room ? chunk.slice(0, room) : chunk;
}

/** Keeps the start of a body. @throws OutboundError `lost` when it ends early or is corrupt; Undecodable; the signal's reason */
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
  return { size, captured: joined(kept), tooLarge };
}
