// Reads the outline of a JSON object straight from its bytes: whether the text is JSON at all, and where the
// values of a few keys stand. Nothing is built, so a body of 32 MiB costs no second copy and no object tree,
// and a value can be replaced in place without touching its neighbours.
import { JSON_DEPTH_MAX } from "./limits.ts";

/** A key to look for, in ASCII, and the keys to look for inside its value when that is an object. */
export interface Watched {
  readonly key: string;
  readonly inside: readonly Watched[];
}

/** A span of bytes: from `start` up to, but not including, `end`. */
export interface Span {
  readonly start: number;
  readonly end: number;
}

/** What was found of a watched key. */
export interface Finding {
  /** Its value, the last one where the key appears again; null when it is not there. */
  readonly value: Span | null;
  /** The key appears more than once, in whatever letter case. */
  readonly isRepeated: boolean;
  /** The key appears in another letter case or with U+0000 behind it, which lenient decoders take for the same. */
  readonly isMiscased: boolean;
  readonly inside: readonly Finding[];
}

export interface Outline {
  /** One for each watched key, in their order. */
  readonly findings: readonly Finding[];
  /** The index after the object; -1 when it does not end properly. */
  readonly end: number;
  /** Why the object does not end: no JSON (or cut off), or nested too deep. */
  readonly problem: "malformed" | "too deep" | null;
}

/** Of `\u0061`. */
const ESCAPE_BYTES = 6;

const TAB = 0x09;
const LINE_FEED = 0x0a;
const RETURN = 0x0d;
const SPACE = 0x20;
const QUOTE = 0x22;
const COMMA = 0x2c;
const SLASH = 0x2f;
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
/** Set in lower case letters alone. */
const LETTER_CASE = 0x20;
const LETTER_T = 0x74;

const encoder = new TextEncoder();
const TRUE = encoder.encode("true");
const FALSE = encoder.encode("false");
const NULL = encoder.encode("null");
const SIMPLE_ESCAPES = new Set(encoder.encode('"\\/bfnrt'));
const NOTHING: readonly Probe[] = [];

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

export function watch(key: string, ...inside: Watched[]): Watched {
  return { key, inside };
}

/**
 * The outline of the object that opens at `start`. When it is malformed or cut off, the findings are of the
 * complete members before that place. Well-formed UTF-8 is not checked here.
 */
export function outlineObject(bytes: Uint8Array, start: number, watched: readonly Watched[]): Outline {
  const probes = watched.map(createProbe);
  try {
    const end = scanObject(bytes, start, 0, probes);
    return { findings: probes.map(toFinding), end, problem: null };
  } catch (error) {
    if (!(error instanceof ScanError)) throw error;
    return { findings: probes.map(toFinding), end: -1, problem: error.problem };
  }
}

export interface Items {
  /** Where the items stand. */
  readonly items: readonly Span[];
  /** The index after the array; -1 when it does not end properly. */
  readonly end: number;
  readonly problem: Outline["problem"] | "too many";
}

/** The items of the array that opens at `start`, none of them looked into. At most `most` are listed. */
export function outlineArray(bytes: Uint8Array, start: number, most: number): Items {
  const items: Span[] = [];
  try {
    let at = skipSpace(bytes, start + 1);
    if (bytes[at] === CLOSE_BRACKET) return { items, end: at + 1, problem: null };
    for (;;) {
      if (items.length === most) return { items, end: -1, problem: "too many" };
      const end = scanValue(bytes, at, 1, NOTHING);
      items.push({ start: at, end });
      at = skipSpace(bytes, end);
      if (bytes[at] === CLOSE_BRACKET) return { items, end: at + 1, problem: null };
      if (bytes[at] !== COMMA) throw new ScanError("malformed");
      at = skipSpace(bytes, at + 1);
    }
  } catch (error) {
    if (!(error instanceof ScanError)) throw error;
    return { items, end: -1, problem: error.problem };
  }
}

/** A finding in the making. There is one for each watched key, however many members there are. */
interface Probe {
  readonly key: string;
  /** Of the key as it is written at its shortest. */
  readonly bytesMin: number;
  /** Its first byte, with the bit of lower case. */
  readonly first: number;
  readonly inside: readonly Probe[];
  start: number;
  /** -1 while there is no value. */
  end: number;
  seen: number;
  isMiscased: boolean;
}

function createProbe({ key, inside }: Watched): Probe {
  return {
    key,
    bytesMin: key.length,
    first: key.charCodeAt(0) | LETTER_CASE,
    inside: inside.map(createProbe),
    start: -1,
    end: -1,
    seen: 0,
    isMiscased: false,
  };
}

function toFinding({ inside, start, end, seen, isMiscased }: Probe): Finding {
  const value = end === -1 ? null : { start, end };
  return { value, isRepeated: seen > 1, isMiscased, inside: inside.map(toFinding) };
}

/** Of equal keys the last one counts, with what is inside its value alone. */
function forget(probes: readonly Probe[]): void {
  for (const probe of probes) {
    probe.end = -1;
    probe.seen = 0;
    probe.isMiscased = false;
    forget(probe.inside);
  }
}

/** Most keys are told apart by their length and first byte, without a look at the rest. */
function findProbe(bytes: Uint8Array, start: number, end: number, probes: readonly Probe[]): Probe | null {
  const length = end - start;
  const first = bytes[start] ?? 0;
  const isPlain = first < 0x80 && first !== BACKSLASH;
  for (const probe of probes) {
    if (length < probe.bytesMin) continue;
    if (isPlain && (first | LETTER_CASE) !== probe.first) continue;
    if (spells(bytes, start, end, probe.key, true)) return probe;
  }
  return null;
}

/** Whether the bytes of a key, without its quotes, write `key`; folded: are what a lenient decoder takes for it. */
function spells(bytes: Uint8Array, start: number, end: number, key: string, isFolded: boolean): boolean {
  let at = start;
  for (let index = 0; index < key.length; index++) {
    if (at >= end) return false;
    const wanted = key.charCodeAt(index);
    // The way keys are nearly always written.
    if (bytes[at] === wanted) {
      at++;
      continue;
    }
    const unit = readUnit(bytes, at);
    if (unit !== wanted && (!isFolded || fold(unit) !== fold(wanted))) return false;
    at += unitBytes(bytes, at);
  }
  return at === end || (isFolded && at < end && readUnit(bytes, at) === 0);
}

/** The character at `at` inside a string, as far as it may stand in a key that is watched; others are -1. */
function readUnit(bytes: Uint8Array, at: number): number {
  const byte = bytes[at] ?? 0;
  const second = bytes[at + 1] ?? 0;
  if (byte === BACKSLASH) return second === LETTER_U ? readHex(bytes, at + 2) : readSimpleEscape(second);
  if (byte < 0x80) return byte;
  if (byte < 0xe0) return ((byte & 0x1f) << 6) | (second & 0x3f);
  if (byte < 0xf0) return ((byte & 0x0f) << 12) | ((second & 0x3f) << 6) | ((bytes[at + 2] ?? 0) & 0x3f);
  return -1;
}

/** Of those that name another character than themselves (`\n`), none is in a key that is watched. */
function readSimpleEscape(letter: number): number {
  return letter === SLASH || letter === QUOTE || letter === BACKSLASH ? letter : -1;
}

/** Four hexadecimal digits, which have been checked. */
function readHex(bytes: Uint8Array, start: number): number {
  let value = 0;
  for (let at = start; at < start + 4; at++) {
    const digit = bytes[at] ?? 0;
    value = value * 16 + (isDigit(digit) ? digit - ZERO : (digit | 0x20) - 0x57);
  }
  return value;
}

function unitBytes(bytes: Uint8Array, at: number): number {
  const byte = bytes[at] ?? 0;
  if (byte === BACKSLASH) return bytes[at + 1] === LETTER_U ? ESCAPE_BYTES : 2;
  if (byte < 0x80) return 1;
  if (byte < 0xe0) return 2;
  return byte < 0xf0 ? 3 : 4;
}

/** ASCII letters, and all that lenient decoders may take for one, in upper case. */
function fold(unit: number): number {
  if (unit >= 0x61 && unit <= 0x7a) return unit - 0x20;
  switch (unit) {
    case 0x130: // capital i with dot
    case 0x131: // dotless i
      return 0x49;
    case 0x17f: // long s
      return 0x53;
    case 0x212a: // Kelvin sign
      return 0x4b;
    default:
      return unit;
  }
}

function scanObject(bytes: Uint8Array, start: number, depth: number, probes: readonly Probe[]): number {
  if (bytes[start] !== OPEN_BRACE) throw new ScanError("malformed");
  if (depth >= JSON_DEPTH_MAX) throw new ScanError("too deep");
  let at = skipSpace(bytes, start + 1);
  if (bytes[at] === CLOSE_BRACE) return at + 1;
  for (;;) {
    const keyStart = at;
    const keyEnd = scanString(bytes, keyStart);
    at = skipSpace(bytes, keyEnd);
    if (bytes[at] !== COLON) throw new ScanError("malformed");
    at = skipSpace(bytes, at + 1);
    const probe = probes.length === 0 ? null : findProbe(bytes, keyStart + 1, keyEnd - 1, probes);
    const isExact = probe !== null && spells(bytes, keyStart + 1, keyEnd - 1, probe.key, false);
    at = scanMember(bytes, at, depth, probe, isExact);
    if (bytes[at] === CLOSE_BRACE) return at + 1;
    at = skipSpace(bytes, at + 1);
  }
}

/** Scans the value of a member, and notes it if its key is watched; gives the place of the comma or brace behind it. */
function scanMember(
  bytes: Uint8Array,
  start: number,
  depth: number,
  probe: Probe | null,
  isExact: boolean,
): number {
  if (probe !== null && isExact) forget(probe.inside);
  const end = scanValue(bytes, start, depth + 1, probe !== null && isExact ? probe.inside : NOTHING);
  const next = skipSpace(bytes, end);
  // A number at the very end of a cut-off text may itself be cut, so a member counts once its end is seen.
  if (bytes[next] !== COMMA && bytes[next] !== CLOSE_BRACE) throw new ScanError("malformed");
  if (probe !== null) note(probe, isExact, start, end);
  return next;
}

function note(probe: Probe, isExact: boolean, start: number, end: number): void {
  probe.seen++;
  if (isExact) {
    probe.start = start;
    probe.end = end;
  } else {
    probe.isMiscased = true;
  }
}

function scanArray(bytes: Uint8Array, start: number, depth: number): number {
  if (depth >= JSON_DEPTH_MAX) throw new ScanError("too deep");
  let at = skipSpace(bytes, start + 1);
  if (bytes[at] === CLOSE_BRACKET) return at + 1;
  for (;;) {
    at = skipSpace(bytes, scanValue(bytes, at, depth + 1, NOTHING));
    if (bytes[at] === CLOSE_BRACKET) return at + 1;
    if (bytes[at] !== COMMA) throw new ScanError("malformed");
    at = skipSpace(bytes, at + 1);
  }
}

function scanValue(bytes: Uint8Array, start: number, depth: number, probes: readonly Probe[]): number {
  switch (bytes[start]) {
    case QUOTE:
      return scanString(bytes, start);
    case OPEN_BRACE:
      return scanObject(bytes, start, depth, probes);
    case OPEN_BRACKET:
      return scanArray(bytes, start, depth);
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
