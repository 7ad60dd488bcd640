// The strict JSON parser for request bodies: valid UTF-8, bounded depth, no duplicate keys, no number that would be altered.
// JSON.parse lets the last of two equal keys win and rounds numbers that a double can't hold, so that the gateway would store
// something else than was sent. A compute thread judges long bodies.
import { Fault, shownField } from "../core/fault.ts";
import { AT_ONCE_BYTES, type ComputeTask, compute } from "../kernel/compute.ts";
import { MAX } from "../kernel/limits.ts";
import { atOnceOrInTurn, inTurn } from "../kernel/turns.ts";

export const isJsonObject = (value: unknown): value is Readonly<Record<string, unknown>> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

/** @param freeField a top-level key below which duplicate keys are allowed @throws Fault `invalid_request` */
export const parseJson = (bytes: Uint8Array, freeField: string | null = null): unknown =>
  new JsonReader(decodeUtf8(bytes), freeField).read();

/** Checks a text, and returns no value: to copy the value between threads takes longer than to parse the text again. */
export const JSON_TEXT: ComputeTask<readonly [bytes: Uint8Array, freeField: string | null], null> = {
  name: "json",
  run([bytes, freeField]) {
    parseJson(bytes, freeField);
    return null;
  },
};

/**
 * As `parseJson`, but checks a long text on another thread, and takes turns where many texts come in one moment. `use` gets the
 * value in the turn in which it was read. @throws as `parseJson`, `compute` and `use` do
 */
export async function readJson<T>(
  bytes: Uint8Array,
  freeField: string | null,
  tenant: string,
  use: (value: unknown) => T,
): Promise<Awaited<T>> {
  if (bytes.length <= AT_ONCE_BYTES) return await atOnceOrInTurn(tenant, () => use(parseJson(bytes, freeField)));
  await compute(JSON_TEXT, [bytes, freeField], { tenant, bytes: bytes.length });
  // Both parsers read an accepted text alike: where duplicate keys are allowed, the last one counts.
  return inTurn(tenant, () => use(JSON.parse(decodeUtf8(bytes))));
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
const WORDS = Object.entries({ true: true, false: false, null: null });

/** A recursive descent, as deep as MAX.jsonDepth at most. Each method leaves `#at` behind what it has read. */
class JsonReader {
  readonly #text: string;
  readonly #freeField: string | null;
  /** The current key of the outermost object; empty if the text is a list. */
  #topKey = "";
  #freeValues = 0;
  #objects = 0;
  #at = 0;

  constructor(text: string, freeField: string | null) {
    this.#text = text;
    this.#freeField = freeField;
  }

  /** @throws Fault */
  read(): unknown {
    const value = this.#readValue("", 0, false);
    if (this.#next() !== undefined) this.#refuseHere();
    return value;
  }

  #refuseHere(): never {
    throw notJson(this.#text, this.#at);
  }

  /** Skips white space. @returns the character after it */
  #next(): string | undefined {
    SPACE.lastIndex = this.#at;
    SPACE.test(this.#text);
    this.#at = SPACE.lastIndex;
    return this.#text[this.#at];
  }

  /**
   * @param key the value's key; in an array, that of the object around it
   * @param depth how many objects and arrays are open
   * @param isFree whether the value is in a field whose keys the caller chooses
   */
  #readValue(key: string, depth: number, isFree: boolean): unknown {
    const value = this.#readAny(key, depth, isFree);
    if (isFree && ++this.#freeValues > MAX.jsonFreeValues) {
      refuse(`${this.#freeField}: more than ${MAX.jsonFreeValues} values`);
    }
    return value;
  }

  #readAny(key: string, depth: number, isFree: boolean): unknown {
    const isFreeInside = isFree || (depth === 1 && key === this.#freeField);
    switch (this.#next()) {
      case '"':
        return this.#readString();
      case "{":
        return this.#readObject(depth, isFreeInside);
      case "[":
        return this.#readArray(key, depth, isFreeInside);
      case "t":
      case "f":
      case "n":
        return this.#readWord();
      default:
        return this.#readNumber(key);
    }
  }

  /** @param isFree whether the last of two equal keys wins */
  #readObject(depth: number, isFree: boolean): object {
    // An object costs JSON.parse up to half a microsecond, where each has keys of its own.
    if (++this.#objects > MAX.jsonObjects) refuse(`body: more than ${MAX.jsonObjects} objects`);
    const object: Record<string, unknown> = {};
    const keys = new Set<string>();
    if (this.#isEmpty("}", depth)) return object;
    do {
      const key = this.#readKey(keys, isFree);
      if (depth === 0) this.#topKey = key;
      const value = this.#readValue(key, depth + 1, isFree);
      if (key !== "__proto__") object[key] = value;
      else Object.defineProperty(object, key, { value, writable: true, enumerable: true, configurable: true });
    } while (!this.#ends("}"));
    return object;
  }

  #readArray(key: string, depth: number, isFree: boolean): unknown[] {
    const array: unknown[] = [];
    if (this.#isEmpty("]", depth)) return array;
    do {
      if (array.push(this.#readValue(key, depth + 1, isFree)) > MAX.jsonItems) {
        refuse(`${shownField(this.#topKey || "body")}: the list has more than ${MAX.jsonItems} items`);
      }
    } while (!this.#ends("]"));
    return array;
  }

  /** Opens an object or an array. @returns whether it closes at once */
  #isEmpty(close: string, depth: number): boolean {
    if (depth === MAX.jsonDepth) refuse(`body: nested deeper than ${MAX.jsonDepth} levels`);
    this.#at++;
    const isEmpty = this.#next() === close;
    if (isEmpty) this.#at++;
    return isEmpty;
  }

  /** Reads the comma after a value, or the end of the object or array. @returns whether it is the end */
  #ends(close: string): boolean {
    const character = this.#next();
    if (character !== close && character !== ",") this.#refuseHere();
    this.#at++;
    return character === close;
  }

  /** Reads a key and its colon. */
  #readKey(keys: Set<string>, isFree: boolean): string {
    if (this.#next() !== '"') this.#refuseHere();
    const key = this.#readString();
    if (keys.has(key)) {
      if (!isFree) refuse(`${shownField(key)}: given twice`);
    } else if (keys.add(key).size > MAX.jsonKeys) {
      refuse(`${shownField(key)}: the object has more than ${MAX.jsonKeys} keys`);
    }
    if (this.#next() !== ":") this.#refuseHere();
    this.#at++;
    return key;
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

  #readWord(): unknown {
    const [name, value] = WORDS.find(([word]) => this.#text.startsWith(word, this.#at)) ?? this.#refuseHere();
    this.#at += name.length;
    return value;
  }

  /** The error does not repeat the number, which may be a secret. */
  #readNumber(key: string): number {
    NUMBER.lastIndex = this.#at;
    const literal = NUMBER.exec(this.#text)?.[0] ?? this.#refuseHere();
    const value = Number(literal);
    if (!Number.isFinite(value) || (/^-?\d+$/.test(literal) && !Number.isSafeInteger(value))) {
      refuse(`${shownField(key || "body")}: a number that is too large to be kept exactly`);
    }
    this.#at += literal.length;
    return value;
  }
}

/** Whether the quote at `end` is escaped: an odd number of backslashes comes before it. */
function isEscaped(text: string, end: number): boolean {
  let start = end;
  while (text[start - 1] === "\\") start--;
  return (end - start) % 2 === 1;
}
