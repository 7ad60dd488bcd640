// The headers in which an MCP request of protocol 2026-07-28 and later repeats what its body says: `Mcp-Method`, `Mcp-Name`
// and `Mcp-Param-*`. Routers and meters in front of a server rely on them, while the body is what was judged and paid for.
// So a header that contradicts the body makes the request invalid.

import { MAX } from "../kernel/limits.ts";
import { parseJson } from "./json.ts";
import type { ByteRange, FoundKey } from "./json-scan.ts";
import { ambiguityOf, PARAMS, type RpcMessage } from "./jsonrpc.ts";

const METHOD = "mcp-method";
const NAME = "mcp-name";
const PARAM = "mcp-param-";

/** Which of its params is the name of a message. Messages of other methods have none. */
const NAME_OF: ReadonlyMap<string, "name" | "uri" | "taskId"> = new Map([
  ["tools/call", "name"],
  ["prompts/get", "name"],
  ["resources/read", "uri"],
  ["resources/subscribe", "uri"],
  ["resources/unsubscribe", "uri"],
  ["tasks/get", "taskId"],
  ["tasks/update", "taskId"],
  ["tasks/cancel", "taskId"],
  ["tasks/result", "taskId"],
]);

const QUOTE = 0x22;

/** @param name in lower case */
export function isMirror(name: string): boolean {
  return name === METHOD || name === NAME || isParam(name);
}

/** Servers that turn headers into variables (CGI, WSGI) read `_` as `-`. */
function isParam(name: string): boolean {
  return name.replace("_", "-").startsWith(PARAM);
}

/** A message as it was judged, so that it is not read a second time. */
export type JudgedMessage = Pick<RpcMessage, "method" | "params">;

/**
 * The first header that contradicts the body; null when none does. Which headers must be there is for the server to
 * judge.
 *
 * @param judged what `body` is; null for a batch
 */
export function mirrorProblem(headers: Headers, body: Uint8Array, judged: JudgedMessage | null) {
  const echoed = [...headers].filter(([name]) => isMirror(name));
  if (echoed.length === 0) return null;
  if (echoed.length > MAX.echoedHeaders) {
    return { header: "Mcp-Param-*", problem: `there are more than ${MAX.echoedHeaders} of them` };
  }
  const message = judged === null ? null : readMessage(body, judged);
  for (const [header, value] of echoed) {
    const problem = message === null ? "says of a batch what one message is" : judge(header, value, message);
    if (problem !== null) return { header: shownHeader(header), problem };
  }
  return null;
}

/** `mcp-name` as it is written. */
function shownHeader(name: string): string {
  return name.replace(/^mcp-(method|name|param)/, (_, word: string) => `Mcp-${word[0]?.toUpperCase()}${word.slice(1)}`);
}

interface Message {
  readonly method: string | null;
  /** What it names; null when its method has no name, or decoders may disagree about it. */
  readonly name: string | null;
  /** Empty when it has none, or decoders may disagree about them. */
  readonly arguments: Arguments;
}

function readMessage(body: Uint8Array, { method, params }: JudgedMessage): Message {
  const find = (key: (typeof PARAMS)[number]) => params[PARAMS.indexOf(key)];
  const key = NAME_OF.get(method ?? "");
  return {
    method,
    name: key === undefined ? null : readText(body, key, find(key)),
    arguments: readArguments(body, method === "tools/call" ? find("arguments") : undefined),
  };
}

function readText(body: Uint8Array, key: string, finding: FoundKey | undefined): string | null {
  const span = certain(key, finding);
  // Longer than any header, however it is escaped.
  if (span === null || body[span.start] !== QUOTE || span.end - span.start > 128 * 1024) return null;
  return String(JSON.parse(new TextDecoder().decode(body.subarray(span.start, span.end))));
}

function readArguments(body: Uint8Array, finding: FoundKey | undefined): Arguments {
  const span = certain("arguments", finding);
  // Arguments are read whole to find the one that a header repeats. That must not hold up others: 10 ms at most.
  if (span === null || span.end - span.start > 16 * 1024) return argumentsOf(null);
  try {
    return argumentsOf(parseJson(body.subarray(span.start, span.end)));
  } catch {
    // Equal keys, or numbers that decoders read differently.
    return argumentsOf(null);
  }
}

/** Null when decoders may read different things. */
function certain(key: string, finding: FoundKey | undefined): ByteRange | null {
  return ambiguityOf(key, finding) === null ? (finding?.value ?? null) : null;
}

function judge(header: string, value: string, message: Message): string | null {
  const said = decode(value);
  if (said === null) return "must be visible ASCII, or =?base64?…?= of UTF-8";
  if (isParam(header)) {
    const wanted = header.slice(PARAM.length);
    return saysArgument(wanted, said, message.arguments) ? null : "is none of the body's arguments";
  }
  if (header === METHOD) return said === message.method ? null : "is not the body's method";
  return said === message.name ? null : "is not what the body names";
}

/** Blanks around a value are stripped on the way. */
const PLAIN = /^(?![\t ])[\t\x20-\x7e]*(?<![\t ])$/;
const WRAPPED = /^=\?base64\?(.*)\?=$/i;
const WRAPPED_EXACTLY = /^=\?base64\?((?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?)\?=$/;

/** Null for a value that receivers may decode in more than one way. */
function decode(value: string): string | null {
  if (!PLAIN.test(value)) return null;
  if (!WRAPPED.test(value)) return value;
  const base64 = WRAPPED_EXACTLY.exec(value)?.[1];
  if (base64 === undefined) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Buffer.from(base64, "base64"));
  } catch {
    return null;
  }
}

/** The values of the arguments, collected once for all headers. */
interface Arguments {
  readonly all: HeaderValues;
  /** By their folded names. */
  readonly named: ReadonlyMap<string, HeaderValues>;
}

interface HeaderValues {
  readonly numbers: Set<number>;
  /** The texts of all values that are no numbers. */
  readonly texts: Set<string>;
}

const noValues = (): HeaderValues => ({ numbers: new Set(), texts: new Set() });

/** Collects values inside objects only: headers never repeat the items of a list. */
function argumentsOf(given: unknown): Arguments {
  const all = noValues();
  const named = new Map<string, HeaderValues>();
  const left: [key: string, value: unknown][] = [["", given]];
  for (let next = left.pop(); next !== undefined; next = left.pop()) {
    const [key, value] = next;
    if (value === null || Array.isArray(value)) continue;
    if (typeof value === "object") {
      left.push(...Object.entries(value));
      continue;
    }
    const name = folded(key);
    const same = named.get(name) ?? noValues();
    named.set(name, same);
    for (const values of [all, same]) {
      if (typeof value === "number") values.numbers.add(value);
      else values.texts.add(String(value));
    }
  }
  return { all, named };
}

/**
 * The tool's schema (`x-mcp-header`) says which argument a header repeats, but only the server and its clients have it. A
 * header mostly has the name of its argument. So if an argument has that name, at whatever depth, that is the one;
 * otherwise it may be any.
 */
function saysArgument(wanted: string, said: string, { all, named }: Arguments): boolean {
  const { numbers, texts } = named.get(folded(wanted)) ?? all;
  if (texts.has(said)) return true;
  const number = Number(said);
  return numbers.has(number) && (DECIMAL.test(said) || said === String(number));
}

function folded(name: string): string {
  return name.toLowerCase().replace(/[-_]/g, "");
}

const DECIMAL = /^-?\d+(\.\d+)?$/;
