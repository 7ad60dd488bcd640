// The bytes of a body as they arrive, in parts of one size: no byte is copied twice, and at most one part more is held
// than has arrived.
import { bodyOf, type CallBody, PART_BYTES } from "../wire/body.ts";

/** The most that is held beyond what has arrived, in the first part. */
const AHEAD_BYTES = 64 * 1024;

export interface Gathered {
  /** Bytes held in memory. */
  readonly held: number;
  add(bytes: Uint8Array): void;
  /** All of it; nothing else is held after that. */
  body(): CallBody;
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
export function gather(sizeMax: number): Gathered {
  const full: Uint8Array<ArrayBuffer>[] = [];
  let last = new Uint8Array();
  let used = 0;

  /** The size of the last part that has room for so many bytes, or for as many as a part holds. */
  function roomFor(bytes: number): number {
    const wanted = used + bytes;
    if (wanted <= last.byteLength) return last.byteLength;
    const ahead = full.length > 0 ? PART_BYTES : wanted + Math.min(wanted, AHEAD_BYTES);
    return Math.min(PART_BYTES, ahead, sizeMax - full.length * PART_BYTES);
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
        last = moved(last, roomFor(bytes.byteLength - at));
        const next = bytes.subarray(at, at + last.byteLength - used);
        last.set(next, used);
        used += next.byteLength;
        at += next.byteLength;
      }
    },
    body: () => bodyOf([...full.splice(0), moved(last, used)]),
    drop() {
      for (const part of [...full.splice(0), last]) moved(part, 0);
      [last, used] = [new Uint8Array(), 0];
    },
  };
}

/** The same bytes with room for `size`. The memory that they were in is free at once. */
function moved(bytes: Uint8Array<ArrayBuffer>, size: number): Uint8Array<ArrayBuffer> {
  return bytes.byteLength === size ? bytes : new Uint8Array(bytes.buffer.transfer(size));
}
