// A streaming JSON parser: follows one JSON object while it arrives, in pieces of any length, and reports chosen members of its
// top level. It keeps only short texts that are asked for, so an object of any length takes the same memory. It accepts exactly
// the texts that `json-scan.ts` accepts.
import { MAX } from "../kernel/limits.ts";
import { isDigit, isHexDigit, SIMPLE_ESCAPES } from "./json-scan.ts";

/** A member of the followed object, or of an object inside it. */
export interface Member {
  /** The one or two keys that lead to the member, outermost first. */
  readonly path: readonly string[];
  /** The position of the value in the text: from its first byte up to the one behind it. */
  readonly start: number;
  readonly end: number;
  /** The value as it is written; null if it is too long. */
  readonly text: string | null;
}

/** Which members are reported; made once for many objects. */
export interface Followed {
  readonly top: FollowedKeys;
  /** One of the top-level keys. If its value is an object, members of that object are reported too. */
  readonly outerKey: string;
  readonly inner: FollowedKeys;
  /** Values longer than this are not kept. */
  readonly textBytesMax: number;
}

interface FollowedKeys {
  readonly keys: readonly string[];
  /** The length of the longest key with all its characters escaped, in quotes. */
  readonly bytesMax: number;
}

export interface MemberHandler {
  /** A member of the top level comes: reports from inside an earlier member with this key no longer count. */
  comes(key: string): void;
  /** The value of a top-level member begins. */
  begins(key: string, at: number): void;
  /** The value of a top-level member has ended, but the text after it may still be malformed. */
  ends(member: Member): void;
  /** A member is whole: a comma or a brace has followed its value. */
  whole(member: Member): void;
}

/** The states, in an order that `#byte` and `afterByte` rely on. */
const [START, VALUE, FIRST_ITEM, FIRST_KEY, KEY, COLON, NEXT, STRING] = [0, 1, 2, 3, 4, 5, 6, 7];
const [ESCAPE, HEX, WORD] = [8, 9, 10];
const [SIGNED, ZERO_READ, DIGITS, POINT, FRACTION, EXPONENT, EXPONENT_SIGNED, POWER] = [11, 12, 13, 14, 15, 16, 17, 18];
const OVER = 19;

const [SPACE, QUOTE, BACKSLASH] = [0x20, 0x22, 0x5c];
const ESCAPED_BYTES = 6;
const HEX_DIGITS = 4;

const NOTHING = new Uint8Array();
const encoder = new TextEncoder();
const decoder = new TextDecoder();
const codeOf = (character: string) => character.charCodeAt(0);
const WORDS = new Map(["true", "false", "null"].map((word) => [codeOf(word), encoder.encode(word)]));

const isSpace = (byte: number) => byte === SPACE || byte === 0x0a || byte === 0x0d || byte === 0x09;

/** The column of the table below for a byte: zero, another digit, a point, an exponent's letter, a sign, anything else. */
function kindOf(byte: number): number {
  if (isDigit(byte)) return byte === 0x30 ? 0 : 1;
  if (byte === 0x2e) return 2;
  if ((byte | 0x20) === 0x65) return 3;
  return byte === 0x2b || byte === 0x2d ? 4 : 5;
}

/** The number has ended before this byte. */
const ENDED = -1;

/** The state transitions of a number: a row for each state from SIGNED on, a column for each kind of byte. */
const NUMBER = [
  [ZERO_READ, DIGITS, OVER, OVER, OVER, OVER],
  [ENDED, ENDED, POINT, EXPONENT, ENDED, ENDED],
  [DIGITS, DIGITS, POINT, EXPONENT, ENDED, ENDED],
  [FRACTION, FRACTION, OVER, OVER, OVER, OVER],
  [FRACTION, FRACTION, ENDED, EXPONENT, ENDED, ENDED],
  [POWER, POWER, OVER, OVER, EXPONENT_SIGNED, OVER],
  [POWER, POWER, OVER, OVER, OVER, OVER],
  [POWER, POWER, ENDED, ENDED, ENDED, ENDED],
];

const afterByte = (state: number, byte: number): number => NUMBER[state - SIGNED]?.[kindOf(byte)] ?? OVER;

/** Keeps a part of the text while it arrives, up to a length. */
class Excerpt {
  #bytes = new Uint8Array();
  #size = 0;
  #max = 0;
  /** Where the excerpt continues in the current piece; -1 while nothing is kept. */
  #from = -1;

  begin(at: number, max: number): void {
    this.#size = 0;
    this.#max = max;
    this.#from = at;
  }

  /** Copies the part of a finished piece that belongs to the excerpt. */
  endPiece(piece: Uint8Array): void {
    if (this.#from < 0) return;
    this.#add(piece.subarray(this.#from));
    this.#from = 0;
  }

  /** The text of the excerpt; null if it is too long. */
  end(piece: Uint8Array, at: number): string | null {
    const last = piece.subarray(this.#from, at);
    this.#from = -1;
    if (this.#size + last.length > this.#max) return null;
    if (this.#size === 0) return decoder.decode(last);
    this.#add(last);
    return decoder.decode(this.#bytes.subarray(0, this.#size));
  }

  #add(part: Uint8Array): void {
    const size = this.#size + part.length;
    if (size <= this.#max) {
      if (size > this.#bytes.length) this.#bytes = new Uint8Array(this.#bytes.buffer.transfer(2 * size));
      this.#bytes.set(part, this.#size);
    }
    this.#size = size;
  }
}

/** The member that is being read at one of the two levels. */
interface FollowedLevel {
  readonly followed: FollowedKeys;
  key: string | null;
  member: Member | null;
  start: number;
}

const levelOf = (followed: FollowedKeys): FollowedLevel => ({ followed, key: null, member: null, start: 0 });

export function followedKeys(...keys: string[]): FollowedKeys {
  return { keys, bytesMax: 2 + ESCAPED_BYTES * Math.max(...keys.map(({ length }) => length)) };
}

export class JsonFollower {
  readonly #followed: Followed;
  readonly #handler: MemberHandler;
  readonly #top: FollowedLevel;
  readonly #inner: FollowedLevel;
  readonly #excerpt = new Excerpt();
  /** For each depth, whether an object or an array is open there. */
  readonly #isObject: boolean[] = [];
  /** How many objects and arrays are open. */
  #depth = 0;
  #state = START;
  #isKey = false;
  #isInside = false;
  #hexLeft = 0;
  #word: Uint8Array = NOTHING;
  #wordAt = 0;
  /** The current piece, and where it begins in the text. */
  #piece: Uint8Array = NOTHING;
  #offset = 0;

  constructor(followed: Followed, handler: MemberHandler) {
    this.#followed = followed;
    this.#handler = handler;
    this.#top = levelOf(followed.top);
    this.#inner = levelOf(followed.inner);
  }

  /** Whether the object has ended or is malformed: what follows is ignored. */
  get isOver(): boolean {
    return this.#state === OVER;
  }

  feed(piece: Uint8Array): void {
    this.#piece = piece;
    let at = 0;
    while (at < piece.length && this.#state !== OVER) {
      at = this.#state === STRING ? this.#string(at) : this.#byte(piece[at] ?? 0, at);
    }
    if (this.#state !== OVER) this.#excerpt.endPiece(piece);
    this.#offset += piece.length;
    this.#piece = NOTHING;
  }

  /** The level whose members are being read now; null if they are not reported. */
  #level(): FollowedLevel | null {
    if (this.#depth === 1) return this.#top;
    return this.#depth === 2 && this.#isInside ? this.#inner : null;
  }

  /** Reads a byte outside of strings. @returns the index of the next byte */
  #byte(byte: number, at: number): number {
    const state = this.#state;
    if (state >= SIGNED) return this.#number(byte, at);
    if (state > STRING) return this.#part(byte, at);
    if (isSpace(byte)) return at + 1;
    if (state === FIRST_KEY && byte === codeOf("}")) this.#close(at);
    else if (state === FIRST_ITEM && byte === codeOf("]")) this.#close(at);
    else if (state === COLON) this.#colon(byte);
    else if (state === NEXT) this.#next(byte, at);
    else if (state === KEY || state === FIRST_KEY) this.#key(byte, at);
    else if (state !== START) this.#value(byte, at);
    else if (byte === codeOf("{")) this.#open(true);
    else this.#state = OVER;
    return at + 1;
  }

  #key(byte: number, at: number): void {
    const level = this.#level();
    if (level !== null) this.#excerpt.begin(at, level.followed.bytesMax);
    this.#isKey = true;
    this.#state = byte === QUOTE ? STRING : OVER;
  }

  #keyEnds(end: number): void {
    this.#isKey = false;
    this.#state = COLON;
    const level = this.#level();
    if (level === null) return;
    const text = this.#excerpt.end(this.#piece, end);
    const key = text?.includes("\\") ? String(JSON.parse(text)) : text?.slice(1, -1);
    level.key = level.followed.keys.find((known) => known === key) ?? null;
  }

  #colon(byte: number): void {
    this.#state = byte === codeOf(":") ? VALUE : OVER;
    const { key } = this.#top;
    if (this.#state === VALUE && this.#depth === 1 && key !== null) this.#handler.comes(key);
  }

  #value(byte: number, at: number): void {
    const level = this.#level();
    if (level !== null && level.key !== null) this.#valueBegins(level, level.key, at);
    const word = WORDS.get(byte);
    if (byte === QUOTE) this.#state = STRING;
    else if (byte === codeOf("{")) this.#open(true);
    else if (byte === codeOf("[")) this.#open(false);
    else if (word !== undefined) {
      [this.#state, this.#word, this.#wordAt] = [WORD, word, 1];
    } else if (byte === 0x2d) this.#state = SIGNED;
    else this.#state = afterByte(SIGNED, byte);
  }

  #valueBegins(level: FollowedLevel, key: string, at: number): void {
    level.start = this.#offset + at;
    level.member = null;
    if (level === this.#top) this.#handler.begins(key, level.start);
    // Of the outer value only the members are wanted, not its text.
    const isOuter = level === this.#top && key === this.#followed.outerKey;
    if (!isOuter) this.#excerpt.begin(at, this.#followed.textBytesMax);
  }

  #valueEnds(end: number): void {
    this.#state = NEXT;
    const level = this.#level();
    if (level === null || level.key === null) return;
    const isInner = level === this.#inner;
    const isOuter = !isInner && level.key === this.#followed.outerKey;
    level.member = {
      path: isInner ? [this.#followed.outerKey, level.key] : [level.key],
      start: level.start,
      end: this.#offset + end,
      text: isOuter ? null : this.#excerpt.end(this.#piece, end),
    };
    if (!isInner) this.#handler.ends(level.member);
  }

  /** Reads the byte after a value: a comma, or the end of the object or array. */
  #next(byte: number, at: number): void {
    const isObject = this.#isObject[this.#depth - 1] === true;
    const isComma = byte === codeOf(",");
    if (!isComma && byte !== codeOf(isObject ? "}" : "]")) {
      this.#state = OVER;
      return;
    }
    const level = this.#level();
    if (level !== null && level.member !== null) {
      this.#handler.whole(level.member);
      level.member = null;
    }
    if (!isComma) this.#close(at);
    else this.#state = isObject ? KEY : VALUE;
  }

  #open(isObject: boolean): void {
    if (this.#depth >= MAX.jsonDepth) {
      this.#state = OVER;
      return;
    }
    if (this.#depth === 1) this.#isInside = isObject && this.#top.key === this.#followed.outerKey;
    this.#isObject[this.#depth++] = isObject;
    const level = this.#level();
    if (level !== null) [level.key, level.member] = [null, null];
    this.#state = isObject ? FIRST_KEY : FIRST_ITEM;
  }

  #close(at: number): void {
    this.#depth--;
    if (this.#depth === 0) this.#state = OVER;
    else this.#valueEnds(at + 1);
  }

  /** Reads on in a string, up to a quote, a backslash or a control character. */
  #string(from: number): number {
    const piece = this.#piece;
    let at = from;
    for (; at < piece.length; at++) {
      const byte = piece[at] ?? 0;
      if (byte < SPACE || byte === QUOTE || byte === BACKSLASH) break;
    }
    if (at === piece.length) return at;
    const byte = piece[at];
    if (byte === BACKSLASH) this.#state = ESCAPE;
    else if (byte !== QUOTE) this.#state = OVER;
    else if (this.#isKey) this.#keyEnds(at + 1);
    else this.#valueEnds(at + 1);
    return at + 1;
  }

  /** Reads on in an escape or a word. */
  #part(byte: number, at: number): number {
    if (this.#state === WORD) {
      if (byte !== this.#word[this.#wordAt++]) this.#state = OVER;
      else if (this.#wordAt === this.#word.length) this.#valueEnds(at + 1);
    } else if (this.#state === HEX) {
      if (!isHexDigit(byte)) this.#state = OVER;
      else if (--this.#hexLeft === 0) this.#state = STRING;
    } else if (byte === codeOf("u")) {
      [this.#state, this.#hexLeft] = [HEX, HEX_DIGITS];
    } else this.#state = SIMPLE_ESCAPES.has(byte) ? STRING : OVER;
    return at + 1;
  }

  #number(byte: number, at: number): number {
    const state = afterByte(this.#state, byte);
    if (state === ENDED) {
      this.#valueEnds(at);
      return at;
    }
    this.#state = state;
    return at + 1;
  }
}
