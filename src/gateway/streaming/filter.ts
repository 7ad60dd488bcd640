// `tools/list` answers without the tools that the policy denies, in a JSON body or in an event stream. An event is
// held until it is whole and then passes as it came, unless a tool must be taken out of it. What can't be read, or is
// too long to be held, does not pass.
import { UnreadableAnswer, withoutTools } from "../../core/tool-list.ts";
import { doneInTurns } from "../../edge/turns.ts";
import type { Share } from "./budget.ts";

type Chunks = AsyncGenerator<Uint8Array, void, undefined>;

type IsDenied = (tool: string) => boolean;

export interface FilterOptions {
  readonly isDenied: IsDenied;
  /** Of one body or event. */
  readonly bytesMax: number;
  /** What all bodies and events of a tenant that are held may take together. */
  readonly memory: Share;
  /** In whose turns it is done. */
  readonly tenant: string;
}

export const HELD_BYTES_MAX = 16 * 1024 * 1024;
export const FILTER_MEMORY_BYTES = 256 * 1024 * 1024;

/** Of the filtering of events, in one go. */
const STEP_MS = 1;

const LINE_FEED = 0x0a;
const RETURN = 0x0d;
const BOM = [0xef, 0xbb, 0xbf];

/** Bytes that are held, within the bounds of the options. */
function createHeld({ bytesMax, memory }: Pick<FilterOptions, "bytesMax" | "memory">) {
  let bytes = new Uint8Array();
  let size = 0;
  return {
    all: () => bytes.subarray(0, size),
    add(chunk: Uint8Array): void {
      const wanted = size + chunk.length;
      if (wanted > bytesMax) throw new UnreadableAnswer("too long to be filtered");
      if (wanted > bytes.length) {
        const room = Math.min(bytesMax, Math.max(wanted, 2 * bytes.length));
        const more = room - bytes.length;
        const taken = memory.take(more);
        if (taken < more) {
          memory.giveBack(taken);
          throw new UnreadableAnswer("too much is being filtered");
        }
        const larger = new Uint8Array(room);
        larger.set(this.all());
        bytes = larger;
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

/** A body that is one JSON text. */
export function filterJson(options: FilterOptions): (chunks: Chunks) => Chunks {
  return async function* filtered(chunks) {
    const held = createHeld(options);
    try {
      for await (const chunk of chunks) held.add(chunk);
      const text = held.all();
      const start = hasBom(text) ? BOM.length : 0;
      const rest = text.subarray(start);
      const left = withoutTools(rest, options.isDenied);
      yield left === rest ? text : left;
    } finally {
      held.clear();
    }
  };
}

function hasBom(bytes: Uint8Array): boolean {
  return BOM.every((byte, index) => bytes[index] === byte);
}

export interface EventFilterOptions extends Omit<FilterOptions, "isDenied"> {
  /** Null: whole events are all that is wanted, whatever is in them. */
  readonly isDenied: IsDenied | null;
}

/** A body that is an event stream (WHATWG HTML, section 9.2). */
export function filterEvents({ isDenied, ...options }: EventFilterOptions): (chunks: Chunks) => Chunks {
  return (chunks) => {
    const whole = wholeEvents(chunks, options);
    return isDenied === null ? whole : rewrittenEvents(whole, isDenied, options.tenant);
  };
}

/** However many events come together, they go on together: each piece costs its way to the caller. */
async function* wholeEvents(chunks: Chunks, options: Omit<FilterOptions, "isDenied">): Chunks {
  const held = createHeld(options);
  const find = createEventFinder();
  try {
    for await (const chunk of chunks) {
      const first = find(chunk, 0);
      let last = first;
      for (let end = first; end !== -1; end = find(chunk, end)) last = end;
      if (first !== -1) {
        held.add(chunk.subarray(0, first));
        yield held.all();
        held.clear();
      }
      if (last > first) yield chunk.subarray(first, last);
      held.add(chunk.subarray(Math.max(last, 0)));
    }
    // Some clients take an event that its stream ends without a blank line.
    if (held.all().length > 0) yield held.all();
  } finally {
    held.clear();
  }
}

async function* rewrittenEvents(pieces: Chunks, isDenied: IsDenied, tenant: string): Chunks {
  const find = createEventFinder();
  for await (const events of pieces) {
    const passed: Uint8Array[] = [];
    let at = 0;
    await doneInTurns(() => {
      const until = performance.now() + STEP_MS;
      while (at < events.length && performance.now() < until) {
        const found = find(events, at);
        const end = found === -1 ? events.length : found;
        passed.push(rewritten(events.subarray(at, end), isDenied));
        at = end;
      }
      return at < events.length;
    }, tenant);
    yield Buffer.concat(passed);
  }
}

/**
 * Finds where events end: after the empty line behind them. A carriage return at the end of a chunk ends its line at
 * once; when it ended an event, the line feed that may still belong to it passes as one of its own, which is none.
 */
function createEventFinder() {
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

  /** The index after the first event that ends at or after `from`; -1 when none does. */
  return (chunk: Uint8Array, from: number): number => {
    for (let at = from; at < chunk.length; at++) {
      if (!ends(chunk[at])) continue;
      const hasFeed = returned === "event" && chunk[at + 1] === LINE_FEED;
      if (hasFeed) returned = null;
      return hasFeed ? at + 2 : at + 1;
    }
    return -1;
  };
}

const LINE_END = /\r\n|\n|\r/;

/** An event as it may pass. */
function rewritten(event: Uint8Array, isDenied: IsDenied): Uint8Array {
  // Byte for byte: the fields that stay are not decoded.
  const lines = Buffer.from(hasBom(event) ? event.subarray(BOM.length) : event)
    .toString("latin1")
    .split(LINE_END);
  const data = lines.filter(isData).map(dataOf);
  if (data.length === 0) return event;
  const text = Buffer.from(data.join("\n"), "latin1");
  const left = withoutTools(text, isDenied);
  if (left === text) return event;
  const others = lines.filter((line) => line !== "" && !isData(line));
  const kept = Buffer.from(left).toString("latin1").split("\n");
  const all = [...others, ...kept.map((line) => `data: ${line}`), "", ""];
  return Buffer.from(all.join("\n"), "latin1");
}

function isData(line: string): boolean {
  return line === "data" || line.startsWith("data:");
}

function dataOf(line: string): string {
  const value = line.slice("data:".length);
  return value.startsWith(" ") ? value.slice(1) : value;
}
