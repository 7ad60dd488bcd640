// `tools/list` answers without the tools that the policy denies, in a JSON body or in an event stream. The events of a
// stream are read and written again, so that every client reads the same events, wherever it ends lines. What can't be read,
// or is too long to be held, does not pass. All that takes longer for a longer answer is done in steps.

import type { Chunks } from "../../http/client/decode.ts";
import { createPace, inOneStep, inTurnSteps, type Pace, type Steps } from "../../kernel/turns.ts";
import { EventStreamReader, Utf8Reader } from "../../wire/event-stream.ts";
import { skipSpaceInSteps } from "../../wire/json-scan.ts";
import { type DeniedTools, UnreadableAnswer, withoutTools } from "../../wire/tool-list.ts";
import type { TenantBudget } from "./response.ts";

export interface FilterOptions {
  readonly isDenied: DeniedTools;
  /** Of one body or event. */
  readonly bytesMax: number;
  /** What all bodies and events of a tenant that are held may take together. */
  readonly memory: TenantBudget;
  /** The tenant in whose turns the work is done. */
  readonly tenant: string;
  /** Ends the work with the exchange. */
  readonly signal: AbortSignal;
}

const LINE_FEED = 0x0a;
const OPEN_BRACKET = 0x5b;
const OPEN_BRACE = 0x7b;
const HELD_BYTES_FIRST = 4096;
/** Largest piece that goes to the caller at once, since each piece is hashed on its way. */
const PIECE_BYTES = 128 * 1024;
/** Bytes of an event stream that are read in one go. */
const READ_BYTES = 16_384;
/** What it takes to read a byte of an event stream and to search one, to write an event, and a line of its data. */
const READ_WORK = 4;
const SEARCH_WORK = 1 / 16;
const EVENT_WORK = 400;
const LINE_WORK = 100;

/** Bytes that are held, within the memory of the tenant. */
function createHeld(memory: TenantBudget, bytesMax: number) {
  let bytes = new Uint8Array();
  let size = 0;

  function grow(room: number): void {
    const taken = memory.take(room);
    if (taken < room) {
      memory.giveBack(taken);
      throw new UnreadableAnswer("too much is being filtered");
    }
    // Memory that is not zeroed costs nothing until it is written to.
    const larger = Buffer.allocUnsafeSlow(room);
    larger.set(bytes.subarray(0, size));
    memory.giveBack(bytes.length);
    bytes = larger;
  }

  /** What `all` has given stays as it is. */
  function clear(): void {
    memory.giveBack(bytes.length);
    bytes = new Uint8Array();
    size = 0;
  }

  return {
    all: () => bytes.subarray(0, size),
    add(part: Uint8Array): void {
      const wanted = size + part.length;
      if (wanted > bytesMax) throw new UnreadableAnswer("too long to be filtered");
      if (wanted > bytes.length) grow(Math.min(bytesMax, Math.max(wanted, 2 * bytes.length, HELD_BYTES_FIRST)));
      bytes.set(part, size);
      size = wanted;
    },
    clear,
    /** What `all` has given is not used any more. */
    reuse(): void {
      if (bytes.length > HELD_BYTES_FIRST) clear();
      size = 0;
    },
  };
}

/** Splits a long piece into smaller ones for the caller. */
async function* inPieces(chunks: Chunks, tenant: string): Chunks {
  for await (const chunk of chunks) {
    for (let at = 0; at < chunk.length; at += PIECE_BYTES) {
      const piece = chunk.subarray(at, at + PIECE_BYTES);
      yield at === 0 ? piece : await inOneStep(() => piece, tenant);
    }
  }
}

/** A body that is one JSON text. */
export function filterJson({ isDenied, bytesMax, memory, tenant, signal }: FilterOptions): (chunks: Chunks) => Chunks {
  async function* filtered(chunks: Chunks): Chunks {
    const [text, left] = [createHeld(memory, bytesMax), createHeld(memory, Number.POSITIVE_INFINITY)];
    try {
      const utf8 = new Utf8Reader();
      for await (const chunk of chunks) text.add(utf8.read(chunk));
      text.add(utf8.end());
      // Many streams may bring something at once, so all work on it is done in turns.
      const parts = await inTurnSteps(withoutTools(text.all(), isDenied), tenant, signal);
      if (parts.length > 1) for (const part of parts) left.add(part);
      yield parts.length > 1 ? left.all() : text.all();
    } finally {
      text.clear();
      left.clear();
    }
  }
  return (chunks) => inPieces(filtered(chunks), tenant);
}

/** A body that is an event stream. */
export function filterEvents(options: FilterOptions): (chunks: Chunks) => Chunks {
  const { tenant, signal } = options;
  async function* filtered(chunks: Chunks): Chunks {
    const utf8 = new Utf8Reader();
    const events = createEventFilter(options);
    /** What has passed by the end of the work goes on, also if the work fails. */
    async function* passedBy(work: Steps<void>): Chunks {
      const problem = await inTurnSteps(work, tenant, signal).then(
        () => null,
        (error: unknown) => ({ error }),
      );
      const { passed } = events;
      if (passed.all().length > 0) yield passed.all();
      passed.clear();
      if (problem !== null) throw problem.error;
    }
    try {
      for await (const chunk of chunks) yield* passedBy(events.read(utf8.read(chunk)));
      yield* passedBy(events.finish(utf8.end()));
    } finally {
      events.clear();
    }
  }
  return (chunks) => inPieces(filtered(chunks), tenant);
}

const COMMENT = Buffer.from(":\n");
const DATA_FIELD = Buffer.from("data: ");
const LINE_END = Buffer.from("\n");

/**
 * Not ends of lines by the standard, but for clients that split text as Python's `splitlines` does: VT, FF, FS, GS, RS, NEL,
 * LS and PS. And a byte order mark, which some clients take away elsewhere than at the start of the stream.
 */
const AMBIGUOUS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\ufeff"];

function createEventFilter({ isDenied, bytesMax, memory }: FilterOptions) {
  const [data, others] = [createHeld(memory, bytesMax), createHeld(memory, bytesMax)];
  const passed = createHeld(memory, Number.POSITIVE_INFINITY);
  let ended: { readonly hasData: boolean } | null = null;
  const pace = createPace();
  const reader = new EventStreamReader({
    data: data.add,
    other: others.add,
    // It shows that the stream is still there. What it says is for nobody.
    comment: () => passed.add(COMMENT),
    end(_, hasData) {
      ended = { hasData };
    },
  });

  function* writeEnded(): Steps<void> {
    const [text, fields] = [data.all(), others.all()];
    // Without a `[` there is no list, so no tool can be in the event.
    const mayList = text.includes(OPEN_BRACKET) || fields.includes(OPEN_BRACKET);
    const parts = mayList ? yield* judged(text, fields, isDenied, pace) : [text];
    passed.add(fields);
    if (ended?.hasData === true) {
      passed.add(DATA_FIELD);
      for (const part of parts) yield* addLines(passed.add, part, pace);
      passed.add(LINE_END);
    }
    passed.add(LINE_END);
    data.reuse();
    others.reuse();
    ended = null;
    if (pace(EVENT_WORK)) yield;
  }

  function* read(text: Uint8Array): Steps<void> {
    for (let at = 0; at < text.length; ) {
      const taken = reader.feedEvent(text.subarray(at, at + READ_BYTES));
      at += taken;
      if (ended !== null) yield* writeEnded();
      if (pace(READ_WORK * taken)) yield;
    }
  }

  return {
    read,
    /** Some clients take an event that its stream ends without a blank line. */
    *finish(text: Uint8Array): Steps<void> {
      yield* read(text);
      reader.finish();
      if (ended !== null) yield* writeEnded();
    },
    /** What has passed by now. */
    passed,
    clear(): void {
      for (const held of [data, others, passed]) held.clear();
    },
  };
}

/**
 * The parts of an event's data that may pass. A client that splits lines at other characters than the standard reads other
 * lines, and may take for data what the standard does not. Inside a string of a JSON text that is harmless: what such a
 * client reads there is not JSON.
 * @throws UnreadableAnswer
 */
function* judged(
  text: Uint8Array,
  fields: Uint8Array,
  isDenied: DeniedTools,
  pace: Pace,
): Steps<readonly Uint8Array[]> {
  const first = text[yield* skipSpaceInSteps(text, 0)];
  const isJson = first === OPEN_BRACE || first === OPEN_BRACKET;
  for (const bytes of isJson ? [fields] : [fields, text]) {
    const searched = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length);
    for (const found of AMBIGUOUS) {
      if (searched.includes(found)) throw new UnreadableAnswer("lines that clients do not agree about");
      if (pace(bytes.length * SEARCH_WORK)) yield;
    }
  }
  return yield* withoutTools(text, isDenied, { pace });
}

/** Each line of the data is a field of its own. */
function* addLines(add: (bytes: Uint8Array) => void, text: Uint8Array, pace: Pace): Steps<void> {
  for (let at = 0; ; ) {
    const found = text.indexOf(LINE_FEED, at);
    const end = found === -1 ? text.length : found + 1;
    add(text.subarray(at, end));
    if (found === -1) return;
    add(DATA_FIELD);
    if (pace(LINE_WORK + (end - at) / 8)) yield;
    at = end;
  }
}
