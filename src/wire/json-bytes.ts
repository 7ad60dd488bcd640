// The smallest parts of a JSON text, read from its bytes: white space, escapes, words, digits.

const TAB = 0x09;
const LINE_FEED = 0x0a;
const RETURN = 0x0d;
const SPACE = 0x20;
const ZERO = 0x30;
const NINE = 0x39;
const LETTER_U = 0x75;
/** The longest escape: `\u0061`. */
export const ESCAPE_BYTES = 6;

const SIMPLE_ESCAPES = new Set(new TextEncoder().encode('"\\/bfnrt'));

export class ScanError extends Error {
  readonly problem: "malformed" | "too deep" | "too many";
  constructor(problem: ScanError["problem"]) {
    super(problem);
    this.problem = problem;
  }
}

/** The index of the first byte at or after `at`, and before `until`, that is no JSON white space. */
export function spaceEnd(bytes: Uint8Array, at: number, until: number): number {
  let next = at;
  while (next < until) {
    const byte = bytes[next];
    if (byte !== SPACE && byte !== LINE_FEED && byte !== RETURN && byte !== TAB) return next;
    next++;
  }
  return next;
}

/** @throws ScanError */
export function scanWord(bytes: Uint8Array, start: number, word: Uint8Array): number {
  for (let offset = 0; offset < word.length; offset++) {
    if (bytes[start + offset] !== word[offset]) throw new ScanError("malformed");
  }
  return start + word.length;
}
/** The index after the escape at `start`. @throws ScanError */
export function scanEscape(bytes: Uint8Array, start: number): number {
  const letter = bytes[start + 1];
  if (letter !== undefined && SIMPLE_ESCAPES.has(letter)) return start + 2;
  if (letter !== LETTER_U) throw new ScanError("malformed");
  for (let at = start + 2; at < start + ESCAPE_BYTES; at++) {
    if (!isHexDigit(bytes[at])) throw new ScanError("malformed");
  }
  return start + ESCAPE_BYTES;
}

function isHexDigit(byte: number | undefined): boolean {
  if (byte === undefined || isDigit(byte)) return byte !== undefined;
  const letter = byte | 0x20;
  return letter >= 0x61 && letter <= 0x66;
}

export function isDigit(byte: number | undefined): boolean {
  return byte !== undefined && byte >= ZERO && byte <= NINE;
}
