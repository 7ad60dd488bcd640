// The strict JSON parser for request bodies: valid UTF-8, bounded depth, no duplicate keys, no number that would be altered.
// JSON.parse lets the last of two equal keys win and rounds numbers that a double can't hold, so that the gateway would store
// something else than was sent. A compute thread judges long bodies.

import { Fault, shownField } from "../core/fault.ts";
import { AT_ONCE_BYTES, type ComputeTask, compute } from "../kernel/compute.ts";
import { MAX } from "../kernel/limits.ts";

export const isJsonObject = (value: unknown): value is Readonly<Record<string, unknown>> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

/**
 * The value of a JSON text.
 *
 * @param freeField a top-level key below which duplicate keys are allowed
 * @throws Fault `invalid_request`
 */
export function parseJson(bytes: Uint8Array, freeField: string | null = null): unknown {
  return new JsonReader(decodeUtf8(bytes), freeField).read();
}

/** Checks a text, and returns no value: to copy the value between threads takes longer than to parse the text again. */
export const JSON_TEXT: ComputeTask<readonly [bytes: Uint8Array, freeField: string | null], null> = {
  name: "json",
  run([bytes, freeField]) {
    parseJson(bytes, freeField);
    return null;
  },
};

/** Like `parseJson`, but checks a long text on another thread. @throws as `parseJson` and `compute` do */
export async function readJson(bytes: Uint8Array, freeField: string | null, tenant: string): Promise<unknown> {
  if (bytes.length <= AT_ONCE_BYTES) return parseJson(bytes, freeField);
  await compute(JSON_TEXT, [bytes, freeField], { tenant, bytes: bytes.length });
  // Both parsers read an accepted text alike: where duplicate keys are allowed, the last one counts.
  return JSON.parse(decodeUtf8(bytes));
}

function decodeUtf8(bytes: Uint8Array): string {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch (cause) {
    throw new Fault("invalid_request", "body: not valid UTF-8", { cause });
  }
}

function refuse(problem: string): never {
  throw new Fault("invalid_request", problem);
}

/** The error says where the text stops to be JSON, and repeats none of it, since it may hold a secret. */
function notJson(text: string, at: number, cause?: unknown): Fault {
  if (text === "") return new Fault("invalid_request", "body: not valid JSON, since it is empty");
  const before = text.slice(0, at);
  const place = `line ${before.split("\n").length}, character ${at - before.lastIndexOf("\n")}`;
  return new Fault("invalid_request", `body: not valid JSON at ${place}`, { cause });
}

const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
// biome-ignore lint/suspicious/noControlCharactersInRegex: a string must not hold any.
const NEEDS_DECODING = /[\\\u0000-\u001f]/;
const WORDS: readonly (readonly [string, unknown])[] = [
  ["true", true],
  ["false", false],
  ["null", null],
];

/** The token that may come next. */
type ExpectedNext = "value" | "item or end" | "key" | "key or end" | "colon" | "comma or end" | "nothing";

interface JsonLevel {
  readonly array: unknown[] | null;
  readonly object: Record<string, unknown>;
  /** The keys seen so far. */
  readonly keys: Set<string>;
  /** Inside a field whose keys the caller chooses: there the last of two equal keys wins. */
  readonly free: boolean;
  /** The key of the current member; in an array, that of the object around it. */
  key: string;
}

class JsonReader {
  #value: unknown;
  readonly #text: string;
  readonly #freeField: string | null;
  readonly #levels: JsonLevel[] = [];
  #level: JsonLevel | undefined;
  #freeValues = 0;
  #objects = 0;
  #at = 0;
  #expected: ExpectedNext = "value";

  constructor(text: string, freeField: string | null) {
    this.#text = text;
    this.#freeField = freeField;
  }

  /** @throws Fault */
  read(): unknown {
    while (this.#token());
    return this.#value;
  }

  /** Reads one token. @returns false at the end */
  #token(): boolean {
    SPACE.lastIndex = this.#at;
    SPACE.test(this.#text);
    this.#at = SPACE.lastIndex;
    const character = this.#text[this.#at];
    switch (this.#expected) {
      case "value":
        this.#readValue(character);
        return true;
      case "item or end":
        if (character === "]") this.#close();
        else this.#readValue(character);
        return true;
      case "key or end":
        if (character === "}") this.#close();
        else this.#readKey();
        return true;
      case "key":
        this.#readKey();
        return true;
      case "colon":
        if (character !== ":") this.#refuseHere();
        this.#pass("value");
        return true;
      case "comma or end":
        this.#afterValue(character);
        return true;
      case "nothing":
        if (character !== undefined) this.#refuseHere();
        return false;
    }
  }

  #refuseHere(): never {
    throw notJson(this.#text, this.#at);
  }

  #pass(next: ExpectedNext): void {
    this.#at++;
    this.#expected = next;
  }

  #afterValue(character: string | undefined): void {
    const isArray = this.#level?.array != null;
    if (character === (isArray ? "]" : "}")) this.#close();
    else if (character === ",") this.#pass(isArray ? "value" : "key");
    else this.#refuseHere();
  }

  #readValue(character: string | undefined): void {
    if (character === '"') this.#put(this.#readString());
    else if (character === "{") this.#open(null);
    else if (character === "[") this.#open([]);
    else if (character === "t" || character === "f" || character === "n") this.#readWord();
    else this.#readNumber();
  }

  /** Puts a complete value into the object or array around it. */
  #put(value: unknown): void {
    const level = this.#level;
    if (level?.free && ++this.#freeValues > MAX.jsonFreeValues) {
      refuse(`${this.#freeField}: more than ${MAX.jsonFreeValues} values`);
    }
    this.#expected = level === undefined ? "nothing" : "comma or end";
    if (level === undefined) this.#value = value;
    else if (level.array !== null) this.#putItem(level.array, value);
    else if (level.key !== "__proto__") level.object[level.key] = value;
    else {
      const own = { value, writable: true, enumerable: true, configurable: true };
      Object.defineProperty(level.object, level.key, own);
    }
  }

  #putItem(array: unknown[], value: unknown): void {
    if (array.push(value) <= MAX.jsonItems) return;
    refuse(`${shownField(this.#levels[0]?.key || "body")}: the list has more than ${MAX.jsonItems} items`);
  }

  #open(array: unknown[] | null): void {
    const parent = this.#level;
    const depth = this.#levels.length;
    // An object costs JSON.parse up to half a microsecond, where each has keys of its own.
    if (array === null && ++this.#objects > MAX.jsonObjects) refuse(`body: more than ${MAX.jsonObjects} objects`);
    if (depth === MAX.jsonDepth) refuse(`body: nested deeper than ${MAX.jsonDepth} levels`);
    const free = parent !== undefined && (parent.free || (depth === 1 && parent.key === this.#freeField));
    const level = { array, object: {}, keys: new Set<string>(), free, key: parent?.key ?? "" };
    this.#level = level;
    this.#levels.push(level);
    this.#pass(array === null ? "key or end" : "item or end");
  }

  #close(): void {
    const closed = this.#levels.pop();
    this.#level = this.#levels.at(-1);
    this.#at++;
    this.#put(closed?.array ?? closed?.object);
  }

  #readKey(): void {
    const level = this.#level;
    if (this.#text[this.#at] !== '"' || level === undefined) this.#refuseHere();
    const key = this.#readString();
    level.key = key;
    if (level.keys.has(key)) {
      if (!level.free) refuse(`${shownField(key)}: given twice`);
    } else if (level.keys.add(key).size > MAX.jsonKeys) {
      refuse(`${shownField(key)}: the object has more than ${MAX.jsonKeys} keys`);
    }
    this.#expected = "colon";
  }

  #readString(): string {
    const text = this.#text;
    const start = this.#at;
    let end = text.indexOf('"', start + 1);
    while (end !== -1 && isEscaped(text, end)) end = text.indexOf('"', end + 1);
    if (end === -1) return this.#refuseHere();
    this.#at = end + 1;
    const inner = text.slice(start + 1, end);
    if (!NEEDS_DECODING.test(inner)) return inner;
    try {
      return JSON.parse(text.slice(start, end + 1)) as string;
    } catch (cause) {
      throw notJson(text, start, cause);
    }
  }

  #readWord(): void {
    const [name, value] = WORDS.find(([word]) => this.#text.startsWith(word, this.#at)) ?? this.#refuseHere();
    this.#at += name.length;
    this.#put(value);
  }

  /** The error does not repeat the number, which may be a secret. */
  #readNumber(): void {
    NUMBER.lastIndex = this.#at;
    const literal = NUMBER.exec(this.#text)?.[0] ?? this.#refuseHere();
    const value = Number(literal);
    if (!Number.isFinite(value) || (/^-?\d+$/.test(literal) && !Number.isSafeInteger(value))) {
      refuse(`${shownField(this.#level?.key || "body")}: a number that is too large to be kept exactly`);
    }
    this.#at += literal.length;
    this.#put(value);
  }
}

/** Whether the quote at `end` is escaped: an odd number of backslashes comes before it. */
function isEscaped(text: string, end: number): boolean {
  let start = end;
  while (text[start - 1] === "\\") start--;
  return (end - start) % 2 === 1;
}
