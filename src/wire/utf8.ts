// Repairs text as the web's decoder does, into UTF-8 again: malformed bytes become U+FFFD, and a byte order mark at the
// start is dropped. Most text is well formed and passes as it is, without a copy.
import { isUtf8 } from "node:buffer";

const MARK = Uint8Array.of(0xef, 0xbb, 0xbf);

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
const encoder = new TextEncoder();

/** The length of a character with this first byte; 1 for a byte that begins none. */
function lengthOf(first: number): number {
  if (first >= 0xf0 && first <= 0xf4) return 4;
  if (first >= 0xe0 && first < 0xf0) return 3;
  return first >= 0xc2 && first < 0xe0 ? 2 : 1;
}

/** Where the character begins that continues after the end; the end itself when there is none. */
function openFrom(bytes: Uint8Array): number {
  for (let back = 1; back <= 3 && back <= bytes.length; back++) {
    const byte = bytes[bytes.length - back] ?? 0;
    if (byte < 0x80) break;
    if (byte >= 0xc0) return lengthOf(byte) > back ? bytes.length - back : bytes.length;
  }
  return bytes.length;
}

function inOrder(bytes: Uint8Array): Uint8Array {
  return isUtf8(bytes) ? bytes : encoder.encode(decoder.decode(bytes));
}

export class Utf8Reader {
  /** The bytes of a character that is not whole yet. */
  #open: Uint8Array = new Uint8Array();
  #isStart = true;

  /** The text that is complete by now. It may be a view of these bytes. */
  read(bytes: Uint8Array): Uint8Array {
    const all = this.#open.length === 0 ? bytes : Buffer.concat([this.#open, bytes]);
    const end = openFrom(all);
    this.#open = new Uint8Array(all.subarray(end));
    return this.#withoutMark(inOrder(all.subarray(0, end)));
  }

  /** What is left at the end. */
  end(): Uint8Array {
    const rest = this.#open;
    this.#open = new Uint8Array();
    return inOrder(rest);
  }

  #withoutMark(text: Uint8Array): Uint8Array {
    if (!this.#isStart || text.length === 0) return text;
    this.#isStart = false;
    return MARK.every((byte, at) => text[at] === byte) ? text.subarray(MARK.length) : text;
  }
}
