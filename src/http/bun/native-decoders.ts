// The runtime's own decoders, driven by hand. One go is bounded by its input and by the room for its output, runs in the
// runtime's pool of threads, and the memory is freed on close. DecompressionStream allows none of this, and holds 2.5 MB
// more each, which only the garbage collector frees; the streams of node:zlib cost ten times as much for a small body
// (measured on Bun 1.4.5). This interface is not documented: the version of the runtime is fixed, and the tests hold what
// is said here. Memory returns to the system when the threads of the pool come to rest, within three seconds, or is used
// again by the next decoder. Needed up to Bun 1.4.5 at least; a version whose DecompressionStream has a bound for each
// step and frees its memory on cancel makes this file unnecessary.
import zlib from "node:zlib";
import { asBuffer } from "../../core/bytes.ts";

export type DecoderFormat = "gzip" | "deflate" | "deflate-raw" | "br" | "zstd";

/** What is left after a go: room for output, and input. */
type State = Uint32Array;

interface Handle {
  onerror: (message: string, errno: number, code: string) => void;
  init(...options: readonly unknown[]): void;
  write(
    flush: number,
    input: Uint8Array,
    inputAt: number,
    inputBytes: number,
    output: Uint8Array,
    outputAt: number,
    outputBytes: number,
  ): void;
  close(): void;
}

/** One go of a decoder. */
export interface Decoded {
  readonly output: Uint8Array;
  /** Of the input. */
  readonly used: number;
  /** There was no more room: more comes out without any input. */
  readonly isFull: boolean;
}

/** The output of one go, which takes a tenth of a millisecond in the pool, whatever comes out. */
export const ROOM_BYTES = 128 * 1024;

/** Of the zstd coding (RFC 9659). A small frame that comes whole is decoded without its window, so it may name any. */
export const ZSTD_WINDOW_LOG_MAX = 23;
export const ZSTD_WINDOW_TOO_LARGE = "ZSTD_error_frameParameter_windowTooLarge";
/**
 * A frame with the content "x". Where it is put behind a body, "x" comes out only if a frame has ended there. The first
 * byte has to come alone: a decoder that waits for the rest of a frame's header would take a whole frame for that one.
 */
const ZSTD_FRAME = [Uint8Array.of(0x28), Uint8Array.of(0xb5, 0x2f, 0xfd, 0x20, 1, 9, 0, 0, 0x78)];

const { constants } = zlib;
const EMPTY = new Uint8Array();
const UNSET = 0xffff_ffff;
const BROTLI_PARAMETERS = 10;
const ZLIB_MODES = { gzip: constants.GUNZIP, deflate: constants.INFLATE, "deflate-raw": constants.INFLATERAW };

/** A stream gives the class of its handle away, and nothing else of it is used. */
function handleClassOf(stream: object) {
  const { _handle: handle, close } = stream as { _handle: Handle; close(): void };
  close.call(stream);
  return handle.constructor as new (
    mode: number,
  ) => Handle;
}

const LEAST_CHUNK = { chunkSize: 64 };
const NativeZlib = handleClassOf(zlib.createGunzip(LEAST_CHUNK));
const NativeBrotli = handleClassOf(zlib.createBrotliDecompress(LEAST_CHUNK));
const NativeZstd = handleClassOf(zlib.createZstdDecompress(LEAST_CHUNK));

function openHandle(format: DecoderFormat, state: State, done: () => void): Handle {
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
  // All but the window is of encoders; there is no dictionary.
  handle.init(Z_MAX_WINDOWBITS, Z_DEFAULT_LEVEL, Z_DEFAULT_MEMLEVEL, Z_DEFAULT_STRATEGY, state, done, undefined);
  return handle;
}

/** One go at a time. */
export class NativeDecoder {
  readonly #format: DecoderFormat;
  readonly #state: State = new Uint32Array(2);
  readonly #room = new Uint8Array(ROOM_BYTES);
  readonly #handle: Handle;
  /** The buffers must stay where they are until it is done. */
  #work: { readonly buffers: readonly Uint8Array[]; done(): void } | null = null;
  #problem: Error | null = null;
  #isClosed = false;

  constructor(format: DecoderFormat) {
    this.#format = format;
    this.#handle = openHandle(format, this.#state, () => this.#work?.done());
    this.#handle.onerror = (message, _errno, code) => {
      this.#problem = Object.assign(new Error(message), { code });
      this.#work?.done();
    };
  }

  /** @throws Error with a code when it is corrupt */
  decode(input: Uint8Array): Promise<Decoded> {
    return this.#write(0, input);
  }

  /** @throws Error when the body breaks off here */
  async finish(): Promise<void> {
    if (this.#format === "zstd") return this.#finishZstd();
    await this.#write(this.#format === "br" ? constants.BROTLI_OPERATION_FINISH : constants.Z_FINISH, EMPTY);
  }

  /** The decoder of zstd does not tell whether a body breaks off. */
  async #finishZstd(): Promise<void> {
    let content = "";
    try {
      for (const part of ZSTD_FRAME) content += asBuffer((await this.decode(part)).output).toString("latin1");
    } catch {
      // A stream that ended early went on with bytes of another one.
    }
    if (content !== "x") throw new Error("unexpected end of file");
  }

  /** Its memory is freed when the go under way has ended. */
  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    if (this.#work === null) this.#handle.close();
  }

  async #write(flush: number, input: Uint8Array): Promise<Decoded> {
    if (this.#isClosed) throw new Error("the decoder was closed");
    const { promise, resolve } = Promise.withResolvers<void>();
    const [room, state] = [this.#room, this.#state];
    this.#work = { buffers: [input, room], done: resolve };
    this.#handle.write(flush, input, 0, input.length, room, 0, room.length);
    await promise;
    this.#work = null;
    if (this.#isClosed) this.#handle.close();
    if (this.#problem !== null) throw this.#problem;
    const [free = 0, left = 0] = state;
    // With room left it takes all of its input, unless it has reached the end.
    if (free > 0 && left > 0) throw new Error("more follows the end of an encoded body");
    return { output: room.slice(0, room.length - free), used: input.length - left, isFull: free === 0 };
  }
}
