// Response bodies, decoded from their Content-Encoding and read within bounds. Sizes count decoded bytes, and nothing is
// decoded before it is asked for, so a body that unpacks to gigabytes is stopped at its limit.

import type { BodyReader } from "../body-buffer.ts";
import { type Answer, codingsOf, isEncoded, Undecodable } from "./answer.ts";
import { BodyTooLarge, type Chunks, type DecodedFor, Decoding, NOBODY } from "./decode.ts";
import { lost } from "./outbound.ts";

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

export interface BodyLimits {
  readonly maxBytes: number;
  readonly captureBytes: number;
  /** Called before this many bytes in all are kept. The body is not read on before the returned promise settles. */
  readonly grow?: (bytes: number) => Promise<void> | undefined;
  /** Called with what comes after the first `captureBytes`, piece by piece, and with a getter for those first bytes. */
  readonly beyond?: (rest: Uint8Array, start: () => Uint8Array) => void;
  /** For whom it is decoded; nobody when it is left out. */
  readonly decodedFor?: DecodedFor;
  /** Needed only beside the request's own signal, which covers the body as well. */
  readonly signal?: AbortSignal;
}

/** A body up to this size that came whole is taken as it is. */
const SMALL_BYTES = 64 * 1024;

/** An open body. `close` takes effect at once, even while a chunk is awaited. */
interface OpenBody {
  readonly chunks: Chunks;
  close(): void;
}

const DONE = { done: true, value: undefined } as const;

/**
 * Chunks that are got one by one, as a generator would give them. Generators hand each on through several turns of the
 * microtask queue: with two of them the first bytes of a short stream reached their reader 30 µs later (measured).
 */
abstract class ChunkReader implements Chunks {
  #isOver = false;

  /** Null at the end. */
  protected abstract read(): Promise<Uint8Array | null>;
  /** Called once, however it ends. */
  protected end(): void {}

  async next(): Promise<IteratorResult<Uint8Array, void>> {
    if (this.#isOver) return DONE;
    try {
      const value = await this.read();
      if (value !== null) return { done: false, value };
    } catch (error) {
      this.#finish();
      throw error;
    }
    this.#finish();
    return DONE;
  }

  async return(): Promise<IteratorResult<Uint8Array, void>> {
    this.#finish();
    return DONE;
  }

  async throw(error: unknown): Promise<IteratorResult<Uint8Array, void>> {
    this.#finish();
    throw error;
  }

  #finish(): void {
    if (!this.#isOver) this.end();
    this.#isOver = true;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#finish();
  }
}

class RawChunks extends ChunkReader {
  readonly #reader: Pick<BodyReader, "read">;

  constructor(reader: Pick<BodyReader, "read">) {
    super();
    this.#reader = reader;
  }

  protected async read(): Promise<Uint8Array | null> {
    return (await this.#reader.read()).value ?? null;
  }
}

function toStream(chunks: Chunks, cancel: () => Promise<void>): ReadableStream<Uint8Array> {
  return new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const { done, value } = await chunks.next();
        if (done) controller.close();
        else controller.enqueue(value);
      },
      cancel,
    },
    // Nothing is read ahead of its reader.
    { highWaterMark: 0 },
  );
}

/** Throws OutboundErrors, BodyTooLarge, Undecodable or the signal's reason. However the loop ends, the body is closed. */
class GuardedChunks extends ChunkReader {
  readonly #chunks: Chunks;
  readonly #close: () => void;
  readonly #signals: readonly AbortSignal[];

  constructor(chunks: Chunks, close: () => void, signals: readonly AbortSignal[]) {
    super();
    this.#chunks = chunks;
    this.#close = close;
    this.#signals = signals;
    for (const signal of signals) signal.addEventListener("abort", close, { once: true });
  }

  protected async read(): Promise<Uint8Array | null> {
    try {
      this.#check();
      const { value } = await this.#chunks.next();
      // A body closed by a signal ends like an ordinary one.
      if (value === undefined) this.#check();
      return value ?? null;
    } catch (error) {
      this.#check();
      throw error instanceof BodyTooLarge || error instanceof Undecodable ? error : lost(error);
    }
  }

  #check(): void {
    for (const signal of this.#signals) signal.throwIfAborted();
  }

  protected override end(): void {
    for (const signal of this.#signals) signal.removeEventListener("abort", this.#close);
    this.#close();
  }
}

/** @throws Undecodable */
function decodingOf(
  { body, headers }: Answer,
  { maxBytes, decodedFor = NOBODY }: OpenOptions,
  isLent: boolean,
  giveWay: () => void,
): Decoding | null {
  const codings = body === null ? [] : codingsOf(headers);
  return codings.length === 0 ? null : new Decoding({ codings, maxBytes, isLent, giveWay, ...decodedFor });
}

interface OpenOptions {
  readonly maxBytes: number;
  readonly decodedFor?: DecodedFor | undefined;
  readonly signal?: AbortSignal | undefined;
}

async function* oneChunk(chunk: Uint8Array): Chunks {
  if (chunk.length > 0) yield chunk;
}

/** The body as it was sent. */
function rawBody({ whole, body }: Answer): { readonly raw: Chunks; cancel(): void } {
  if (whole !== undefined && whole !== null) return { raw: oneChunk(whole), cancel() {} };
  if (body === null) return { raw: oneChunk(new Uint8Array()), cancel() {} };
  const reader = body.getReader();
  return { raw: new RawChunks(reader), cancel: () => void reader.cancel().catch(() => {}) };
}

/** @param isLent whether a decoded chunk is valid only until the next one is asked for */
function open(response: Answer, options: OpenOptions, isLent = false): OpenBody {
  const { signal } = options;
  const { raw, cancel } = rawBody(response);
  // Every piece passes each of the generators, so the usual body has one less.
  if (!response.headers.has("content-encoding")) {
    return { chunks: new GuardedChunks(raw, cancel, signal === undefined ? [] : [signal]), close: cancel };
  }
  let decoding: Decoding | null = null;
  const crowded = new AbortController();
  const giveWay = () => crowded.abort(new Undecodable("others need the memory of its decoder"));
  const close = () => {
    decoding?.close();
    cancel();
  };
  async function* chunks(): Chunks {
    decoding = decodingOf(response, options, isLent, giveWay);
    yield* decoding?.chunks(raw) ?? raw;
  }
  const signals = signal === undefined ? [crowded.signal] : [signal, crowded.signal];
  return { chunks: new GuardedChunks(chunks(), close, signals), close };
}

/**
 * The decoded body as a stream. Cancelling it closes the connection. Its errors are OutboundErrors, BodyTooLarge
 * when a layer of an encoding unpacks to more than `maxBytes`, Undecodable, or the signal's reason.
 */
export function decodedBody(response: Answer, options: OpenOptions): ReadableStream<Uint8Array> {
  const { chunks, close } = open(response, options);
  return toStream(chunks, async () => {
    close();
    await chunks.return();
  });
}

/** The decoded body for a reader that reads to the end or stops by the signal. */
export function bodyChunks(response: Answer, options: OpenOptions): Chunks {
  return open(response, options).chunks;
}

/** What `readBody` gives, if it need not wait: of a small answer that came whole, and is not encoded. */
export function bodyAtOnce({ whole, headers }: Answer, limits: BodyLimits): BodyRead | null {
  const { maxBytes, captureBytes, beyond, signal } = limits;
  if (whole === undefined || whole === null || whole.length > Math.min(maxBytes, SMALL_BYTES)) return null;
  if (signal !== undefined || headers.has("content-encoding")) return null;
  const truncated = whole.length > captureBytes;
  const captured = truncated ? whole.slice(0, captureBytes) : whole;
  if (truncated) beyond?.(whole.subarray(captureBytes), () => captured);
  return { size: whole.length, captured, truncated, tooLarge: false };
}

/** In memory of its own (Buffer.concat may take shared memory), so that it can move to another thread. */
function joined(parts: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** The part of a chunk that is kept, once there is memory for it. `size` bytes came before it. */
async function startOf(
  chunk: Uint8Array,
  size: number,
  { captureBytes, grow }: BodyLimits,
  isLent: boolean,
): Promise<Uint8Array> {
  await grow?.(Math.min(size + chunk.length, captureBytes));
  const room = captureBytes - size;
  // A copy, because lent memory is used again, and because keeping a part would keep the whole chunk in memory.
  return isLent || chunk.length > room ? chunk.slice(0, room) : chunk;
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
  const isLent = isEncoded(response.headers);
  const kept: Uint8Array[] = [];
  let size = 0;
  let tooLarge = false;
  try {
    for await (const chunk of open(response, limits, true).chunks) {
      if (size < captureBytes) kept.push(await startOf(chunk, size, limits, isLent));
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
