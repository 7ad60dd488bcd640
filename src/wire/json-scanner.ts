// Reads a JSON object or array from its bytes, without building anything, and notes where the values of watched keys
// stand. It works in steps, each of which may end anywhere, even in the middle of a string, so no text takes long in one
// piece. In one file, since its states share one place in the text.

import { JSON_DEPTH_MAX } from "../core/limits.ts";
import { isDigit, ScanError, scanEscape, scanWord, spaceEnd } from "./json-bytes.ts";
import {
  type ByteRange,
  createProbe,
  type FoundKey,
  findProbe,
  forget,
  note,
  type Probe,
  spells,
  toFinding,
  type Watched,
} from "./watched-keys.ts";

const SPACE = 0x20;
const QUOTE = 0x22;
const COMMA = 0x2c;
const COLON = 0x3a;
const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
const CLOSE_BRACKET = 0x5d;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;

const PLUS = 0x2b;
const MINUS = 0x2d;
const POINT = 0x2e;
const ZERO = 0x30;
const LARGE_E = 0x45;
const SMALL_E = 0x65;
const LETTER_F = 0x66;
const LETTER_N = 0x6e;
const LETTER_T = 0x74;

const encoder = new TextEncoder();
const TRUE = encoder.encode("true");
const FALSE = encoder.encode("false");
const NULL = encoder.encode("null");
const NOTHING: readonly Probe[] = [];

export interface ScannedItem extends ByteRange {
  /** Of the watched keys, where the item is an object. */
  readonly findings: readonly FoundKey[];
}

/** The items of the outermost array. */
export interface Listed {
  readonly items: ScannedItem[];
  readonly most: number;
  readonly watched: readonly Watched[];
}

/** A member whose key is watched, or a listed item, while its value is read. */
interface Noted {
  /** Null for an item. */
  readonly probe: Probe | null;
  /** What is looked for inside the value, if it is an object. */
  readonly inside: readonly Probe[];
  readonly isExact: boolean;
  start: number;
  /** -1 until it is known. */
  end: number;
}

/** Returned instead of an index: the step has ended before the value did. */
export const LEFT = -1;

/** What may come next in an object or array: a first key or item or the end, a key or item, and so on. */
const FIRST = 0;
const NEXT = 1;
const COLON_NEXT = 2;
const VALUE_NEXT = 3;
const AFTER_VALUE = 4;
type ScanState = 0 | 1 | 2 | 3 | 4;

/** The parts of a number that have digits. */
const WHOLE = 0;
const FRACTION = 1;
const EXPONENT = 2;

/** Most texts have little white space. */
function skip(bytes: Uint8Array, at: number, until: number): number {
  const byte = bytes[at];
  return byte !== undefined && byte <= SPACE ? spaceEnd(bytes, at, until) : at;
}

/** The index after the byte that has to be at `at`. */
function pass(bytes: Uint8Array, at: number, byte: number): number {
  if (bytes[at] !== byte) throw new ScanError("malformed");
  return at + 1;
}

/**
 * Whether the byte ends the object or array. A number at the very end of a cut-off text may itself be cut, so a member
 * counts once the byte after it is seen.
 */
function closes(byte: number | undefined, end: number, place: ScanState, member: Noted | null): boolean {
  if (byte !== end || (place !== FIRST && place !== AFTER_VALUE)) return false;
  noteMember(member);
  return true;
}

/**
 * Values are read by recursion, which is fastest. When a step ends, the innermost function leaves a closure that goes on
 * later, and then each one around it leaves one too, which goes on where the inner one has ended.
 */
export class Scan {
  readonly #bytes: Uint8Array;
  readonly #listed: Listed | null;
  readonly #stepBytes: number;
  /** The innermost first. */
  #left: ((end: number) => number)[];
  #from: number;
  /** Where this step ends; the last step ends with the text. */
  #until = 0;

  /** @param listed null for an object */
  constructor(
    bytes: Uint8Array,
    start: number,
    stepBytes: number,
    { probes = NOTHING, listed = null }: { probes?: readonly Probe[]; listed?: Listed | null },
  ) {
    this.#bytes = bytes;
    this.#from = start;
    this.#stepBytes = stepBytes;
    this.#listed = listed;
    this.#left = [() => (listed === null ? this.#object(start, 0, probes) : this.#array(start, 0))];
  }

  /** The index after the value, or LEFT. @throws ScanError */
  step(): number {
    const left = this.#left;
    this.#left = [];
    this.#from += this.#stepBytes;
    this.#until = Math.min(this.#from, this.#bytes.length + 1);
    let end = LEFT;
    for (const [index, goOn] of left.entries()) {
      end = goOn(end);
      if (end !== LEFT) continue;
      this.#left.push(...left.slice(index + 1));
      break;
    }
    return end;
  }

  #leave(goOn: (end: number) => number): number {
    this.#left.push(goOn);
    return LEFT;
  }

  #object(start: number, depth: number, probes: readonly Probe[]): number {
    if (depth >= JSON_DEPTH_MAX) throw new ScanError("too deep");
    return this.#members(start + 1, depth, probes, FIRST, null);
  }

  #members(from: number, depth: number, probes: readonly Probe[], first: ScanState, given: Noted | null): number {
    const bytes = this.#bytes;
    let at = from;
    let place = first;
    let member = given;
    for (;;) {
      at = skip(bytes, at, this.#until);
      if (at >= this.#until) return this.#leaveMembers(at, depth, probes, place, member);
      if (closes(bytes[at], CLOSE_BRACE, place, member)) return at + 1;
      switch (place) {
        case AFTER_VALUE:
          at = pass(bytes, at, COMMA);
          noteMember(member);
          place = NEXT;
          break;
        case COLON_NEXT:
          at = pass(bytes, at, COLON);
          place = VALUE_NEXT;
          break;
        case VALUE_NEXT:
          at = this.#noted(at, depth, member);
          place = AFTER_VALUE;
          if (at === LEFT) return this.#leaveMembers(LEFT, depth, probes, place, member);
          break;
        default: {
          const end = this.#string(pass(bytes, at, QUOTE));
          if (end === LEFT) return this.#leaveKey(at, depth, probes);
          member = memberOf(bytes, at + 1, end - 1, probes);
          at = end;
          place = COLON_NEXT;
        }
      }
    }
  }

  /** A value, whose place is noted if it is watched. */
  #noted(start: number, depth: number, noted: Noted | null): number {
    if (noted === null) return this.#value(start, depth + 1, NOTHING);
    noted.start = start;
    forget(noted.inside);
    noted.end = this.#value(start, depth + 1, noted.inside);
    return noted.end;
  }

  /** @param at LEFT: at the end of the value of `member` */
  #leaveMembers(at: number, depth: number, probes: readonly Probe[], place: ScanState, member: Noted | null): number {
    return this.#leave((end) => {
      if (at === LEFT && member !== null) member.end = end;
      return this.#members(at === LEFT ? end : at, depth, probes, place, member);
    });
  }

  #leaveKey(start: number, depth: number, probes: readonly Probe[]): number {
    return this.#leave((end) => {
      const member = memberOf(this.#bytes, start + 1, end - 1, probes);
      return this.#members(end, depth, probes, COLON_NEXT, member);
    });
  }

  #array(start: number, depth: number): number {
    if (depth >= JSON_DEPTH_MAX) throw new ScanError("too deep");
    return this.#items(start + 1, depth, FIRST, null);
  }

  #items(from: number, depth: number, first: ScanState, given: Noted | null): number {
    const bytes = this.#bytes;
    const listed = depth === 0 ? this.#listed : null;
    let at = from;
    let place = first;
    let item = given;
    for (;;) {
      at = skip(bytes, at, this.#until);
      if (at >= this.#until) return this.#leaveItems(at, depth, place, item);
      if (closes(bytes[at], CLOSE_BRACKET, place, null)) return at + 1;
      if (place === AFTER_VALUE) {
        at = pass(bytes, at, COMMA);
        place = NEXT;
      } else {
        item = startItem(listed);
        at = this.#noted(at, depth, item);
        place = AFTER_VALUE;
        if (at === LEFT) return this.#leaveItems(LEFT, depth, place, item);
        this.#endItem(item, at);
      }
    }
  }

  #leaveItems(at: number, depth: number, place: ScanState, item: Noted | null): number {
    return this.#leave((end) => {
      if (at === LEFT) this.#endItem(item, end);
      return this.#items(at === LEFT ? end : at, depth, place, item);
    });
  }

  #endItem(item: Noted | null, end: number): void {
    if (item === null || this.#listed === null) return;
    this.#listed.items.push({ start: item.start, end, findings: item.inside.map(toFinding) });
  }

  #value(start: number, depth: number, probes: readonly Probe[]): number {
    switch (this.#bytes[start]) {
      case QUOTE:
        return this.#string(start + 1);
      case OPEN_BRACE:
        return this.#object(start, depth, probes);
      case OPEN_BRACKET:
        return this.#array(start, depth);
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

  /** @param from inside the string */
  #string(from: number): number {
    const bytes = this.#bytes;
    const until = this.#until;
    let at = from;
    while (at < until) {
      const byte = bytes[at];
      if (byte === QUOTE) return at + 1;
      if (byte === undefined || byte < SPACE) throw new ScanError("malformed");
      at = byte === BACKSLASH ? scanEscape(bytes, at) : at + 1;
    }
    return this.#leaveString(at);
  }

  #leaveString(at: number): number {
    return this.#leave(() => this.#string(at));
  }

  #number(start: number): number {
    const bytes = this.#bytes;
    const whole = bytes[start] === MINUS ? start + 1 : start;
    const first = bytes[whole];
    const second = bytes[whole + 1];
    // Most numbers have one digit.
    if ((second === COMMA || second === CLOSE_BRACE || second === CLOSE_BRACKET) && isDigit(first)) return whole + 1;
    return first === ZERO ? this.#afterDigits(whole + 1, WHOLE) : this.#digits(whole, WHOLE);
  }

  /** At least one digit. */
  #digits(start: number, part: number): number {
    if (!isDigit(this.#bytes[start])) throw new ScanError("malformed");
    return this.#moreDigits(start + 1, part);
  }

  #moreDigits(from: number, part: number): number {
    const bytes = this.#bytes;
    const until = this.#until;
    let at = from;
    while (at < until && isDigit(bytes[at])) at++;
    return at < until ? this.#afterDigits(at, part) : this.#leaveDigits(at, part);
  }

  #leaveDigits(at: number, part: number): number {
    return this.#leave(() => this.#moreDigits(at, part));
  }

  #afterDigits(at: number, part: number): number {
    const byte = this.#bytes[at];
    if (byte === POINT && part === WHOLE) return this.#digits(at + 1, FRACTION);
    if ((byte !== SMALL_E && byte !== LARGE_E) || part === EXPONENT) return at;
    const sign = this.#bytes[at + 1];
    return this.#digits(sign === PLUS || sign === MINUS ? at + 2 : at + 1, EXPONENT);
  }
}

/** Null when the key is not watched. */
function memberOf(bytes: Uint8Array, start: number, end: number, probes: readonly Probe[]): Noted | null {
  if (probes.length === 0) return null;
  const probe = findProbe(bytes, start, end, probes);
  if (probe === null) return null;
  const isExact = spells(bytes, start, end, probe.key, false);
  return { probe, inside: isExact ? probe.inside : NOTHING, isExact, start: -1, end: -1 };
}

function noteMember(member: Noted | null): void {
  if (member?.probe != null) note(member.probe, member.isExact, member.start, member.end);
}

function startItem(listed: Listed | null): Noted | null {
  if (listed === null) return null;
  const { items, most, watched } = listed;
  if (items.length === most) throw new ScanError("too many");
  return { probe: null, inside: watched.map(createProbe), isExact: false, start: -1, end: -1 };
}
