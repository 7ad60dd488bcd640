// JSON as it may come in: strict UTF-8, bounded depth, no key twice, no number that would be altered.
// JSON.parse alone lets the last of two equal keys win and rounds what a double can't hold; both would store
// something else than was sent.
import { Fault, shownField } from "./fault.ts";
import { JSON_DEPTH_MAX } from "./limits.ts";

interface Level {
  /** The keys seen so far; null for an array. */
  readonly keys: Set<string> | null;
  /** Inside a field whose keys are the caller's own: there the last of two equal keys wins. */
  readonly free: boolean;
  atKey: boolean;
  key: string;
}

const NUMBER = /-?\d+(\.\d+)?([eE][+-]?\d+)?/y;

/**
 * The value of a JSON text.
 *
 * @param freeField a top-level key below which equal keys are let pass
 * @throws Fault `invalid_request`
 */
export function parseJson(bytes: Uint8Array, freeField: string | null = null): unknown {
  const text = decodeUtf8(bytes);
  const problem = findProblem(text, freeField);
  if (problem !== null) throw new Fault("invalid_request", problem);
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw new Fault("invalid_request", "body: not valid JSON", { cause });
  }
}

function decodeUtf8(bytes: Uint8Array): string {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch (cause) {
    throw new Fault("invalid_request", "body: not valid UTF-8", { cause });
  }
}

/** One pass over the text, made before parsing. What is no JSON at all is left for JSON.parse to refuse. */
function findProblem(text: string, freeField: string | null): string | null {
  const levels: Level[] = [];
  for (let at = 0; at < text.length; at++) {
    const token = readToken(text, at, levels, freeField);
    if (token.problem !== null) return token.problem;
    at = token.last;
  }
  return null;
}

interface Token {
  /** Index of the token's last character. */
  readonly last: number;
  readonly problem: string | null;
}

function readToken(text: string, at: number, levels: Level[], freeField: string | null): Token {
  const level = levels.at(-1);
  switch (text[at]) {
    case '"': {
      const last = stringEnd(text, at);
      return { last, problem: level?.atKey ? noteKey(level, text.slice(at, last + 1)) : null };
    }
    case "{":
    case "[":
      if (levels.length === JSON_DEPTH_MAX) {
        return { last: at, problem: `body: nested deeper than ${JSON_DEPTH_MAX} levels` };
      }
      levels.push(openLevel(levels, text[at] === "{", freeField));
      break;
    case "}":
    case "]":
      levels.pop();
      break;
    case ",":
      if (level !== undefined) level.atKey = level.keys !== null;
      break;
    default:
      return readNumber(text, at, level?.key || "body");
  }
  return { last: at, problem: null };
}

function openLevel(levels: readonly Level[], isObject: boolean, freeField: string | null): Level {
  const parent = levels.at(-1);
  const free = parent !== undefined && (parent.free || (levels.length === 1 && parent.key === freeField));
  return { keys: isObject ? new Set() : null, free, atKey: isObject, key: parent?.key ?? "" };
}

function noteKey(level: Level, quoted: string): string | null {
  level.atKey = false;
  level.key = unquote(quoted);
  if (level.keys?.has(level.key) && !level.free) return `${shownField(level.key)}: given twice`;
  level.keys?.add(level.key);
  return null;
}

function unquote(quoted: string): string {
  if (!quoted.includes("\\")) return quoted.slice(1, -1);
  try {
    return JSON.parse(quoted) as string;
  } catch {
    return quoted;
  }
}

/** The index of the closing quote of the string that opens at `start`, or the text's last index. */
function stringEnd(text: string, start: number): number {
  for (let at = start + 1; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === '"') return at;
  }
  return text.length;
}

/** The message does not repeat the number, which may have been meant as a secret. */
function readNumber(text: string, at: number, field: string): Token {
  NUMBER.lastIndex = at;
  const literal = NUMBER.exec(text)?.[0] ?? "";
  const last = at + Math.max(literal.length - 1, 0);
  if (isKept(literal)) return { last, problem: null };
  return { last, problem: `${shownField(field)}: a number that is too large to be kept exactly` };
}

function isKept(literal: string): boolean {
  const value = Number(literal);
  return Number.isFinite(value) && (!/^-?\d+$/.test(literal) || Number.isSafeInteger(value));
}
