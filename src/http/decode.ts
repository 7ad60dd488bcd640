// Decodes the encodings of one body while it is read: within bounds, in turns by tenant, and with memory that is counted
// before it is used. A sender of little that unpacks to much, or of much that unpacks to nothing, gets only its share.

import { doneInTurns } from "../concurrency/turns.ts";
import { type Coding, Undecodable } from "./codings.ts";
import { createLayer, type Layer, NEEDS_MAX } from "./layers.ts";

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
