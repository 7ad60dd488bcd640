// Parses event streams (https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream) as they arrive.
// The handler gets the fields of an event piece by piece; the parser keeps none of them, so events may have any length.
export interface EventHandler {
  /** The next piece of an event's data. It is never empty. */
  data(bytes: Uint8Array): void;
  /** The next piece of the event's other fields, such as `id: 7` and a line feed, for handlers that write the event again. */
  other?(bytes: Uint8Array): void;
  comment?(): void;
  /** @param isMessage of the type `message`, as events without a type are @param hasData has a data field, which may be empty */
  end(isMessage: boolean, hasData: boolean): void;
}

export const isEventStream = ({ headers }: { readonly headers: Pick<Headers, "get"> }): boolean =>
  /^\s*text\/event-stream\s*(;|$)/i.test(headers.get("content-type") ?? "");

const [LF, CR, SPACE, COLON] = [0x0a, 0x0d, 0x20, 0x3a];
/** GAP is right after the colon, where one space is skipped. */
const [NAME, GAP, VALUE] = [0, 1, 2];

/** Longer field names and event types need not be kept, since no known one is longer. */
const NAME_CHARACTERS_MAX = 8;
const LINE_END = Uint8Array.of(LF);
const encoder = new TextEncoder();
const OTHER_FIELDS = new Map(["event", "id", "retry"].map((name) => [name, encoder.encode(`${name}: `)]));

export class EventStreamReader {
  readonly #handler: EventHandler;
  #state = NAME;
  /** The name of the line's field, as far as it is kept. */
  #name = "";
  #isLineEmpty = true;
  /** Whether the last byte was a carriage return: a line feed that follows belongs to the same line end. */
  #isAfterReturn = false;
  /** The type of the event, as far as it is kept. */
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

  /** Reads up to the end of the next event. @returns the index behind it */
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
      } else at = this.#fieldByte(bytes, at, byte);
    }
    return at;
  }

  /** The stream has ended regularly: this ends the last event, even if its blank line is missing. */
  finish(): void {
    if (!this.#isLineEmpty) this.#lineEnds();
    this.#lineEnds();
  }

  /** Reads a byte of a field, or the rest of its value. @returns the index of the next byte */
  #fieldByte(bytes: Uint8Array, at: number, byte: number): number {
    this.#isLineEmpty = false;
    if (this.#state === NAME) {
      if (byte === COLON) this.#fieldBegins(GAP);
      else if (this.#name.length < NAME_CHARACTERS_MAX) this.#name += String.fromCharCode(byte);
      return at + 1;
    }
    const isGap = this.#state === GAP && byte === SPACE;
    this.#state = VALUE;
    if (isGap) return at + 1;
    let end = at;
    while (end < bytes.length && bytes[end] !== LF && bytes[end] !== CR) end++;
    const value = bytes.subarray(at, end);
    if (this.#name === "data") this.#handler.data(value);
    else if (OTHER_FIELDS.has(this.#name)) this.#handler.other?.(value);
    if (this.#name === "event") {
      this.#type += String.fromCharCode(...value.subarray(0, NAME_CHARACTERS_MAX - this.#type.length));
    }
    return end;
  }

  #fieldBegins(state: number): void {
    this.#state = state;
    const prefix = OTHER_FIELDS.get(this.#name);
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

  /** Whether an event ends with the line. */
  #lineEnds(): boolean {
    if (this.#isLineEmpty) return this.#eventEnds();
    // A line without a colon is a field without a value.
    if (this.#state === NAME) this.#fieldBegins(VALUE);
    if (OTHER_FIELDS.has(this.#name)) this.#handler.other?.(LINE_END);
    this.#state = NAME;
    this.#name = "";
    this.#isLineEmpty = true;
    return false;
  }

  #eventEnds(): boolean {
    const isEvent = this.#hasData || this.#hasOthers;
    if (isEvent) this.#handler.end(this.#type === "" || this.#type === "message", this.#hasData);
    [this.#hasData, this.#hasOthers, this.#type] = [false, false, ""];
    return isEvent;
  }
}

/** Makes UTF-8 valid, as browsers do: malformed bytes become U+FFFD, and a byte order mark at the start is dropped. */
export class Utf8Reader {
  readonly #decoder = new TextDecoder();

  /** The characters that are complete so far. */
  read(bytes: Uint8Array): Uint8Array {
    return encoder.encode(this.#decoder.decode(bytes, { stream: true }));
  }

  /** The rest of the text: U+FFFD for a character that was cut off. */
  end(): Uint8Array {
    return encoder.encode(this.#decoder.decode());
  }
}
