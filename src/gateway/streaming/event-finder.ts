// Where the events of an event stream end, however it is cut into chunks.
import { LINE_FEED, RETURN } from "./event-filter.ts";

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
