// Decodes one encoding of a body step by step: the most memory that it may need is known before any is used, and each step
// is short.

import { inThreadTurn } from "../concurrency/thread-turns.ts";
import { type Coding, Undecodable } from "./codings.ts";
import {
  BROTLI_ROOM_BYTES,
  BrotliDecoder,
  type Decoded,
  SYNC_ROOM_BYTES,
  SyncDecoder,
  type SyncFormat,
  ZSTD_WINDOW_LOG_MAX,
} from "./native-decoders.ts";

export interface Layer {
  /** The most that it may hold, which must be counted before the first step. */
  readonly needs: number;
  /** Whether there is more to do for what was pushed. */
  readonly hasWork: boolean;
  /** Takes the next input, once all before it has been decoded. */
  push(input: Uint8Array): void;
  /** The next part of the output, which may be empty. It is valid until the next step. */
  step(): Uint8Array | Promise<Uint8Array>;
  /** @throws Error when the body breaks off here */
  finish(): void | Promise<void>;
  close(): void;
}

const KIB = 1024;
const MIB = 1024 * KIB;
const EMPTY = new Uint8Array();

/** The largest window, for each frame may name its own; tables, a block of each side, and room for what comes out. */
const ZSTD_BYTES = 2 ** ZSTD_WINDOW_LOG_MAX + 384 * KIB + SYNC_ROOM_BYTES;
const BROTLI_WINDOW_MAX = 16 * MIB;
/** Its tables, up to 256 of each of three kinds, and room for what comes out. */
const BROTLI_BYTES = 4 * MIB + BROTLI_ROOM_BYTES;
/** The window of 32 KiB, tables, and what surrounds them. */
const DEFLATE_BYTES = 64 * KIB + SYNC_ROOM_BYTES;

/** The most that one may need. */
export const NEEDS_MAX: Readonly<Record<Coding, number>> = {
  gzip: DEFLATE_BYTES,
  deflate: DEFLATE_BYTES,
  br: BROTLI_WINDOW_MAX + BROTLI_BYTES,
  zstd: ZSTD_BYTES,
};

export function createLayer(coding: Coding, tenant: string): Layer {
  switch (coding) {
    case "gzip":
      return new SyncLayer(DEFLATE_BYTES, () => "gzip");
    case "deflate":
      // Means the zlib format (RFC 9110 section 8.4.1.2), but some servers send bare deflate: the method bits of
      // the zlib header tell them apart.
      return new SyncLayer(DEFLATE_BYTES, (firstByte) => ((firstByte & 0x0f) === 8 ? "deflate" : "deflate-raw"));
    case "br":
      return new BrotliLayer(tenant);
    case "zstd":
      return new SyncLayer(ZSTD_BYTES, () => "zstd");
  }
}

/** Decodes input in as many goes as its output takes. */
class Input {
  #left: Uint8Array = EMPTY;
  #hasWork = false;

  get hasWork(): boolean {
    return this.#hasWork;
  }

  /** What the next go is given. */
  get left(): Uint8Array {
    return this.#left;
  }

  push(input: Uint8Array): void {
    this.#left = input;
    this.#hasWork = input.length > 0;
  }

  went({ output, used, isFull }: Decoded): Uint8Array {
    this.#left = this.#left.subarray(used);
    this.#hasWork = isFull;
    return output;
  }
}

class SyncLayer implements Layer {
  readonly needs: number;
  readonly #formatOf: (firstByte: number) => SyncFormat;
  readonly #input = new Input();
  #decoder: SyncDecoder | null = null;

  constructor(needs: number, formatOf: (firstByte: number) => SyncFormat) {
    this.needs = needs;
    this.#formatOf = formatOf;
  }

  push(input: Uint8Array): void {
    this.#input.push(input);
  }

  get hasWork(): boolean {
    return this.#input.hasWork;
  }

  step(): Uint8Array {
    this.#decoder ??= new SyncDecoder(this.#formatOf(this.#input.left[0] ?? 0));
    return this.#input.went(this.#decoder.decode(this.#input.left));
  }

  finish(): void {
    this.#decoder?.finish();
  }

  close(): void {
    this.#decoder?.close();
  }
}

/** By its first byte (RFC 7932, section 9.1). */
function brotliWindowOf(firstByte: number): number {
  if ((firstByte & 1) === 0) return 2 ** 16;
  const high = (firstByte >> 1) & 0b111;
  if (high !== 0) return 2 ** (17 + high);
  const low = (firstByte >> 4) & 0b111;
  if (low === 0) return 2 ** 17;
  if (low === 1) throw new Undecodable("a large window of brotli");
  return 2 ** (8 + low);
}

class BrotliLayer implements Layer {
  readonly #tenant: string;
  readonly #input = new Input();
  #needs = 0;
  #decoder: BrotliDecoder | null = null;

  constructor(tenant: string) {
    this.#tenant = tenant;
  }

  get needs(): number {
    return this.#needs;
  }

  push(input: Uint8Array): void {
    if (this.#needs === 0 && input.length > 0) this.#needs = brotliWindowOf(input[0] ?? 0) + BROTLI_BYTES;
    this.#input.push(input);
  }

  get hasWork(): boolean {
    return this.#input.hasWork;
  }

  async step(): Promise<Uint8Array> {
    this.#decoder ??= new BrotliDecoder();
    const decoder = this.#decoder;
    const went = await inThreadTurn(this.#tenant, () => decoder.decode(this.#input.left));
    return this.#input.went(went);
  }

  async finish(): Promise<void> {
    const decoder = this.#decoder;
    if (decoder !== null) await inThreadTurn(this.#tenant, () => decoder.finish());
  }

  close(): void {
    this.#decoder?.close();
  }
}
