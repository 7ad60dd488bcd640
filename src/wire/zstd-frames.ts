// The frames of a zstd body (RFC 8878, section 3), followed byte by byte without decoding them: how large a window each
// asks for is known before a decoder has seen it, and whether the body ends where a frame does. Skippable frames are
// left out, for they are nothing when decoded.

/** The next part of a body: the start of a frame that needs a window of so many bytes, or bytes of the current frame. */
export type ZstdPart =
  | { readonly kind: "frame"; readonly windowBytes: number }
  | { readonly kind: "bytes"; readonly bytes: Uint8Array };

export class NotZstd extends Error {}

const MAGIC = 0xfd2fb528;
const SKIPPABLE_MAGIC = 0x184d2a50;
const MAGIC_BYTES = 4;
const LENGTH_BYTES = 4;
const BLOCK_HEADER_BYTES = 3;
const CHECKSUM_BYTES = 4;
/** By the flags of the frame header (section 3.1.1.1.1). */
const CONTENT_SIZE_BYTES = [0, 2, 4, 8];
const DICTIONARY_ID_BYTES = [0, 1, 2, 4];
const BLOCK_RLE = 1;
const BLOCK_RESERVED = 3;

/** The field that is read next. */
type Field = "magic" | "descriptor" | "header" | "skippable length" | "block";

interface FrameHeader {
  readonly isSingleSegment: boolean;
  readonly hasChecksum: boolean;
  readonly dictionaryIdBytes: number;
  readonly contentSizeBytes: number;
  readonly bytes: number;
}

function headerOf(descriptor: number): FrameHeader {
  if ((descriptor & 0b1000) !== 0) throw new NotZstd("a reserved bit is set");
  const isSingleSegment = (descriptor & 0b10_0000) !== 0;
  const sizeFlag = descriptor >> 6;
  const contentSizeBytes = sizeFlag === 0 && isSingleSegment ? 1 : (CONTENT_SIZE_BYTES[sizeFlag] ?? 0);
  const dictionaryIdBytes = DICTIONARY_ID_BYTES[descriptor & 0b11] ?? 0;
  return {
    isSingleSegment,
    hasChecksum: (descriptor & 0b100) !== 0,
    dictionaryIdBytes,
    contentSizeBytes,
    bytes: (isSingleSegment ? 0 : 1) + dictionaryIdBytes + contentSizeBytes,
  };
}

/** Exact enough: a number beyond the integers of a double is far beyond every allowed window. */
function littleEndian(bytes: readonly number[]): number {
  return bytes.reduceRight((value, byte) => value * 256 + byte, 0);
}

/** @param bytes of the header, from the window descriptor on */
function windowOf(header: FrameHeader, bytes: readonly number[]): number {
  if (header.isSingleSegment) {
    const size = littleEndian(bytes.slice(header.dictionaryIdBytes));
    return header.contentSizeBytes === 2 ? size + 256 : size;
  }
  const descriptor = bytes[0] ?? 0;
  const base = 2 ** (10 + (descriptor >> 3));
  return base + (base / 8) * (descriptor & 0b111);
}

export class ZstdFrames {
  #field: Field = "magic";
  /** The length of the field, and its bytes so far. */
  #wanted = MAGIC_BYTES;
  #come: number[] = [];
  /** How many bytes after the field are still to come, and whether they are left out. */
  #rest = 0;
  #isSkipped = false;
  /** The bytes from the magic number on, until it is known to what kind of frame they belong. */
  #held: number[] = [];
  #header: FrameHeader | null = null;

  /** Whether a body may end here. */
  get isBetweenFrames(): boolean {
    return this.#field === "magic" && this.#come.length === 0 && this.#rest === 0;
  }

  /**
   * The parts that this chunk completes, in their order.
   *
   * @throws NotZstd
   */
  *parts(chunk: Uint8Array): Generator<ZstdPart, void, undefined> {
    /** Where the bytes begin that may be passed on. */
    let from = 0;
    let at = 0;
    while (at < chunk.length) {
      if (this.#rest > 0) {
        at += this.#pass(chunk.length - at);
        if (this.#isSkipped) from = at;
        continue;
      }
      if (this.isBetweenFrames && at > from) {
        yield { kind: "bytes", bytes: chunk.subarray(from, at) };
        from = at;
      }
      const isHeld = this.#field !== "block";
      const windowBytes = this.#read(chunk[at++] ?? 0, isHeld);
      if (isHeld) from = at;
      if (windowBytes === null) continue;
      yield { kind: "frame", windowBytes };
      yield { kind: "bytes", bytes: Uint8Array.from(this.#held.splice(0)) };
    }
    if (at > from) yield { kind: "bytes", bytes: chunk.subarray(from, at) };
  }

  #pass(bytes: number): number {
    const passed = Math.min(this.#rest, bytes);
    this.#rest -= passed;
    return passed;
  }

  /** Returns the window once it is known. */
  #read(byte: number, isHeld: boolean): number | null {
    this.#come.push(byte);
    if (isHeld) this.#held.push(byte);
    return this.#come.length < this.#wanted ? null : this.#finishField();
  }

  #next(field: Field, wanted: number): void {
    this.#field = field;
    this.#wanted = wanted;
    this.#come = [];
  }

  #finishField(): number | null {
    const value = littleEndian(this.#come);
    switch (this.#field) {
      case "magic":
        return this.#begin(value);
      case "descriptor": {
        this.#header = headerOf(value);
        this.#next("header", this.#header.bytes);
        return null;
      }
      case "header": {
        const window = this.#header === null ? 0 : windowOf(this.#header, this.#come);
        this.#next("block", BLOCK_HEADER_BYTES);
        return window;
      }
      case "skippable length":
        this.#rest = value;
        this.#isSkipped = true;
        this.#held = [];
        this.#next("magic", MAGIC_BYTES);
        return null;
      case "block":
        this.#beginBlock(value);
        return null;
    }
  }

  #begin(magic: number): null {
    this.#isSkipped = false;
    if (magic === MAGIC) this.#next("descriptor", 1);
    else if (magic - (magic % 16) === SKIPPABLE_MAGIC) this.#next("skippable length", LENGTH_BYTES);
    else throw new NotZstd("not a zstd frame");
    return null;
  }

  #beginBlock(header: number): void {
    const type = (header >> 1) & 0b11;
    if (type === BLOCK_RESERVED) throw new NotZstd("a block of a reserved type");
    this.#rest = type === BLOCK_RLE ? 1 : header >> 3;
    const isLast = (header & 1) === 1;
    if (isLast && this.#header?.hasChecksum === true) this.#rest += CHECKSUM_BYTES;
    if (isLast) this.#next("magic", MAGIC_BYTES);
    else this.#next("block", BLOCK_HEADER_BYTES);
  }
}
