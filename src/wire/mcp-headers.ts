// Checks the headers in which an MCP request of protocol 2026-07-28 and later repeats parts of its body: `Mcp-Method`,
// `Mcp-Name` and `Mcp-Param-*`. Routers and meters in front of a server rely on these headers, while the gateway judges the
// body and takes payment for it. So a header that contradicts the body makes the request invalid.
import { attempt } from "../core/fault.ts";
import { MAX } from "../kernel/limits.ts";
import { parseJson } from "./json.ts";
import type { ByteRange, FoundKey } from "./json-scan.ts";
import { ambiguityOf, PARAMS, type RpcMessage } from "./jsonrpc.ts";

export const SESSION_HEADER = "mcp-session-id";
export const VERSION_HEADER = "mcp-protocol-version";

const METHOD = "mcp-method";
const NAME = "mcp-name";
const PARAM = "mcp-param-";

/** The param that `Mcp-Name` repeats, by method. Messages of other methods have no name. */
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

/** @param name in lower case */
export const isEchoedHeader = (name: string): boolean => name === METHOD || name === NAME || isParam(name);

/** Counts `_` as `-`, as servers do that turn headers into variables (CGI, WSGI). */
const isParam = (name: string): boolean => name.replace("_", "-").startsWith(PARAM);

/** A message that was judged before, so that it is not read a second time. */
export type JudgedMessage = Pick<RpcMessage, "method" | "params">;

/**
 * The first header that contradicts the body; null if none does. Missing headers are left for the server to judge.
 * @param judged the message in `body`; null for a batch
 */
export function echoProblem(headers: Headers, body: Uint8Array, judged: JudgedMessage | null) {
  const echoed = [...headers].filter(([name]) => isEchoedHeader(name));
  if (echoed.length === 0) return null;
  const most = MAX.echoedHeaders;
  if (echoed.length > most) return { header: "Mcp-Param-*", problem: `there are more than ${most} of them` };
  const message = judged === null ? null : readMessage(body, judged);
  for (const [header, value] of echoed) {
    const problem = message === null ? "must not be sent with a batch" : judge(header, value, message);
    if (problem !== null) return { header: shownHeader(header), problem };
  }
  return null;
}

/** The header's name in its usual letter case, such as `Mcp-Name`. */
const shownHeader = (name: string): string =>
  name.replace(/^mcp-(method|name|param)/, (_, word: string) => `Mcp-${word[0]?.toUpperCase()}${word.slice(1)}`);

interface Message {
  readonly method: string | null;
  /** The value that `Mcp-Name` repeats; null if the method has none, or decoders may read it differently. */
  readonly name: string | null;
  /** Empty if there are none, or decoders may read them differently. */
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
  // Longer texts can't equal a header, however they are escaped.
  if (span === null || body[span.start] !== 0x22 || span.end - span.start > 128 * 1024) return null;
  return String(JSON.parse(new TextDecoder().decode(body.subarray(span.start, span.end))));
}

function readArguments(body: Uint8Array, finding: FoundKey | undefined): Arguments {
  const span = certain("arguments", finding);
  // All arguments are parsed to find the one that a header repeats, which must not block the event loop: 16 KiB take 10 ms.
  if (span === null || span.end - span.start > 16 * 1024) return argumentsOf(null);
  // Arguments that have duplicate keys, or numbers that decoders read differently, count as none.
  return argumentsOf(attempt(() => parseJson(body.subarray(span.start, span.end))) ?? null);
}

/** The position of a value that all decoders read alike; null otherwise. */
const certain = (key: string, finding: FoundKey | undefined): ByteRange | null =>
  ambiguityOf(key, finding) === null ? (finding?.value ?? null) : null;

function judge(header: string, value: string, message: Message): string | null {
  const stated = decode(value);
  if (stated === null) return "must be visible ASCII, or =?base64?…?= of UTF-8";
  if (isParam(header)) {
    const argument = header.slice(PARAM.length);
    return namesArgument(argument, stated, message.arguments) ? null : "is none of the body's arguments";
  }
  if (header === METHOD) return stated === message.method ? null : "is not the body's method";
  return stated === message.name ? null : "is not what the body names";
}

/** A value without blanks around it, which receivers strip. */
const PLAIN = /^(?![\t ])[\t\x20-\x7e]*(?<![\t ])$/;
const WRAPPED = /^=\?base64\?(.*)\?=$/i;
const WRAPPED_EXACTLY = /^=\?base64\?((?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?)\?=$/;

/** The decoded value; null if receivers may decode it in more than one way. */
function decode(value: string): string | null {
  if (!PLAIN.test(value)) return null;
  if (!WRAPPED.test(value)) return value;
  const base64 = WRAPPED_EXACTLY.exec(value)?.[1];
  if (base64 === undefined) return null;
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  return attempt(() => decoder.decode(Buffer.from(base64, "base64"))) ?? null;
}

/** The values of the arguments, collected once for all headers: numbers, and all others as texts. */
interface Arguments {
  readonly all: ReadonlySet<number | string>;
  /** By the folded names of their arguments. */
  readonly named: ReadonlyMap<string, ReadonlySet<number | string>>;
}

/** Collects values inside objects only: headers never repeat the items of a list. */
function argumentsOf(given: unknown): Arguments {
  const all = new Set<number | string>();
  const named = new Map<string, Set<number | string>>();
  const left: [key: string, value: unknown][] = [["", given]];
  for (let next = left.pop(); next !== undefined; next = left.pop()) {
    const [key, value] = next;
    if (value === null || Array.isArray(value)) continue;
    if (typeof value === "object") {
      left.push(...Object.entries(value));
      continue;
    }
    const stated = typeof value === "number" ? value : String(value);
    all.add(stated);
    named.getOrInsertComputed(folded(key), () => new Set()).add(stated);
  }
  return { all, named };
}

/**
 * Whether the header's value is that of its argument. The tool's schema (`x-mcp-header`) says which argument a header repeats,
 * but only the server and its clients have the schema. A header mostly has the name of its argument, so if arguments have that
 * name, at whatever depth, the value must be one of theirs; otherwise it may be that of any argument.
 */
function namesArgument(name: string, stated: string, { all, named }: Arguments): boolean {
  const values = named.get(folded(name)) ?? all;
  if (values.has(stated)) return true;
  const number = Number(stated);
  return values.has(number) && (DECIMAL.test(stated) || stated === String(number));
}

const folded = (name: string): string => name.toLowerCase().replace(/[-_]/g, "");

const DECIMAL = /^-?\d+(\.\d+)?$/;
