// The runtime's native decoders (gzip, deflate, Brotli, zstd), driven step by step. A step is bounded by its input and by its
// output buffer and runs in the runtime's thread pool; the memory is freed on close. DecompressionStream allows none of this,
// and each holds 2.5 MB more, which only the garbage collector frees; the streams of node:zlib cost ten times as much for a
// small body (measured on Bun 1.4.5). This interface is undocumented: the version of the runtime is fixed, and tests check what
// is said here. Memory returns to the system when the pool's threads are idle, within three seconds, or is reused by the next
// decoder. Needed up to Bun 1.4.5 at least; a version whose DecompressionStream bounds each step and frees its memory on
// cancel makes this file unnecessary.
import zlib from "node:zlib";
import { asBuffer } from "../../core/bytes.ts";

export type DecoderFormat = "gzip" | "deflate" | "deflate-raw" | "br" | "zstd";

type BufferPart = [bytes: Uint8Array, at: number, length: number];

interface Handle {
  onerror: (message: string, errno: number, code: string) => void;
  init(...options: readonly unknown[]): void;
  write(flush: number, ...buffers: [...input: BufferPart, ...output: BufferPart]): void;
  close(): void;
}

/** The output buffer of one step, which takes a tenth of a millisecond in the pool, whatever comes out. */
export const ROOM_BYTES = 128 * 1024;

/** The largest window of the zstd coding (RFC 9659). A small complete frame needs no window, so it may name a larger one. */
export const ZSTD_WINDOW_LOG_MAX = 23;
export const ZSTD_WINDOW_TOO_LARGE = "ZSTD_error_frameParameter_windowTooLarge";
/**
 * A frame with the content "x", which it yields only after a body whose last frame was complete. Its first byte is fed alone, so that
 * a decoder that waits for the rest of a frame header does not take this frame for that rest.
 */
const ZSTD_FRAME = [Uint8Array.of(0x28), Uint8Array.of(0xb5, 0x2f, 0xfd, 0x20, 1, 9, 0, 0, 0x78)];

const { constants } = zlib;
const EMPTY = new Uint8Array();
const UNSET = 0xffff_ffff;
const BROTLI_PARAMETERS = 10;
const ZLIB_MODES = { gzip: constants.GUNZIP, deflate: constants.INFLATE, "deflate-raw": constants.INFLATERAW };

/** The class of a stream's native handle. The stream serves only to find it. */
function handleClassOf(stream: object) {
  const opened = stream as { _handle: { constructor: new (mode: number) => Handle }; close(): void };
  const handleClass = opened._handle.constructor;
  opened.close();
  return handleClass;
}

const LEAST_CHUNK = { chunkSize: 64 };
const NativeZlib = handleClassOf(zlib.createGunzip(LEAST_CHUNK));
const NativeBrotli = handleClassOf(zlib.createBrotliDecompress(LEAST_CHUNK));
const NativeZstd = handleClassOf(zlib.createZstdDecompress(LEAST_CHUNK));

function openHandle(format: DecoderFormat, state: Uint32Array, done: () => void): Handle {
  if (format === "br") {
    const handle = new NativeBrotli(constants.BROTLI_DECODE);
    handle.init(new Uint32Array(BROTLI_PARAMETERS).fill(UNSET), state, done);
    return handle;
  }
  if (format === "zstd") {
    const handle = new NativeZstd(constants.ZSTD_DECOMPRESS);
    const parameters = new Uint32Array(constants.ZSTD_d_windowLogMax + 1).fill(UNSET);
    parameters[constants.ZSTD_d_windowLogMax] = ZSTD_WINDOW_LOG_MAX;
    handle.init(parameters, undefined, state, done);
    return handle;
  }
  const handle = new NativeZlib(ZLIB_MODES[format]);
  const { Z_MAX_WINDOWBITS, Z_DEFAULT_LEVEL, Z_DEFAULT_MEMLEVEL, Z_DEFAULT_STRATEGY } = constants;
  // All parameters but the window are for encoders; there is no dictionary.
  handle.init(Z_MAX_WINDOWBITS, Z_DEFAULT_LEVEL, Z_DEFAULT_MEMLEVEL, Z_DEFAULT_STRATEGY, state, done, undefined);
  return handle;
}

/** A decoder of one body. Only one step may run at a time. */
export class NativeDecoder {
  readonly #format: DecoderFormat;
  /** What a step has left: free bytes of the output buffer, and unused bytes of the input. */
  readonly #state = new Uint32Array(2);
  readonly #room = new Uint8Array(ROOM_BYTES);
  readonly #handle: Handle;
  /** The running step. It keeps the buffers alive until the native code is done with them. */
  #step: { readonly buffers: readonly Uint8Array[]; done(): void } | null = null;
  #problem: Error | null = null;
  #isClosed = false;

  constructor(format: DecoderFormat) {
    this.#format = format;
    this.#handle = openHandle(format, this.#state, () => this.#step?.done());
    this.#handle.onerror = (message, _errno, code) => {
      this.#problem = Object.assign(new Error(message), { code });
      this.#step?.done();
    };
  }

  /** When `isFull`, there may be more output without more input. @throws Error with a code when the input is corrupt */
  decode(input: Uint8Array) {
    return this.#write(0, input);
  }

  /** Ends the body. @throws Error when it is incomplete */
  async finish(): Promise<void> {
    if (this.#format === "zstd") return this.#finishZstd();
    await this.#write(this.#format === "br" ? constants.BROTLI_OPERATION_FINISH : constants.Z_FINISH, EMPTY);
  }

  /** Tests with another frame whether the body is complete, which the zstd decoder does not tell. */
  async #finishZstd(): Promise<void> {
    let content = "";
    try {
      for (const part of ZSTD_FRAME) content += asBuffer((await this.decode(part)).output).toString("latin1");
    } catch {
      // An incomplete frame was continued with bytes that do not belong to it.
    }
    if (content !== "x") throw new Error("unexpected end of file");
  }

  /** Frees the memory, after the running step if there is one. */
  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    if (this.#step === null) this.#handle.close();
  }

  async #write(flush: number, input: Uint8Array) {
    if (this.#isClosed) throw new Error("the decoder was closed");
    const { promise, resolve } = Promise.withResolvers<void>();
    const [room, state] = [this.#room, this.#state];
    this.#step = { buffers: [input, room], done: resolve };
    this.#handle.write(flush, input, 0, input.length, room, 0, room.length);
    await promise;
    this.#step = null;
    if (this.#isClosed) this.#handle.close();
    if (this.#problem !== null) throw this.#problem;
    const [free = 0, left = 0] = state;
    // A decoder with free output consumes all input, unless it has reached the end of the body.
    if (free > 0 && left > 0) throw new Error("more follows the end of an encoded body");
    return { output: room.slice(0, room.length - free), used: input.length - left, isFull: free === 0 };
  }
}
