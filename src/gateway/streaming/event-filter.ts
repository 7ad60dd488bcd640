// An event of an event stream (WHATWG HTML, section 9.2) without the tools that are denied, on the bytes themselves and
// in steps: it may be long, or have millions of lines.
import type { Pace, Steps } from "../../kernel/turns.ts";
import { skipSpaceInSteps } from "../../wire/json-scan.ts";
import { UnreadableAnswer, withoutTools } from "../../wire/tool-list.ts";

export interface EventOptions {
  readonly isDenied: (tool: string) => boolean;
  /** Called before so many more bytes are held. @throws UnreadableAnswer */
  readonly reserve: (bytes: number) => void;
  /** Only the first event of a stream may open with a byte order mark. */
  readonly isFirst: boolean;
}

export const LINE_FEED = 0x0a;
export const RETURN = 0x0d;
const [SPACE, COLON] = [0x20, 0x3a];
const BOM = [0xef, 0xbb, 0xbf];
const DATA = Buffer.from("data");
const DATA_FIELD = Buffer.from("data: ");

/**
 * Not ends of lines by the standard, but for clients that split text as Python's `splitlines` does: VT, FF, FS, GS, RS,
 * NEL, LS and PS. And a byte order mark, which some clients take away elsewhere than at the start of the stream.
 */
const AMBIGUOUS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\ufeff"].map((text) =>
  Buffer.from(text),
);
/** So many bytes are searched for what it takes to look at one. */
const SEARCHED_BYTES = 16;
const [OPEN_BRACE, OPEN_BRACKET] = [0x7b, 0x5b];

/** What a line costs beside its bytes, and how many bytes cost as much as one that is looked at. */
const LINE_WORK = 100;
const COPIED_BYTES = 8;

export function afterBom(bytes: Uint8Array): Uint8Array {
  return BOM.every((byte, index) => bytes[index] === byte) ? bytes.subarray(BOM.length) : bytes;
}

/**
 * The event as it may pass: the same array when nothing is taken out of it, else one whose data may stand where the
 * event's stood.
 *
 * @param pace of all the events that are worked on together
 */
export function* rewritten(event: Uint8Array, options: EventOptions, pace: Pace): Steps<Uint8Array> {
  const bytes = options.isFirst ? afterBom(event) : event;
  const data = yield* dataOf(bytes, options, pace);
  if (yield* isAmbiguous(bytes, pace)) yield* refuseHidden(bytes, data, pace);
  if (data === null) return event;
  const left = yield* withoutTools(data, options.isDenied, { pace });
  return left === data ? event : yield* withData(bytes, left, options, pace);
}

function* isAmbiguous(bytes: Uint8Array, pace: Pace): Steps<boolean> {
  const searched = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length);
  for (const found of AMBIGUOUS) {
    if (searched.indexOf(found) !== -1) return true;
    if (pace(bytes.length / SEARCHED_BYTES)) yield;
  }
  return false;
}

/**
 * A client that splits lines at other characters reads other lines, and may take for data what the standard does not.
 * Inside a string of a JSON text that is harmless: what such a client reads there is not JSON.
 *
 * @throws UnreadableAnswer
 */
function* refuseHidden(bytes: Uint8Array, data: Uint8Array | null, pace: Pace): Steps<void> {
  const refuse = () => new UnreadableAnswer("lines that clients do not agree about");
  const first = data === null ? undefined : data[yield* skipSpaceInSteps(data, 0)];
  if (first !== OPEN_BRACE && first !== OPEN_BRACKET) throw refuse();
  let others = false;
  yield* eachLine(bytes, pace, (lines) => {
    if (!lines.isOther()) return;
    const line = Buffer.from(bytes.buffer, bytes.byteOffset + lines.start, lines.length);
    others ||= AMBIGUOUS.some((found) => line.includes(found));
  });
  if (others) throw refuse();
}

/** The lines of a text, one after the other, with an empty one after the last line end. */
class Lines {
  /** Of the line that was found last, without what ends it. */
  start = 0;
  end = 0;
  readonly #bytes: Buffer;
  #at = 0;
  #feed = -1;
  #return = -1;

  constructor(bytes: Uint8Array) {
    this.#bytes = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length);
  }

  next(): boolean {
    const bytes = this.#bytes;
    if (this.#at > bytes.length) return false;
    this.start = this.#at;
    // Of the two it is the nearer one; the other is not looked for again before it is passed.
    if (this.#feed < this.start) this.#feed = placeOf(bytes, LINE_FEED, this.start);
    if (this.#return < this.start) this.#return = placeOf(bytes, RETURN, this.start);
    this.end = Math.min(this.#feed, this.#return);
    // Of a pair both end a line: the second one an empty line, which means nothing inside an event.
    this.#at = this.end + 1;
    return true;
  }

  get length(): number {
    return this.end - this.start;
  }

  /** Where the value of a `data` line starts; -1 for another line. */
  dataStart(): number {
    const bytes = this.#bytes;
    for (let at = 0; at < DATA.length; at++) if (bytes[this.start + at] !== DATA[at]) return -1;
    const after = this.start + DATA.length;
    if (after === this.end) return after;
    if (bytes[after] !== COLON) return -1;
    return after + 1 < this.end && bytes[after + 1] === SPACE ? after + 2 : after + 1;
  }

  isOther(): boolean {
    return this.length > 0 && this.dataStart() === -1;
  }
}

function* eachLine(bytes: Uint8Array, pace: Pace, visit: (lines: Lines) => void): Steps<void> {
  for (const lines = new Lines(bytes); lines.next(); ) {
    visit(lines);
    if (pace(LINE_WORK + lines.length / COPIED_BYTES)) yield;
  }
}

function placeOf(bytes: Buffer, byte: number, from: number): number {
  const place = bytes.indexOf(byte, from);
  return place === -1 ? bytes.length : place;
}

/** Null when there is none. The data of one line stays where it stands. */
function* dataOf(bytes: Uint8Array, { reserve }: EventOptions, pace: Pace): Steps<Uint8Array | null> {
  let [count, size] = [0, 0];
  let last: Uint8Array | null = null;
  yield* eachLine(bytes, pace, (lines) => {
    const start = lines.dataStart();
    if (start === -1) return;
    last = bytes.subarray(start, lines.end);
    size += last.length + 1;
    count++;
  });
  if (count <= 1) return last;
  const data = createWriter(size, reserve);
  yield* eachLine(bytes, pace, (lines) => {
    const start = lines.dataStart();
    if (start !== -1) data.addLine(bytes.subarray(start, lines.end));
  });
  return data.bytes.subarray(0, size - 1);
}

/** The event with other data, after its other fields. */
function* withData(bytes: Uint8Array, data: Uint8Array, { reserve }: EventOptions, pace: Pace): Steps<Uint8Array> {
  let size = 1;
  yield* eachLine(bytes, pace, (lines) => {
    if (lines.isOther()) size += lines.length + 1;
  });
  yield* eachLine(data, pace, (lines) => {
    size += DATA_FIELD.length + lines.length + 1;
  });
  const event = createWriter(size, reserve);
  yield* eachLine(bytes, pace, (lines) => {
    if (lines.isOther()) event.addLine(bytes.subarray(lines.start, lines.end));
  });
  yield* eachLine(data, pace, (lines) => {
    event.add(DATA_FIELD);
    event.addLine(data.subarray(lines.start, lines.end));
  });
  event.addLine(new Uint8Array());
  return event.bytes;
}

function createWriter(size: number, reserve: EventOptions["reserve"]) {
  reserve(size);
  // Memory that is not zeroed costs nothing until it is written to.
  const bytes = Buffer.allocUnsafeSlow(size);
  let at = 0;
  const add = (part: Uint8Array) => {
    bytes.set(part, at);
    at += part.length;
  };
  return {
    bytes,
    add,
    addLine(line: Uint8Array): void {
      add(line);
      bytes[at++] = LINE_FEED;
    },
  };
}

/** The index after the first event that ends at or after `from`, and before `until`; -1 when none does. */
export type EventFinder = (chunk: Uint8Array, from: number, until?: number) => number;

/**
 * Finds where events end: after the empty line behind them. A carriage return at the end of a chunk ends its line at
 * once. If it ended an event, a line feed that follows counts as an event of its own, an empty one, which is harmless.
 */
export function createEventFinder(): EventFinder {
  let isLineEmpty = true;
  /** What the last byte ended, when it was a carriage return. */
  let returned: "line" | "event" | null = null;

  function ends(byte: number | undefined): boolean {
    const before = returned;
    returned = null;
    if (byte === LINE_FEED && before !== null) return before === "event";
    const isEnd = byte === LINE_FEED || byte === RETURN;
    const isEvent = isEnd && isLineEmpty;
    isLineEmpty = isEnd;
    if (byte === RETURN) returned = isEvent ? "event" : "line";
    return isEvent;
  }

  return (chunk, from, until = chunk.length) => {
    const last = Math.min(until, chunk.length);
    for (let at = from; at < last; at++) {
      if (!ends(chunk[at])) continue;
      const hasFeed = returned === "event" && chunk[at + 1] === LINE_FEED;
      if (hasFeed) returned = null;
      return hasFeed ? at + 2 : at + 1;
    }
    return -1;
  };
}
