// Parses event streams (https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream) as they
// arrive. The fields of an event are passed on piece by piece and none of them is kept, however long it is.

export interface EventHandler {
  /** The next piece of an event's data. It is never empty. */
  data(bytes: Uint8Array): void;
  /** The next piece of the event's other fields, `id: 7` and a line feed, for those who write the event again. */
  other?(bytes: Uint8Array): void;
  comment?(): void;
  /**
   * @param isMessage whether it is of the type `message`, as those without a type are
   * @param hasData whether it had data, if only empty
   */
  end(isMessage: boolean, hasData: boolean): void;
}

/** By its content type. */
export function isEventStream({ headers }: { readonly headers: Pick<Headers, "get"> }): boolean {
  return /^\s*text\/event-stream\s*(;|$)/i.test(headers.get("content-type") ?? "");
}

const LF = 0x0a;
const CR = 0x0d;
const SPACE = 0x20;
const COLON = 0x3a;

const NAME = 0;
/** Right after the colon, where one space is skipped. */
const GAP = 1;
const VALUE = 2;

const MESSAGE = "message";
/** A longer name is none that matters here, and a longer type is another type. */
const SHORT_MAX = 8;
const LINE_END = Uint8Array.of(LF);
const encoder = new TextEncoder();
const OTHERS = new Map(["event", "id", "retry"].map((name) => [name, encoder.encode(`${name}: `)]));

export class EventStreamReader {
  readonly #handler: EventHandler;
  #state = NAME;
  /** The name of the line's field, as far as it can be one that matters here. */
  #name = "";
  #isLineEmpty = true;
  /** A line feed that comes next belongs to the line end before it. */
  #isAfterReturn = false;
  /** Of the event. */
  #type = "";
  #hasData = false;
  #hasOthers = false;

  constructor(handler: EventHandler) {
    this.#handler = handler;
  }

  /** @param bytes UTF-8 without a byte order mark */
  feed(bytes: Uint8Array): void {
    for (let at = 0; at < bytes.length; ) at = this.feedEvent(bytes, at);
  }

  /** Reads on up to the end of an event. @returns where to go on */
  feedEvent(bytes: Uint8Array, from = 0): number {
    let at = from;
    while (at < bytes.length) {
      const byte = bytes[at] ?? 0;
      const isPaired = this.#isAfterReturn && byte === LF;
      this.#isAfterReturn = false;
      if (isPaired) at++;
      else if (byte === LF || byte === CR) {
        this.#isAfterReturn = byte === CR;
        at++;
        if (this.#lineEnds()) return at;
      } else at = this.#goOn(bytes, at, byte);
    }
    return at;
  }

  /** A regular end of the stream closes the last event, even if its blank line is missing. */
  finish(): void {
    if (!this.#isLineEmpty) this.#lineEnds();
    this.#lineEnds();
  }

  /** Returns where to go on. */
  #goOn(bytes: Uint8Array, at: number, byte: number): number {
    this.#isLineEmpty = false;
    if (this.#state === NAME) {
      if (byte === COLON) this.#fieldBegins(GAP);
      else if (this.#name.length < SHORT_MAX) this.#name += String.fromCharCode(byte);
      return at + 1;
    }
    const isGap = this.#state === GAP && byte === SPACE;
    this.#state = VALUE;
    if (isGap) return at + 1;
    let end = at;
    while (end < bytes.length && bytes[end] !== LF && bytes[end] !== CR) end++;
    const value = bytes.subarray(at, end);
    if (this.#name === "data") this.#handler.data(value);
    else if (OTHERS.has(this.#name)) this.#handler.other?.(value);
    if (this.#name === "event") this.#typeGoesOn(value);
    return end;
  }

  #fieldBegins(state: number): void {
    this.#state = state;
    const prefix = OTHERS.get(this.#name);
    if (prefix !== undefined) {
      this.#hasOthers = true;
      this.#handler.other?.(prefix);
    }
    if (this.#name === "event") this.#type = "";
    if (this.#name === "") this.#handler.comment?.();
    if (this.#name !== "data") return;
    if (this.#hasData) this.#handler.data(LINE_END);
    this.#hasData = true;
  }

  #typeGoesOn(value: Uint8Array): void {
    const left = SHORT_MAX - this.#type.length;
    this.#type += String.fromCharCode(...value.subarray(0, left));
  }

  /** Whether an event ends with the line. */
  #lineEnds(): boolean {
    if (this.#isLineEmpty) return this.#eventEnds();
    // A line without a colon is a field without a value.
    if (this.#state === NAME) this.#fieldBegins(VALUE);
    if (OTHERS.has(this.#name)) this.#handler.other?.(LINE_END);
    this.#state = NAME;
    this.#name = "";
    this.#isLineEmpty = true;
    return false;
  }

  #eventEnds(): boolean {
    const isEvent = this.#hasData || this.#hasOthers;
    if (isEvent) this.#handler.end(this.#type === "" || this.#type === MESSAGE, this.#hasData);
    [this.#hasData, this.#hasOthers, this.#type] = [false, false, ""];
    return isEvent;
  }
}

/** Text in UTF-8 as the web's decoder reads it: malformed bytes become U+FFFD, and a byte order mark at the start is dropped. */
export class Utf8Reader {
  readonly #decoder = new TextDecoder();

  /** The text that is complete by now. */
  read(bytes: Uint8Array): Uint8Array {
    return encoder.encode(this.#decoder.decode(bytes, { stream: true }));
  }

  /** What is left at the end. */
  end(): Uint8Array {
    return encoder.encode(this.#decoder.decode());
  }
}
