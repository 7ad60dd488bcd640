// `tools/list` answers without the tools that the policy denies, in a JSON body or in an event stream. An event is
// held until it is whole and then passes as it came, unless a tool must be taken out of it. What can't be read, or is
// too long to be held, does not pass. All that takes longer for a longer answer is done in steps.

import type { Chunks } from "../../http/client/body.ts";
import { createPace, inOneStep, inTurnSteps, type Pace, type Steps } from "../../kernel/turns.ts";
import { skipSpaceInSteps } from "../../wire/json-scan.ts";
import { type DeniedTools, UnreadableAnswer, withoutTools } from "../../wire/tool-list.ts";
import type { TenantBudget } from "./response-recorder.ts";

type IsDenied = DeniedTools;

export interface FilterOptions {
  readonly isDenied: IsDenied;
  /** Of one body or event. */
  readonly bytesMax: number;
  /** What all bodies and events of a tenant that are held may take together. */
  readonly memory: TenantBudget;
  /** The tenant in whose turns the work is done. */
  readonly tenant: string;
  /** Ends the work with the exchange. */
  readonly signal: AbortSignal;
}

type HoldOptions = Omit<FilterOptions, "isDenied">;

/** Work on what passes, all of it in turns: many streams may bring something at once. It ends with the exchange. */
function worked<T>(steps: Steps<T>, { tenant, signal }: HoldOptions): Promise<T> {
  return inTurnSteps(steps, tenant, signal);
}

const OPEN_BRACKET = 0x5b;
const HELD_BYTES_FIRST = 4096;
/** Largest piece that goes to the caller at once, since each piece is hashed on its way. */
const PIECE_BYTES = 128 * 1024;
/** Of an event, beside its bytes: of one that may list tools, and of another. */
const LIST_WORK = 4_000;
const EVENT_WORK = 50;
const FIND_BYTES = 16_384;
/** What it takes to find the end of an event, for each byte. */
const FIND_WORK = 4;
const COPY_BYTES = 262_144;

/** @throws UnreadableAnswer when the tenant may not have all of it */
function reserve(memory: TenantBudget, bytes: number): void {
  const taken = memory.take(bytes);
  if (taken === bytes) return;
  memory.giveBack(taken);
  throw new UnreadableAnswer("too much is being filtered");
}

/** Bytes that are held, within the bounds of the options. */
function createHeld(options: HoldOptions) {
  const { bytesMax, memory } = options;
  let bytes = new Uint8Array();
  let size = 0;

  async function grow(room: number): Promise<void> {
    reserve(memory, room);
    // Memory that is not zeroed costs nothing until it is written to.
    const larger = Buffer.allocUnsafeSlow(room);
    const [smaller, held] = [bytes, size];
    bytes = larger;
    try {
      await worked(copied(smaller.subarray(0, held), larger), options);
    } finally {
      memory.giveBack(smaller.length);
    }
  }

  return {
    all: () => bytes.subarray(0, size),
    async add(chunk: Uint8Array): Promise<void> {
      const wanted = size + chunk.length;
      if (wanted > bytesMax) throw new UnreadableAnswer("too long to be filtered");
      if (wanted > bytes.length) {
        await grow(Math.min(bytesMax, Math.max(wanted, 2 * bytes.length, HELD_BYTES_FIRST)));
      }
      bytes.set(chunk, size);
      size = wanted;
    },
    clear(): void {
      memory.giveBack(bytes.length);
      bytes = new Uint8Array();
      size = 0;
    },
  };
}

function* copied(from: Uint8Array, to: Uint8Array): Steps<void> {
  for (let at = 0; at < from.length; at += COPY_BYTES) {
    to.set(from.subarray(at, at + COPY_BYTES), at);
    if (at + COPY_BYTES < from.length) yield;
  }
}

/** Splits a long piece into smaller ones for the caller. */
async function* inPieces(chunks: Chunks, { tenant }: HoldOptions): Chunks {
  for await (const chunk of chunks) {
    for (let at = 0; at < chunk.length; at += PIECE_BYTES) {
      const piece = chunk.subarray(at, at + PIECE_BYTES);
      yield at === 0 ? piece : await inOneStep(() => piece, tenant);
    }
  }
}

/** A body that is one JSON text. */
export function filterJson({ isDenied, ...options }: FilterOptions): (chunks: Chunks) => Chunks {
  async function* filtered(chunks: Chunks): Chunks {
    const held = createHeld(options);
    try {
      for await (const chunk of chunks) await held.add(chunk);
      const text = held.all();
      const rest = afterBom(text);
      const left = await worked(withoutTools(rest, isDenied), options);
      yield left === rest ? text : left;
    } finally {
      held.clear();
    }
  }
  return (chunks) => inPieces(filtered(chunks), options);
}

export interface EventFilterOptions extends HoldOptions {
  /** Null to pass every event, but whole. */
  readonly isDenied: IsDenied | null;
}

/** A body that is an event stream (WHATWG HTML, section 9.2). */
export function filterEvents({ isDenied, ...options }: EventFilterOptions): (chunks: Chunks) => Chunks {
  return (chunks) => {
    if (isDenied === null) return inPieces(wholeEvents(chunks, options), options);
    const whole = wholeEvents(withLineFeeds(chunks, options), options);
    return inPieces(rewrittenEvents(whole, isDenied, options), options);
  };
}

/**
 * Each line ended by a line feed. Some clients take a carriage return for an end of a line, as the standard says, and
 * some do not: what is judged must be what all of them read.
 */
async function* withLineFeeds(chunks: Chunks, options: HoldOptions): Chunks {
  let wasReturn = false;
  for await (const chunk of chunks) {
    if (chunk.length === 0) continue;
    const isPlain = !wasReturn && !chunk.includes(RETURN);
    const bytes = isPlain ? chunk : await worked(lineFeedsOf(chunk, wasReturn), options);
    wasReturn = chunk.at(-1) === RETURN;
    if (bytes.length > 0) yield bytes;
  }
}

/** @param wasReturn whether a carriage return came right before */
function* lineFeedsOf(chunk: Uint8Array, wasReturn: boolean): Steps<Uint8Array> {
  const pace = createPace();
  const bytes = Buffer.allocUnsafeSlow(chunk.length);
  let size = 0;
  for (let at = wasReturn && chunk[0] === LINE_FEED ? 1 : 0; at < chunk.length; ) {
    const found = chunk.indexOf(RETURN, at);
    const end = found === -1 ? chunk.length : found;
    bytes.set(chunk.subarray(at, end), size);
    size += end - at;
    if (found !== -1) bytes[size++] = LINE_FEED;
    if (pace(EVENT_WORK + (end - at))) yield;
    at = chunk[end + 1] === LINE_FEED ? end + 2 : end + 1;
  }
  return bytes.subarray(0, size);
}

/** Events that came together go on together, since each piece has a cost of its own. */
async function* wholeEvents(chunks: Chunks, options: HoldOptions): Chunks {
  const held = createHeld(options);
  const find = createEventFinder();
  try {
    for await (const chunk of chunks) {
      const { first, last } = await worked(eventEnds(chunk, find), options);
      if (first !== -1) {
        await held.add(chunk.subarray(0, first));
        yield held.all();
        held.clear();
      }
      if (last > first) yield chunk.subarray(first, last);
      await held.add(chunk.subarray(Math.max(last, 0)));
    }
    // Some clients take an event that its stream ends without a blank line.
    if (held.all().length > 0) yield held.all();
  } finally {
    held.clear();
  }
}

/** The ends of the first and the last event that end within the chunk; -1 when none does. */
function* eventEnds(chunk: Uint8Array, find: EventFinder): Steps<{ first: number; last: number }> {
  const pace = createPace();
  let [first, last] = [-1, -1];
  for (let at = 0; at < chunk.length; ) {
    const until = at + FIND_BYTES;
    const end = find(chunk, at, until);
    if (first === -1) first = end;
    if (end !== -1) last = end;
    const next = end === -1 ? until : end;
    if (pace(EVENT_WORK + FIND_WORK * (next - at))) yield;
    at = next;
  }
  return { first, last };
}

async function* rewrittenEvents(pieces: Chunks, isDenied: IsDenied, options: HoldOptions): Chunks {
  const { memory } = options;
  let isFirst = true;
  for await (const events of pieces) {
    // Without a `[` there is no list, so no tool can be in it.
    if (!events.includes(OPEN_BRACKET)) {
      isFirst = false;
      yield events;
      continue;
    }
    let reserved = 0;
    const eventOptions: EventOptions = {
      isDenied,
      isFirst,
      reserve(bytes) {
        reserve(memory, bytes);
        reserved += bytes;
      },
    };
    try {
      yield await worked(rewrittenAll(events, eventOptions), options);
    } finally {
      isFirst = false;
      memory.giveBack(reserved);
    }
  }
}

/** Whole events as they may pass. */
function* rewrittenAll(events: Uint8Array, options: EventOptions): Steps<Uint8Array> {
  const find = createEventFinder();
  const pace = createPace();
  const passed: Uint8Array[] = [];
  let [at, kept] = [0, 0];
  let list = events.indexOf(OPEN_BRACKET);
  while (list !== -1) {
    const end = yield* eventEnd(events, at, find, pace);
    if (list < end) {
      const event = events.subarray(at, end);
      const left = yield* rewritten(event, { ...options, isFirst: options.isFirst && at === 0 }, pace);
      if (left !== event) {
        passed.push(events.subarray(kept, at), left);
        kept = end;
      }
      list = events.indexOf(OPEN_BRACKET, end);
      if (pace(LIST_WORK)) yield;
    } else if (pace(EVENT_WORK)) yield;
    at = end;
  }
  passed.push(events.subarray(kept));
  const parts = passed.filter((part) => part.length > 0);
  // A long event stands alone: those that come with others came in one chunk.
  return parts.length === 1 ? (parts[0] ?? events) : Buffer.concat(parts);
}

function* eventEnd(events: Uint8Array, start: number, find: EventFinder, pace: Pace): Steps<number> {
  for (let at = start; at < events.length; at += FIND_BYTES) {
    const end = find(events, at, at + FIND_BYTES);
    const found = end === -1 ? Math.min(at + FIND_BYTES, events.length) : end;
    if (pace(FIND_WORK * (found - at))) yield;
    if (end !== -1) return end;
  }
  return events.length;
}

// An event of an event stream (WHATWG HTML, section 9.2) without the tools that are denied, on the bytes themselves and
// in steps: it may be long, or have millions of lines.

export interface EventOptions {
  readonly isDenied: (tool: string) => boolean;
  /** Called before so many more bytes are held. @throws UnreadableAnswer */
  readonly reserve: (bytes: number) => void;
  /** Only the first event of a stream may open with a byte order mark. */
  readonly isFirst: boolean;
}

const LINE_FEED = 0x0a;
const RETURN = 0x0d;
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
const OPEN_BRACE = 0x7b;

/** What a line costs beside its bytes, and how many bytes cost as much as one that is looked at. */
const LINE_WORK = 100;
const COPIED_BYTES = 8;

function afterBom(bytes: Uint8Array): Uint8Array {
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
type EventFinder = (chunk: Uint8Array, from: number, until?: number) => number;

/**
 * Finds where events end: after the empty line behind them. A carriage return at the end of a chunk ends its line at
 * once. If it ended an event, a line feed that follows counts as an event of its own, an empty one, which is harmless.
 */
function createEventFinder(): EventFinder {
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
