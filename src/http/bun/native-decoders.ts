// The runtime's own decoders, driven by hand. The work of one go is bounded by its input and by the room for its output,
// and the memory is freed on close. DecompressionStream allows neither, and holds 2.5 MB more each, which only the garbage
// collector frees (measured on Bun 1.4.5). The streams of node:zlib are built on these and cost ten times as much for a
// small body. This interface is not documented: the version of the runtime is fixed, and the tests hold what is said here.
// Memory of brotli returns to the system when the threads of the pool come to rest, within three seconds, or is used again
// by the next decoder. Needed up to Bun 1.4.5 at least; a version whose DecompressionStream has a bound for each step and
// frees its memory on cancel makes this file unnecessary.
import zlib from "node:zlib";
import { asBuffer } from "../../core/bytes.ts";
import { Undecodable } from "../client/answer.ts";

interface Handle {
  onerror: (message: string, errno: number, code: string) => void;
  writeSync(...write: WriteArguments): void;
  write(...write: WriteArguments): void;
  close(): void;
}

type WriteArguments = [
  flush: number,
  input: Uint8Array,
  inputAt: number,
  inputBytes: number,
  output: Uint8Array,
  outputAt: number,
  outputBytes: number,
];

interface BrotliHandle extends Handle {
  init(parameters: Uint32Array, state: Uint32Array, done: () => void): boolean;
}

/** What is left after a write: room for output, and input. */
type State = Uint32Array;

interface Stream {
  readonly _handle: Handle;
  readonly _writeState: State;
  close(): void;
}

/** One go of a decoder. */
export interface Decoded {
  /** Valid until the decoder works again, which reuses the memory: a copy of each would be much garbage. */
  readonly output: Uint8Array;
  /** Of the input. */
  readonly used: number;
  /** There was no more room: more comes out without any input. */
  readonly isFull: boolean;
}

const EMPTY = new Uint8Array();

function decodedOf(state: State, room: Uint8Array, inputBytes: number): Decoded {
  const [free = 0, left = 0] = state;
  const isFull = free === 0;
  // With room left it takes all of its input, unless it has reached the end.
  if (!isFull && left > 0) throw new Error("more follows the end of an encoded body");
  return { output: room.subarray(0, room.length - free), used: inputBytes - left, isFull };
}

/** The output of one go. */
export const SYNC_ROOM_BYTES = 64 * 1024;
export const BROTLI_ROOM_BYTES = 256 * 1024;

export type SyncFormat = "gzip" | "deflate" | "deflate-raw" | "zstd";

/** Of the zstd coding (RFC 9659). A small frame that comes whole is decoded without its window, so it may name any. */
export const ZSTD_WINDOW_LOG_MAX = 23;
const ZSTD_WINDOW_TOO_LARGE = "ZSTD_error_frameParameter_windowTooLarge";
/**
 * A frame with the content "x". Where it is put behind a body, "x" comes out only if a frame has ended there. The first
 * byte has to come alone: a decoder that waits for the rest of a frame's header would take a whole frame for that one.
 */
const ZSTD_FRAME = [Uint8Array.of(0x28), Uint8Array.of(0xb5, 0x2f, 0xfd, 0x20, 1, 9, 0, 0, 0x78)];

/** Streams allocate one of their own, which is not used here. */
const LEAST_CHUNK = { chunkSize: 64 };

function openStream(format: SyncFormat): Stream {
  const zstd = { ...LEAST_CHUNK, params: { [zlib.constants.ZSTD_d_windowLogMax]: ZSTD_WINDOW_LOG_MAX } };
  const streams = {
    gzip: () => zlib.createGunzip(LEAST_CHUNK),
    deflate: () => zlib.createInflate(LEAST_CHUNK),
    "deflate-raw": () => zlib.createInflateRaw(LEAST_CHUNK),
    zstd: () => zlib.createZstdDecompress(zstd),
  };
  return streams[format]() as unknown as Stream;
}

/** Works at once, and quickly. */
export class SyncDecoder {
  readonly #room = new Uint8Array(SYNC_ROOM_BYTES);
  readonly #format: SyncFormat;
  readonly #stream: Stream;
  #problem: Error | null = null;

  constructor(format: SyncFormat) {
    this.#format = format;
    this.#stream = openStream(format);
    this.#stream._handle.onerror = (message, _errno, code) => {
      const isWindow = code === ZSTD_WINDOW_TOO_LARGE;
      this.#problem = isWindow ? new Undecodable("a zstd window above 8 MiB") : new Error(message);
    };
  }

  /**
   * @throws Error when it is corrupt
   * @throws Undecodable
   */
  decode(input: Uint8Array): Decoded {
    this.#write(zlib.constants.Z_NO_FLUSH, input);
    return decodedOf(this.#stream._writeState, this.#room, input.length);
  }

  /** @throws Error when the body breaks off here */
  finish(): void {
    if (this.#format === "zstd") this.#finishZstd();
    else this.#write(zlib.constants.Z_FINISH, EMPTY);
  }

  /** The decoder of zstd does not tell whether a body breaks off. */
  #finishZstd(): void {
    let content = "";
    try {
      for (const part of ZSTD_FRAME) content += asBuffer(this.decode(part).output).toString("latin1");
    } catch {
      // What broke off went on with bytes that are not its own.
    }
    if (content !== "x") throw new Error("unexpected end of file");
  }

  close(): void {
    this.#stream.close();
  }

  #write(flush: number, input: Uint8Array): void {
    const { _handle: handle } = this.#stream;
    handle.writeSync(flush, input, 0, input.length, this.#room, 0, this.#room.length);
    if (this.#problem !== null) throw this.#problem;
  }
}

/** The stream gives its class away, and nothing else of it is used. */
const BrotliHandle = (() => {
  const stream = zlib.createBrotliDecompress(LEAST_CHUNK) as unknown as Stream;
  const Handle = stream._handle.constructor;
  stream.close();
  return Handle as new (
    mode: number,
  ) => BrotliHandle;
})();

const BROTLI_PARAMETERS = 10;
const UNSET = 0xffff_ffff;

/**
 * A brotli decoder fills its whole window before any output, which takes up to a tenth of a second (measured: 30 ms for
 * 16 MiB of zeros). So it works in the runtime's pool of threads, one go at a time.
 */
export class BrotliDecoder {
  readonly #handle = new BrotliHandle(zlib.constants.BROTLI_DECODE);
  readonly #room = new Uint8Array(BROTLI_ROOM_BYTES);
  readonly #state: State = new Uint32Array(2);
  /** The buffers must stay where they are until it is done. */
  #work: { readonly buffers: readonly Uint8Array[]; done(): void } | null = null;
  #problem: Error | null = null;
  #isClosed = false;

  constructor() {
    this.#handle.onerror = (message) => {
      this.#problem = new Error(message);
      this.#work?.done();
    };
    const parameters = new Uint32Array(BROTLI_PARAMETERS).fill(UNSET);
    if (!this.#handle.init(parameters, this.#state, () => this.#work?.done())) throw new Error("no decoder");
  }

  /** @throws Error when it is corrupt */
  async decode(input: Uint8Array): Promise<Decoded> {
    await this.#write(zlib.constants.BROTLI_OPERATION_PROCESS, input);
    return decodedOf(this.#state, this.#room, input.length);
  }

  /** @throws Error when the body breaks off here */
  async finish(): Promise<void> {
    await this.#write(zlib.constants.BROTLI_OPERATION_FINISH, EMPTY);
  }

  /** Its memory is freed when the go under way has ended. */
  close(): void {
    this.#isClosed = true;
    if (this.#work === null) this.#handle.close();
  }

  async #write(operation: number, input: Uint8Array): Promise<void> {
    if (this.#isClosed) throw new Error("the decoder was closed");
    const { promise, resolve } = Promise.withResolvers<void>();
    const room = this.#room;
    this.#work = { buffers: [input, room], done: resolve };
    this.#handle.write(operation, input, 0, input.length, room, 0, room.length);
    await promise;
    this.#work = null;
    if (this.#isClosed) this.#handle.close();
    if (this.#problem !== null) throw this.#problem;
  }
}
