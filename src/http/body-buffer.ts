// The bytes of a body as they arrive, in parts of one size: at most one part more is held than has arrived. At the end the
// parts are joined step by step, and each is released as soon as it is copied. A few released parts are kept for the next
// bodies, since memory that is new to the process costs more than the copy into it (measured: 8 ms of processor time for
// a body of 10 MiB, now 4).
import type { Steps } from "../concurrency/steps.ts";

const PART_BYTES = 1024 * 1024;
/** The most that is held beyond what has arrived, in the first half of the first part. */
const AHEAD_BYTES = 64 * 1024;
/** Parts that are kept: as many as sixteen bodies that come in together fill in one turn. */
const SPARE_MAX = 16;

/** Parts that nobody uses just now. What is in them is of earlier bodies. */
export interface SpareParts {
  take(): Uint8Array<ArrayBuffer>;
  giveBack(part: Uint8Array<ArrayBuffer>): void;
}

export function createSpareParts(): SpareParts {
  const spare: Uint8Array<ArrayBuffer>[] = [];
  return {
    take: () => spare.pop() ?? unfilled(PART_BYTES),
    giveBack(part) {
      if (spare.length < SPARE_MAX) spare.push(part);
      else moved(part, 0);
    },
  };
}

export interface Gathered {
  /** Bytes held in memory. */
  readonly held: number;
  add(bytes: Uint8Array): void;
  /** All bytes in one piece; nothing else is held after that. */
  whole(): Steps<Uint8Array<ArrayBuffer>>;
  /** Releases all of it at once, because the garbage collector would be late. */
  drop(): void;
}

/** The part of a stream's reader on which the types of Bun and of Node agree. */
export interface BodyReader {
  read(): Promise<{ readonly done: boolean; readonly value?: Uint8Array | undefined }>;
  cancel(): Promise<void>;
  releaseLock(): void;
}

/** @param sizeMax more than so many bytes are not added */
export function gather(sizeMax: number, spare: SpareParts): Gathered {
  const full: Uint8Array<ArrayBuffer>[] = [];
  let last = new Uint8Array();
  let used = 0;

  /** The size of the last part that has room for so many bytes, or for as many as a part holds. */
  function roomFor(bytes: number): number {
    const wanted = used + bytes;
    if (wanted <= last.byteLength) return last.byteLength;
    // From half a part on it is a whole one, which may be a spare one.
    const ahead = full.length > 0 || 2 * wanted >= PART_BYTES ? PART_BYTES : wanted + Math.min(wanted, AHEAD_BYTES);
    return Math.min(PART_BYTES, ahead, sizeMax - full.length * PART_BYTES);
  }

  /** The last part with room for so much, and what is in it. */
  function makeRoom(size: number): void {
    if (size === last.byteLength) return;
    if (size < PART_BYTES) {
      last = moved(last, size);
      return;
    }
    const part = spare.take();
    part.set(last.subarray(0, used));
    moved(last, 0);
    last = part;
  }

  function release(part: Uint8Array<ArrayBuffer>): void {
    if (part.byteLength === PART_BYTES) spare.giveBack(part);
    else moved(part, 0);
  }

  function* whole(): Steps<Uint8Array<ArrayBuffer>> {
    if (full.length === 0) return moved(last, used);
    const all = unfilled(full.length * PART_BYTES + used);
    let at = 0;
    // A part that is released is no longer one of this body, which may be dropped at any step.
    for (let part = full.shift(); part !== undefined; part = full.shift()) {
      all.set(part, at);
      at += PART_BYTES;
      release(part);
      yield;
    }
    all.set(last.subarray(0, used), at);
    const rest = last;
    [last, used] = [new Uint8Array(), 0];
    release(rest);
    return all;
  }

  return {
    get held() {
      return full.length * PART_BYTES + last.byteLength;
    },
    add(bytes) {
      for (let at = 0; at < bytes.byteLength; ) {
        if (used === PART_BYTES) {
          full.push(last);
          [last, used] = [new Uint8Array(), 0];
        }
        makeRoom(roomFor(bytes.byteLength - at));
        const next = bytes.subarray(at, at + last.byteLength - used);
        last.set(next, used);
        used += next.byteLength;
        at += next.byteLength;
      }
    },
    whole,
    drop() {
      for (const part of [...full.splice(0), last]) release(part);
      [last, used] = [new Uint8Array(), 0];
    },
  };
}

/** Memory of its own that is not zeroed: all of it is written to before it is shown. */
function unfilled(size: number): Uint8Array<ArrayBuffer> {
  return new Uint8Array(Buffer.allocUnsafeSlow(size).buffer as ArrayBuffer);
}

/** The same bytes with room for `size`. The memory that they were in is free at once. */
function moved(bytes: Uint8Array<ArrayBuffer>, size: number): Uint8Array<ArrayBuffer> {
  return bytes.byteLength === size ? bytes : new Uint8Array(bytes.buffer.transfer(size));
}
