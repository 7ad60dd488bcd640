// Decodes the encodings of one body while it is read: within bounds, in turns by tenant, and with memory that is counted
// before it is used. A sender of little that unpacks to much, or of much that unpacks to nothing, gets only its share.

import { MAX } from "../../kernel/limits.ts";
import { Commons } from "../../kernel/share.ts";
import { doneInTurns, inThreadTurn } from "../../kernel/turns.ts";
import type { StopSignal } from "../../kernel/wait.ts";
import {
  BROTLI_ROOM_BYTES,
  BrotliDecoder,
  type Decoded,
  SYNC_ROOM_BYTES,
  SyncDecoder,
  type SyncFormat,
  ZSTD_WINDOW_LOG_MAX,
} from "../bun/native-decoders.ts";
import { type Coding, Undecodable } from "./answer.ts";

export type Chunks = AsyncGenerator<Uint8Array, void, undefined>;

/** The body, or what a layer of its encoding unpacks to, went beyond the limit. */
export class BodyTooLarge extends Error {}

/** The memory that decoders may hold, shared with all others. */
export interface DecoderMemory {
  /**
   * Resolves when so many bytes may be held, with what gives them back.
   *
   * @param signal its reason ends the wait
   * @param giveWay called when others need them
   */
  take(bytes: number, signal: AbortSignal, giveWay: () => void): Promise<() => void>;
}

/** For whom a body is decoded. */
export interface DecodedFor {
  readonly tenant: string;
  readonly memory: DecoderMemory;
}

/** For answers of servers that the operator configured. */
export const NOBODY: DecodedFor = { tenant: "", memory: { take: async () => () => {} } };

/** Input of one step, which costs time even if nothing comes out. */
const INPUT_BYTES = 16 * 1024;
/** No honest answer gives a layer more input than this that is also so many times its output. */
const INPUT_FREE_BYTES = 1024 * 1024;
const INPUT_PER_OUTPUT_MAX = 64;
const EMPTY = new Uint8Array();

export interface DecodingOptions extends DecodedFor {
  /** Outermost first. */
  readonly codings: readonly Coding[];
  /** Each layer may unpack to this much: a small body can hide gigabytes between two layers. */
  readonly maxBytes: number;
  /** Whether each chunk is valid only until the next one is asked for; otherwise it belongs to its reader. */
  readonly isLent: boolean;
  /** Called when others need its memory: it has to be closed. */
  giveWay(): void;
}

async function* copied(chunks: Chunks): Chunks {
  for await (const chunk of chunks) yield chunk.slice();
}

function* slicesOf(chunk: Uint8Array) {
  for (let at = 0; at < chunk.length; at += INPUT_BYTES) yield chunk.subarray(at, at + INPUT_BYTES);
}

/** The input of a layer, and its output. */
class Measure {
  readonly #coding: Coding;
  readonly #maxBytes: number;
  #given = 0;
  taken = 0;

  constructor(coding: Coding, maxBytes: number) {
    this.#coding = coding;
    this.#maxBytes = maxBytes;
  }

  /** @throws BodyTooLarge */
  gave(bytes: number): void {
    this.#given += bytes;
    if (this.#given > this.#maxBytes) throw new BodyTooLarge(`a layer of ${this.#coding} is too large`);
  }

  /** @throws Undecodable */
  took(bytes: number): void {
    this.taken += bytes;
    if (this.taken <= INPUT_FREE_BYTES + INPUT_PER_OUTPUT_MAX * this.#given) return;
    throw new Undecodable(`much ${this.#coding} that comes to nothing`);
  }
}

/** The decoding of one body, with a layer for each encoding. */
export class Decoding {
  readonly #options: DecodingOptions;
  readonly #closing = new AbortController();
  readonly #layers: Layer[] = [];
  /** Null until its memory is counted. */
  #giveBack: (() => void) | null = null;

  constructor(options: DecodingOptions) {
    this.#options = options;
  }

  chunks(raw: Chunks): Chunks {
    const { codings, isLent } = this.#options;
    const chunks = codings.reduce((source, coding) => this.#decode(source, coding), raw);
    return isLent ? chunks : copied(chunks);
  }

  /** At once, whatever it waits for. */
  close(): void {
    if (this.#closing.signal.aborted) return;
    this.#closing.abort(new Error("the body was closed"));
    for (const layer of this.#layers) layer.close();
    this.#giveBack?.();
  }

  async *#decode(source: Chunks, coding: Coding): Chunks {
    const { tenant, maxBytes } = this.#options;
    const layer = createLayer(coding, tenant);
    this.#layers.push(layer);
    const measure = new Measure(coding, maxBytes);
    for await (const chunk of source) {
      for (const input of slicesOf(chunk)) {
        layer.push(input);
        while (layer.hasWork) {
          const output = await this.#next(layer);
          if (output.length > 0) yield output;
          measure.gave(output.length);
        }
        measure.took(input.length);
      }
    }
    // No bytes are an empty body in any encoding.
    if (measure.taken > 0) await layer.finish();
  }

  async #next(layer: Layer): Promise<Uint8Array> {
    if (this.#giveBack === null) await this.#takeMemory(layer);
    let output: Uint8Array | Promise<Uint8Array> = EMPTY;
    await doneInTurns(() => {
      this.#closing.signal.throwIfAborted();
      output = layer.step();
      return false;
    }, this.#options.tenant);
    const given: Uint8Array = await output;
    this.#closing.signal.throwIfAborted();
    return given;
  }

  /** Takes all that its layers may come to need, so that nobody who holds some waits for more. */
  async #takeMemory(outermost: Layer): Promise<void> {
    const { codings, memory, giveWay } = this.#options;
    const needs = codings.length > 1 ? codings.reduce((sum, coding) => sum + NEEDS_MAX[coding], 0) : outermost.needs;
    const { signal } = this.#closing;
    const giveBack = await memory.take(needs, signal, giveWay);
    if (signal.aborted) giveBack();
    signal.throwIfAborted();
    this.#giveBack = giveBack;
  }
}

/** One encoding of a body. The most memory that it may need is known before any is used, and each step is short. */
interface Layer {
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

/** The largest window, for each frame may name its own; tables, a block of each side, and room for what comes out. */
const ZSTD_BYTES = 2 ** ZSTD_WINDOW_LOG_MAX + 384 * KIB + SYNC_ROOM_BYTES;
/** Its tables, up to 256 of each of three kinds, and room for what comes out. */
const BROTLI_BYTES = 4 * MIB + BROTLI_ROOM_BYTES;
/** The window of 32 KiB, tables, and what surrounds them. */
const DEFLATE_BYTES = 64 * KIB + SYNC_ROOM_BYTES;

/** The most that one may need. */
const NEEDS_MAX: Readonly<Record<Coding, number>> = {
  gzip: DEFLATE_BYTES,
  deflate: DEFLATE_BYTES,
  br: 16 * MIB + BROTLI_BYTES,
  zstd: ZSTD_BYTES,
};

function createLayer(coding: Coding, tenant: string): Layer {
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

/**
 * The memory of all decoders of the process, in all threads, shared out by tenant first. An answer of a few hundred bytes
 * can make its decoder hold 16 MiB for as long as it stays open. So nobody decodes before the memory is granted, and a
 * tenant that holds more than its part gives way when others wait: see kernel/share.ts.
 */
export interface DecoderShare {
  /**
   * Resolves when so many bytes may be held, with a function that gives them back, to be called once.
   *
   * @param signal its reason ends the wait
   * @param giveWay called once when others need them: they are to be given back soon
   */
  take(tenant: string, agent: string, bytes: number, signal: StopSignal, giveWay: () => void): Promise<() => void>;
}

export function createDecoderShare(size = MAX.decoderBytes): DecoderShare & { inUse(): { decoderBytes: number } } {
  const commons = new Commons({ size });
  return {
    async take(tenant, agent, bytes, signal, giveWay) {
      signal.throwIfAborted();
      const stake = commons.stake(tenant, agent);
      stake.giveWay = giveWay;
      await stake.take(bytes, signal);
      return () => stake.giveBack();
    },
    inUse: () => ({ decoderBytes: commons.inUse }),
  };
}
