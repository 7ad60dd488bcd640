// Response bodies as they were before Content-Encoding, read within bounds: sizes count decoded bytes, and
// decoders give out small pieces and wait, so a body that unpacks to gigabytes is stopped at its limit.
// DecompressionStream does so (measured on Bun 1.4.5: 6 MB for a bomb of 256 MiB), and unlike node:zlib it
// notices a zstd body that breaks off.
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
  /** Called before so many bytes in all are kept; the body is not read on before what it returns is settled. */
  readonly grow?: (bytes: number) => Promise<void> | undefined;
  /** Told of what comes after the first `captureBytes`, piece by piece, and which those were. */
  readonly beyond?: (rest: Uint8Array, start: () => Uint8Array) => void;
  /** Needed only beside the request's own signal, which covers the body as well. */
  readonly signal?: AbortSignal;
}

type Chunks = AsyncGenerator<Uint8Array, void, undefined>;

/** The body, or what a layer of its encoding unpacks to, went beyond the limit. */
export class BodyTooLarge extends Error {}

/** More layers than this are nobody's honest answer. */
const ENCODINGS_MAX = 4;
/** Nor is a longer list of them; it is looked at on every answer. */
const LIST_CHARS_MAX = 256;
/** A body up to this size, sent with its length, is taken in one piece. */
const SMALL_BYTES = 64 * 1024;
/** Decoders hand on their chunks without a turn of the event loop, so one is taken after this time. */
const TURN_MS = 5;

type Format = ConstructorParameters<typeof DecompressionStream>[0];

const FORMATS: Readonly<Record<string, (firstByte: number) => Format>> = {
  gzip: () => "gzip",
  "x-gzip": () => "gzip",
  // Means the zlib format (RFC 9110 section 8.4.1.2), but some servers send bare deflate: the method bits of
  // the zlib header tell them apart.
  deflate: (firstByte) => ((firstByte & 0x0f) === 8 ? "deflate" : "deflate-raw"),
  br: () => "brotli",
  zstd: () => "zstd",
};

/** The encodings to undo, outermost first. Empty too when one is unknown: then the body stays as it is. */
function encodingsOf(response: Response): string[] {
  const value = response.headers.get("content-encoding");
  if (value === null || value.length > LIST_CHARS_MAX) return [];
  const names = value.split(",").map((name) => name.trim().toLowerCase());
  const encodings = names.filter((name) => name !== "" && name !== "identity");
  const isKnown =
    encodings.length <= ENCODINGS_MAX && encodings.every((name) => Object.hasOwn(FORMATS, name));
  return isKnown ? encodings.reverse() : [];
}

/** Whether `decodedBody` gives other bytes than were sent, so that what describes those is not true of it. */
export function isEncoded(response: Response): boolean {
  return encodingsOf(response).length > 0;
}

/** An open body. `close` takes effect at once, even while a chunk is awaited. */
interface OpenBody {
  readonly chunks: Chunks;
  close(): void;
}

/** A reader as far as both of the type packages agree on it. */
interface Reader {
  read(): Promise<{ readonly done: boolean; readonly value?: Uint8Array | undefined }>;
}

async function* rawChunks(reader: Reader): Chunks {
  for (;;) {
    const { value } = await reader.read();
    if (value === undefined) return;
    yield value;
  }
}

function toStream<T>(chunks: AsyncGenerator<T, void>, cancel: () => Promise<void>): ReadableStream<T> {
  return new ReadableStream<T>(
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

/** What the layers of one body have in common. */
interface Course {
  /** Each layer may unpack to this much: a small body can hide gigabytes between two layers. */
  readonly maxBytes: number;
  closed: boolean;
  turnedAt: number;
}

/** @throws Error when the body was closed meanwhile */
async function takeTurn(course: Course): Promise<void> {
  await new Promise((resolve) => setImmediate(resolve));
  course.turnedAt = performance.now();
  if (course.closed) throw new Error("the body was closed");
}

async function* decode(source: Chunks, encoding: string, course: Course): Chunks {
  const first = await source.next();
  // No bytes are an empty body in any encoding.
  if (first.done) return;
  async function* whole(start: Uint8Array): Chunks {
    yield start;
    yield* source;
  }
  const format = FORMATS[encoding]?.(first.value[0] ?? 0);
  if (format === undefined) return;
  // Left early, it waits for nothing: the source may hang in a read until the body itself is closed.
  const encoded = toStream<Bun.BufferSource>(whole(first.value), async () => {});
  let size = 0;
  for await (const chunk of encoded.pipeThrough(new DecompressionStream(format))) {
    yield chunk;
    size += chunk.length;
    if (size > course.maxBytes) throw new BodyTooLarge(`a layer of ${encoding} is too large`);
    if (performance.now() - course.turnedAt > TURN_MS) await takeTurn(course);
  }
}

/** Errors are OutboundErrors, BodyTooLarge or the signal's reason; however the loop ends, the body is closed. */
async function* guarded(chunks: Chunks, close: () => void, signal: AbortSignal | undefined): Chunks {
  signal?.addEventListener("abort", close, { once: true });
  try {
    signal?.throwIfAborted();
    yield* chunks;
    // A body closed by the signal ends like an ordinary one.
    signal?.throwIfAborted();
  } catch (error) {
    signal?.throwIfAborted();
    throw error instanceof BodyTooLarge ? error : lost(error);
  } finally {
    signal?.removeEventListener("abort", close);
    close();
  }
}

function open(response: Response, maxBytes: number, signal: AbortSignal | undefined): OpenBody {
  const body: ReadableStream<Uint8Array> = response.body ?? new Blob().stream();
  const reader = body.getReader();
  const course: Course = { maxBytes, closed: false, turnedAt: performance.now() };
  const close = () => {
    course.closed = true;
    reader.cancel().catch(() => {});
  };
  let chunks = rawChunks(reader);
  for (const encoding of encodingsOf(response)) chunks = decode(chunks, encoding, course);
  return { chunks: guarded(chunks, close, signal), close };
}

/**
 * The decoded body as a stream. Cancelling it closes the connection. Its errors are OutboundErrors, BodyTooLarge
 * when a layer of an encoding unpacks to more than `maxBytes`, or the signal's reason.
 */
export function decodedBody(
  response: Response,
  maxBytes: number,
  signal?: AbortSignal,
): ReadableStream<Uint8Array> {
  const { chunks, close } = open(response, maxBytes, signal);
  return toStream(chunks, async () => {
    close();
    await chunks.return();
  });
}

/** Whether the body is sent with a length that makes it cheap to take whole. */
function isSmall(response: Response, maxBytes: number): boolean {
  const { headers } = response;
  // With both headers the length means nothing (RFC 9112 section 6.3).
  if (headers.has("content-encoding") || headers.has("transfer-encoding")) return false;
  const length = headers.get("content-length");
  return length !== null && /^\d{1,6}$/.test(length) && Number(length) <= Math.min(maxBytes, SMALL_BYTES);
}

async function readSmall(response: Response, { captureBytes, beyond }: BodyLimits): Promise<BodyRead> {
  const bytes = await response.bytes().catch((error) => {
    throw lost(error);
  });
  const truncated = bytes.length > captureBytes;
  const captured = truncated ? bytes.slice(0, captureBytes) : bytes;
  if (truncated) beyond?.(bytes.subarray(captureBytes), () => captured);
  return { size: bytes.length, captured, truncated, tooLarge: false };
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

/** What of a chunk, which comes after `size` bytes, is kept: as soon as there is memory for it. */
async function startOf(
  chunk: Uint8Array,
  size: number,
  { captureBytes, grow }: BodyLimits,
): Promise<Uint8Array> {
  await grow?.(Math.min(size + chunk.length, captureBytes));
  const room = captureBytes - size;
  // A copy, where only a part is kept, lets go of the rest.
  return chunk.length > room ? chunk.slice(0, room) : chunk;
}

/**
 * Reads a body to its end, keeping only its start.
 *
 * @throws OutboundError `lost` when it breaks off or its encoding is corrupt; the signal's reason
 */
export async function readBody(response: Response, limits: BodyLimits): Promise<BodyRead> {
  const { maxBytes, captureBytes, signal, beyond } = limits;
  if (signal === undefined && isSmall(response, maxBytes)) return readSmall(response, limits);
  const kept: Uint8Array[] = [];
  let size = 0;
  let tooLarge = false;
  try {
    for await (const chunk of open(response, maxBytes, signal).chunks) {
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
