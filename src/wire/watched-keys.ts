// The keys that are looked for in a JSON object: what is found, and every way in which a key may be written.
import { ESCAPE_BYTES } from "./json-bytes.ts";

const QUOTE = 0x22;
const SLASH = 0x2f;
const BACKSLASH = 0x5c;
const LETTER_U = 0x75;
const ZERO = 0x30;
const NINE = 0x39;
/** Set in lower case letters alone. */
const LETTER_CASE = 0x20;

/** A key to look for, in ASCII, and the keys to look for inside its value when that is an object. */
export interface Watched {
  readonly key: string;
  readonly inside: readonly Watched[];
}

/** A span of bytes: from `start` up to, but not including, `end`. */
export interface ByteRange {
  readonly start: number;
  readonly end: number;
}

/** What was found of a watched key. */
export interface FoundKey {
  /** Its value, the last one where the key appears again; null when it is not there. */
  readonly value: ByteRange | null;
  /** The key appears more than once, in whatever letter case. */
  readonly isRepeated: boolean;
  /** The key appears in another letter case or with U+0000 behind it, which lenient decoders take for the same. */
  readonly isMiscased: boolean;
  readonly inside: readonly FoundKey[];
}

export function watch(key: string, ...inside: Watched[]): Watched {
  return { key, inside };
}

/** A finding while it is searched for. There is one for each watched key, however many members the object has. */
export interface Probe {
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

export function createProbe({ key, inside }: Watched): Probe {
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

export function toFinding({ inside, start, end, seen, isMiscased }: Probe): FoundKey {
  const value = end === -1 ? null : { start, end };
  return { value, isRepeated: seen > 1, isMiscased, inside: inside.map(toFinding) };
}

/** Of equal keys the last one counts, with only what is inside its own value. */
export function forget(probes: readonly Probe[]): void {
  for (const probe of probes) {
    probe.end = -1;
    probe.seen = 0;
    probe.isMiscased = false;
    forget(probe.inside);
  }
}

/** Length and first byte tell most keys apart, without a look at the rest. */
export function findProbe(bytes: Uint8Array, start: number, end: number, probes: readonly Probe[]): Probe | null {
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
export function spells(bytes: Uint8Array, start: number, end: number, key: string, isFolded: boolean): boolean {
  let at = start;
  for (let index = 0; index < key.length; index++) {
    if (at >= end) return false;
    const wanted = key.charCodeAt(index);
    // This is how keys are nearly always written.
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

/** The character at `at` inside a string, if it may stand in a watched key; else -1. */
function readUnit(bytes: Uint8Array, at: number): number {
  const byte = bytes[at] ?? 0;
  const second = bytes[at + 1] ?? 0;
  if (byte === BACKSLASH) return second === LETTER_U ? readHex(bytes, at + 2) : readSimpleEscape(second);
  if (byte < 0x80) return byte;
  if (byte < 0xe0) return ((byte & 0x1f) << 6) | (second & 0x3f);
  if (byte < 0xf0) return ((byte & 0x0f) << 12) | ((second & 0x3f) << 6) | ((bytes[at + 2] ?? 0) & 0x3f);
  return -1;
}

/** Escapes that name another character than themselves (`\n`) stand in no watched key. */
function readSimpleEscape(letter: number): number {
  return letter === SLASH || letter === QUOTE || letter === BACKSLASH ? letter : -1;
}

/** Four hexadecimal digits, which have been checked. */
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

/** In upper case: ASCII letters, and all that lenient decoders may take for one. */
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

export function note(probe: Probe, isExact: boolean, start: number, end: number): void {
  probe.seen++;
  if (isExact) {
    probe.start = start;
    probe.end = end;
  } else {
    probe.isMiscased = true;
  }
}
