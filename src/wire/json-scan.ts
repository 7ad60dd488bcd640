// Scans a JSON text in its bytes: checks that it is well-formed, and finds the ranges of the values of a few watched keys,
// however the keys are escaped. It builds no values, so a body of 32 MiB costs neither a second copy nor an object tree.
import { MAX } from "../kernel/limits.ts";

const [TAB, LINE_FEED, RETURN, SPACE] = [0x09, 0x0a, 0x0d, 0x20];
const [QUOTE, COMMA, COLON, BACKSLASH, SLASH] = [0x22, 0x2c, 0x3a, 0x5c, 0x2f];
const [OPEN_BRACKET, CLOSE_BRACKET, OPEN_BRACE, CLOSE_BRACE] = [0x5b, 0x5d, 0x7b, 0x7d];
const [PLUS, MINUS, POINT, ZERO, NINE, LARGE_E, SMALL_E] = [0x2b, 0x2d, 0x2e, 0x30, 0x39, 0x45, 0x65];
const [LETTER_F, LETTER_N, LETTER_T, LETTER_U] = [0x66, 0x6e, 0x74, 0x75];
/** The bit that is set in lower case letters only. */
const LETTER_CASE = 0x20;
/** The longest escape: `\u0061`. */
const ESCAPE_BYTES = 6;

const encoded = (text: string) => new TextEncoder().encode(text);
export const SIMPLE_ESCAPES = new Set(encoded('"\\/bfnrt'));
const [TRUE, FALSE, NULL] = [encoded("true"), encoded("false"), encoded("null")];
const NOTHING: readonly Probe[] = [];

interface Outline {
  /** A finding for each watched key, in the order of the keys. */
  readonly findings: readonly FoundKey[];
  /** The index after the object; -1 when it does not end properly. */
  readonly end: number;
  /** Truncated text is `malformed` too. */
  readonly problem: "malformed" | "too deep" | null;
}

export interface Items {
  readonly items: readonly ScannedItem[];
  /** The index after the array; -1 when it does not end properly. */
  readonly end: number;
  readonly problem: Outline["problem"] | "too many";
}

/**
 * The outline of the object that opens at `start`. If the object is malformed or truncated, the findings are those of the
 * complete members before the problem. UTF-8 is not checked here.
 */
export function objectOutline(bytes: Uint8Array, start: number, watched: readonly Watched[]): Outline {
  const probes = watched.map(createProbe);
  const { end, problem } = ended(bytes[start] === OPEN_BRACE, () => new Scan(bytes, null).object(start, 0, probes));
  return { findings: probes.map(toFinding), end, problem: problem === "too many" ? "malformed" : problem };
}

/** The items of the array that opens at `start`, and the watched keys of each; more than `most` items are a problem. */
export function arrayOutline(bytes: Uint8Array, start: number, most: number, watched: readonly Watched[]): Items {
  const listed: Listed = { items: [], most, watched };
  const outline = ended(bytes[start] === OPEN_BRACKET, () => new Scan(bytes, listed).array(start, 0));
  return { items: listed.items, ...outline };
}

function ended(opens: boolean, scan: () => number): { end: number; problem: Items["problem"] } {
  if (!opens) return { end: -1, problem: "malformed" };
  try {
    return { end: scan(), problem: null };
  } catch (error) {
    if (!(error instanceof ScanError)) throw error;
    return { end: -1, problem: error.problem };
  }
}

export interface ScannedItem extends ByteRange {
  /** The findings for the watched keys, if the item is an object. */
  readonly findings: readonly FoundKey[];
}

/** The outermost array, whose items are listed. */
interface Listed {
  readonly items: ScannedItem[];
  readonly most: number;
  readonly watched: readonly Watched[];
}

/** The parts of a number that have digits. */
const [WHOLE, FRACTION, EXPONENT] = [0, 1, 2];

/** The index of the first byte at or after `at` that is no JSON white space. */
export function skipSpace(bytes: Uint8Array, at: number): number {
  let next = at;
  for (;;) {
    const byte = bytes[next];
    if (byte !== SPACE && byte !== LINE_FEED && byte !== RETURN && byte !== TAB) return next;
    next++;
  }
}

/** The index after `byte`, which must be at `at`. @throws ScanError */
function expect(bytes: Uint8Array, at: number, byte: number): number {
  if (bytes[at] !== byte) throw new ScanError("malformed");
  return at + 1;
}

/** A recursive descent, which is the fastest. Each method returns the index after what it reads. @throws ScanError */
class Scan {
  readonly #bytes: Uint8Array;
  readonly #listed: Listed | null;

  /** @param listed null for an object */
  constructor(bytes: Uint8Array, listed: Listed | null) {
    this.#bytes = bytes;
    this.#listed = listed;
  }

  object(start: number, depth: number, probes: readonly Probe[]): number {
    if (depth >= MAX.jsonDepth) throw new ScanError("too deep");
    const bytes = this.#bytes;
    let at = skipSpace(bytes, start + 1);
    if (bytes[at] === CLOSE_BRACE) return at + 1;
    for (;;) {
      const keyEnd = this.#string(expect(bytes, at, QUOTE));
      const probe = findProbe(bytes, at + 1, keyEnd - 1, probes);
      const isExact = probe !== null && spells(bytes, at + 1, keyEnd - 1, probe.key, false);
      const inside = isExact ? probe.inside : NOTHING;
      const start = skipSpace(bytes, expect(bytes, skipSpace(bytes, keyEnd), COLON));
      // In a text that ends before the colon, what an earlier member with this key held still counts.
      reset(inside);
      const end = this.#value(start, depth + 1, inside);
      at = skipSpace(bytes, end);
      const isLast = bytes[at] === CLOSE_BRACE;
      // A number at the end of a truncated text may be truncated too, so a member counts only once the byte after it is seen.
      const next = isLast ? at + 1 : expect(bytes, at, COMMA);
      if (probe !== null) countMember(probe, isExact ? { start, end } : null);
      if (isLast) return next;
      at = skipSpace(bytes, next);
    }
  }

  array(start: number, depth: number): number {
    if (depth >= MAX.jsonDepth) throw new ScanError("too deep");
    const bytes = this.#bytes;
    const listed = depth === 0 ? this.#listed : null;
    let at = skipSpace(bytes, start + 1);
    if (bytes[at] === CLOSE_BRACKET) return at + 1;
    for (;;) {
      if (listed !== null && listed.items.length === listed.most) throw new ScanError("too many");
      const inside = listed === null ? NOTHING : listed.watched.map(createProbe);
      const end = this.#value(at, depth + 1, inside);
      listed?.items.push({ start: at, end, findings: inside.map(toFinding) });
      at = skipSpace(bytes, end);
      if (bytes[at] === CLOSE_BRACKET) return at + 1;
      at = skipSpace(bytes, expect(bytes, at, COMMA));
    }
  }

  /** @param probes for keys inside the value, if it is an object */
  #value(start: number, depth: number, probes: readonly Probe[]): number {
    switch (this.#bytes[start]) {
      case QUOTE:
        return this.#string(start + 1);
      case OPEN_BRACE:
        return this.object(start, depth, probes);
      case OPEN_BRACKET:
        return this.array(start, depth);
      case LETTER_T:
        return scanWord(this.#bytes, start, TRUE);
      case LETTER_F:
        return scanWord(this.#bytes, start, FALSE);
      case LETTER_N:
        return scanWord(this.#bytes, start, NULL);
      default:
        return this.#number(start);
    }
  }

  /** @param from the index after the opening quote */
  #string(from: number): number {
    const bytes = this.#bytes;
    for (let at = from; ; ) {
      const byte = bytes[at];
      if (byte === QUOTE) return at + 1;
      if (byte === undefined || byte < SPACE) throw new ScanError("malformed");
      at = byte === BACKSLASH ? scanEscape(bytes, at) : at + 1;
    }
  }

  #number(start: number): number {
    const bytes = this.#bytes;
    const whole = bytes[start] === MINUS ? start + 1 : start;
    return bytes[whole] === ZERO ? this.#afterDigits(whole + 1, WHOLE) : this.#digits(whole, WHOLE);
  }

  /** Reads at least one digit, and the rest of the number. */
  #digits(start: number, part: number): number {
    const bytes = this.#bytes;
    if (!isDigit(bytes[start])) throw new ScanError("malformed");
    let at = start + 1;
    while (isDigit(bytes[at])) at++;
    return this.#afterDigits(at, part);
  }

  #afterDigits(at: number, part: number): number {
    const byte = this.#bytes[at];
    if (byte === POINT && part === WHOLE) return this.#digits(at + 1, FRACTION);
    if ((byte !== SMALL_E && byte !== LARGE_E) || part === EXPONENT) return at;
    const sign = this.#bytes[at + 1];
    return this.#digits(sign === PLUS || sign === MINUS ? at + 2 : at + 1, EXPONENT);
  }
}

/** @param value null if the key is spelled in another way */
function countMember(probe: Probe, value: ByteRange | null): void {
  probe.seen++;
  if (value === null) probe.isMiscased = true;
  else [probe.start, probe.end] = [value.start, value.end];
}

/** A key to look for, in ASCII, and the keys to look for inside its value when that is an object. */
export interface Watched {
  readonly key: string;
  readonly inside: readonly Watched[];
}

export interface ByteRange {
  readonly start: number;
  /** The index after the last byte. */
  readonly end: number;
}

export interface FoundKey {
  /** The value of the key's last occurrence; null when the key does not occur. */
  readonly value: ByteRange | null;
  /** Whether the key occurs more than once, in any letter case. */
  readonly isRepeated: boolean;
  /** Whether the key occurs in another letter case or followed by U+0000, which lenient decoders take for the key. */
  readonly isMiscased: boolean;
  readonly inside: readonly FoundKey[];
}

export const watch = (key: string, ...inside: Watched[]): Watched => ({ key, inside });

/** The state of the search for one watched key. Memory does not grow with the number of members. */
interface Probe {
  readonly key: string;
  /** The length of the key without escapes, which is its shortest form. */
  readonly bytesMin: number;
  /** The first byte of the key, with LETTER_CASE set. */
  readonly first: number;
  readonly inside: readonly Probe[];
  start: number;
  /** -1 while there is no value. */
  end: number;
  seen: number;
  isMiscased: boolean;
}

function createProbe({ key, inside }: Watched): Probe {
  const first = key.charCodeAt(0) | LETTER_CASE;
  const probes = inside.map(createProbe);
  return { key, bytesMin: key.length, first, inside: probes, start: -1, end: -1, seen: 0, isMiscased: false };
}

function toFinding({ inside, start, end, seen, isMiscased }: Probe): FoundKey {
  const value = end === -1 ? null : { start, end };
  return { value, isRepeated: seen > 1, isMiscased, inside: inside.map(toFinding) };
}

/** Drops the findings inside an earlier value of the key, since the last of equal keys counts. */
function reset(probes: readonly Probe[]): void {
  for (const probe of probes) {
    [probe.end, probe.seen, probe.isMiscased] = [-1, 0, false];
    reset(probe.inside);
  }
}

/** The probe for the key at these indexes. Compares length and first byte first, which rules out most keys. */
function findProbe(bytes: Uint8Array, start: number, end: number, probes: readonly Probe[]): Probe | null {
  if (probes.length === 0) return null;
  const first = bytes[start] ?? 0;
  const isPlain = first < 0x80 && first !== BACKSLASH;
  for (const probe of probes) {
    if (end - start < probe.bytesMin) continue;
    if (isPlain && (first | LETTER_CASE) !== probe.first) continue;
    if (spells(bytes, start, end, probe.key, true)) return probe;
  }
  return null;
}

/** Whether the bytes between a key's quotes spell `key`. @param isFolded whether to accept what lenient decoders take for it */
function spells(bytes: Uint8Array, start: number, end: number, key: string, isFolded: boolean): boolean {
  let at = start;
  for (let index = 0; index < key.length; index++) {
    if (at >= end) return false;
    const wanted = key.charCodeAt(index);
    // Keys are nearly always written without escapes.
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

/** The character at `at` inside a string; -1 if no watched key can contain it. */
function readUnit(bytes: Uint8Array, at: number): number {
  const byte = bytes[at] ?? 0;
  const second = bytes[at + 1] ?? 0;
  if (byte === BACKSLASH) return second === LETTER_U ? readHex(bytes, at + 2) : readSimpleEscape(second);
  if (byte < 0x80) return byte;
  if (byte < 0xe0) return ((byte & 0x1f) << 6) | (second & 0x3f);
  if (byte < 0xf0) return ((byte & 0x0f) << 12) | ((second & 0x3f) << 6) | ((bytes[at + 2] ?? 0) & 0x3f);
  return -1;
}

/** -1 for escapes like `\n`, which stand for a control character: no watched key contains one. */
const readSimpleEscape = (letter: number): number =>
  letter === SLASH || letter === QUOTE || letter === BACKSLASH ? letter : -1;

/** The value of four hexadecimal digits, which have been checked before. */
function readHex(bytes: Uint8Array, start: number): number {
  let value = 0;
  for (let at = start; at < start + 4; at++) {
    const digit = bytes[at] ?? 0;
    value = value * 16 + (digit <= NINE ? digit - ZERO : (digit | 0x20) - 0x57);
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

/** Upper case for ASCII letters, and for the characters that lenient decoders may take for one. */
function fold(unit: number): number {
  if (unit >= 0x61 && unit <= 0x7a) return unit - 0x20;
  // Capital i with dot, dotless i; long s; Kelvin sign.
  if (unit === 0x130 || unit === 0x131) return 0x49;
  if (unit === 0x17f) return 0x53;
  return unit === 0x212a ? 0x4b : unit;
}

class ScanError extends Error {
  readonly problem: "malformed" | "too deep" | "too many";
  constructor(problem: ScanError["problem"]) {
    super(problem);
    this.problem = problem;
  }
}

/** @throws ScanError */
function scanWord(bytes: Uint8Array, start: number, word: Uint8Array): number {
  for (let offset = 0; offset < word.length; offset++) {
    if (bytes[start + offset] !== word[offset]) throw new ScanError("malformed");
  }
  return start + word.length;
}

/** The index after the escape at `start`. @throws ScanError */
function scanEscape(bytes: Uint8Array, start: number): number {
  const letter = bytes[start + 1];
  if (letter !== undefined && SIMPLE_ESCAPES.has(letter)) return start + 2;
  if (letter !== LETTER_U) throw new ScanError("malformed");
  for (let at = start + 2; at < start + ESCAPE_BYTES; at++) {
    if (!isHexDigit(bytes[at])) throw new ScanError("malformed");
  }
  return start + ESCAPE_BYTES;
}

export function isHexDigit(byte: number | undefined): boolean {
  if (byte === undefined || isDigit(byte)) return byte !== undefined;
  const letter = byte | 0x20;
  return letter >= 0x61 && letter <= 0x66;
}

export const isDigit = (byte: number | undefined): boolean => byte !== undefined && byte >= ZERO && byte <= NINE;
