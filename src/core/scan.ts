// Reads the outline of a JSON object straight from its bytes: whether the text is JSON at all, and where the
// values of a few keys stand. Nothing is built, so a body of 32 MiB costs no second copy and no object tree,
// and a value can be replaced in place without touching its neighbours.
import { JSON_DEPTH_MAX } from "./limits.ts";

/** A value of the scanned object: bytes from `start` up to, but not including, `end`. */
export interface Member {
  readonly key: string;
  readonly start: number;
  readonly end: number;
}

export interface Outline {
  /** Members whose key equals a watched one, letter case aside, in their order; equal keys appear each time. */
  readonly members: readonly Member[];
  /** The index after the object; -1 when it does not end properly. */
  readonly end: number;
  /** Why the object does not end: no JSON (or cut off), or nested too deep. */
  readonly problem: "malformed" | "too deep" | null;
}

/** Longer keys are never watched ones, however they are escaped. */
const KEY_BYTES_MAX = 512;

const TAB = 0x09;
const LINE_FEED = 0x0a;
const RETURN = 0x0d;
const SPACE = 0x20;
const QUOTE = 0x22;
const COMMA = 0x2c;
const COLON = 0x3a;
const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
const CLOSE_BRACKET = 0x5d;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;
const LETTER_U = 0x75;

const PLUS = 0x2b;
const MINUS = 0x2d;
const POINT = 0x2e;
const ZERO = 0x30;
const NINE = 0x39;
const LARGE_E = 0x45;
const SMALL_E = 0x65;
const LETTER_F = 0x66;
const LETTER_N = 0x6e;
const LETTER_T = 0x74;

const encoder = new TextEncoder();
const decoder = new TextDecoder();
const TRUE = encoder.encode("true");
const FALSE = encoder.encode("false");
const NULL = encoder.encode("null");
const SIMPLE_ESCAPES = new Set(encoder.encode('"\\/bfnrt'));

class ScanError extends Error {
  readonly problem: "malformed" | "too deep";
  constructor(problem: "malformed" | "too deep") {
    super(problem);
    this.problem = problem;
  }
}

/** The index of the first byte at or after `at` that is no JSON white space. */
export function skipSpace(bytes: Uint8Array, at: number): number {
  let next = at;
  for (;;) {
    const byte = bytes[next];
    if (byte !== SPACE && byte !== LINE_FEED && byte !== RETURN && byte !== TAB) return next;
    next++;
  }
}

/**
 * The outline of the object that opens at `start`. When it is malformed or cut off, `members` holds the
 * complete ones before that place. Well-formed UTF-8 is not checked here.
 *
 * @param depth how many levels are already open around the object
 */
export function outlineObject(
  bytes: Uint8Array,
  start: number,
  watched: readonly string[],
  depth = 0,
): Outline {
  const members: Member[] = [];
  const folded = new Set(watched.map(foldKey));
  try {
    const end = scanObject(bytes, start, depth, (keyStart, keyEnd, valueStart, valueEnd) => {
      if (keyEnd - keyStart > KEY_BYTES_MAX) return;
      const key = String(JSON.parse(decoder.decode(bytes.subarray(keyStart, keyEnd))));
      if (folded.has(foldKey(key))) members.push({ key, start: valueStart, end: valueEnd });
    });
    return { members, end, problem: null };
  } catch (error) {
    if (!(error instanceof ScanError)) throw error;
    return { members, end: -1, problem: error.problem };
  }
}

/** Upper case rather than lower: it also folds the long s, as lenient decoders do. */
function foldKey(key: string): string {
  return key.toUpperCase();
}

type OnMember = (keyStart: number, keyEnd: number, valueStart: number, valueEnd: number) => void;

function scanObject(bytes: Uint8Array, start: number, depth: number, onMember: OnMember | null): number {
  if (bytes[start] !== OPEN_BRACE) throw new ScanError("malformed");
  if (depth >= JSON_DEPTH_MAX) throw new ScanError("too deep");
  let at = skipSpace(bytes, start + 1);
  if (bytes[at] === CLOSE_BRACE) return at + 1;
  for (;;) {
    const keyStart = at;
    const keyEnd = scanString(bytes, keyStart);
    at = skipSpace(bytes, keyEnd);
    if (bytes[at] !== COLON) throw new ScanError("malformed");
    const valueStart = skipSpace(bytes, at + 1);
    const valueEnd = scanValue(bytes, valueStart, depth + 1);
    at = skipSpace(bytes, valueEnd);
    const next = bytes[at];
    // A number at the very end of a cut-off text may itself be cut, so a member counts once its end is seen.
    if (next !== COMMA && next !== CLOSE_BRACE) throw new ScanError("malformed");
    onMember?.(keyStart, keyEnd, valueStart, valueEnd);
    if (next === CLOSE_BRACE) return at + 1;
    at = skipSpace(bytes, at + 1);
  }
}

function scanArray(bytes: Uint8Array, start: number, depth: number): number {
  if (depth >= JSON_DEPTH_MAX) throw new ScanError("too deep");
  let at = skipSpace(bytes, start + 1);
  if (bytes[at] === CLOSE_BRACKET) return at + 1;
  for (;;) {
    at = skipSpace(bytes, scanValue(bytes, at, depth + 1));
    if (bytes[at] === CLOSE_BRACKET) return at + 1;
    if (bytes[at] !== COMMA) throw new ScanError("malformed");
    at = skipSpace(bytes, at + 1);
  }
}

function scanValue(bytes: Uint8Array, start: number, depth: number): number {
  switch (bytes[start]) {
    case QUOTE:
      return scanString(bytes, start);
    case OPEN_BRACE:
      return scanObject(bytes, start, depth, null);
    case OPEN_BRACKET:
      return scanArray(bytes, start, depth);
    default:
      return scanScalar(bytes, start);
  }
}

function scanString(bytes: Uint8Array, start: number): number {
  if (bytes[start] !== QUOTE) throw new ScanError("malformed");
  let at = start + 1;
  for (;;) {
    const byte = bytes[at];
    if (byte === QUOTE) return at + 1;
    if (byte === undefined || byte < SPACE) throw new ScanError("malformed");
    at = byte === BACKSLASH ? scanEscape(bytes, at) : at + 1;
  }
}

function scanEscape(bytes: Uint8Array, start: number): number {
  const letter = bytes[start + 1];
  if (letter !== undefined && SIMPLE_ESCAPES.has(letter)) return start + 2;
  if (letter !== LETTER_U) throw new ScanError("malformed");
  for (let at = start + 2; at < start + 6; at++) {
    if (!isHexDigit(bytes[at])) throw new ScanError("malformed");
  }
  return start + 6;
}

function isHexDigit(byte: number | undefined): boolean {
  if (byte === undefined || isDigit(byte)) return byte !== undefined;
  const letter = byte | 0x20;
  return letter >= 0x61 && letter <= 0x66;
}

function scanScalar(bytes: Uint8Array, start: number): number {
  switch (bytes[start]) {
    case LETTER_T:
      return scanWord(bytes, start, TRUE);
    case LETTER_F:
      return scanWord(bytes, start, FALSE);
    case LETTER_N:
      return scanWord(bytes, start, NULL);
    default:
      return scanNumber(bytes, start);
  }
}

function scanWord(bytes: Uint8Array, start: number, word: Uint8Array): number {
  for (let offset = 0; offset < word.length; offset++) {
    if (bytes[start + offset] !== word[offset]) throw new ScanError("malformed");
  }
  return start + word.length;
}

function scanNumber(bytes: Uint8Array, start: number): number {
  const whole = bytes[start] === MINUS ? start + 1 : start;
  let at = bytes[whole] === ZERO ? whole + 1 : scanDigits(bytes, whole);
  if (bytes[at] === POINT) at = scanDigits(bytes, at + 1);
  if (bytes[at] === SMALL_E || bytes[at] === LARGE_E) {
    const sign = bytes[at + 1];
    at = scanDigits(bytes, sign === PLUS || sign === MINUS ? at + 2 : at + 1);
  }
  return at;
}

/** At least one digit. */
function scanDigits(bytes: Uint8Array, start: number): number {
  let at = start;
  while (isDigit(bytes[at])) at++;
  if (at === start) throw new ScanError("malformed");
  return at;
}

function isDigit(byte: number | undefined): boolean {
  return byte !== undefined && byte >= ZERO && byte <= NINE;
}
