// `tools/list` answers without the tools that the policy denies, in a JSON body or in an event stream. An event is
// held until it is whole and then passes as it came, unless a tool must be taken out of it. What can't be read, or is
// too long to be held, does not pass. All that takes longer for a longer answer is done in steps.

import type { Chunks } from "../../http/client/decode.ts";
import { createPace, inOneStep, inTurnSteps, type Pace, type Steps } from "../../kernel/turns.ts";
import { type DeniedTools, UnreadableAnswer, withoutTools } from "../../wire/tool-list.ts";
import {
  afterBom,
  createEventFinder,
  type EventFinder,
  type EventOptions,
  LINE_FEED,
  RETURN,
  rewritten,
} from "./event-filter.ts";
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
