// JSON-RPC 2.0 as MCP uses it, read and rewritten on the bytes themselves: the form of a request, and the replacement of
// an id in place. Bodies are never re-serialised, so big numbers, key order and spacing survive.
import { isUtf8 } from "node:buffer";
import type { Steps } from "../concurrency/steps.ts";
import { hasControls } from "../core/text.ts";
import { type Finding, objectOutline, type Span, skipSpaceInSteps, watch } from "./json-scan.ts";

export interface RpcRequest extends MessageFacts {
  readonly ok: true;
  readonly method: string;
  /** Where the id stands. */
  readonly id: Span;
}

/** What is read of a message that has a method. */
export interface MessageFacts {
  /** `params.name` of a `tools/call`. */
  readonly tool: string | null;
  /** The protocol version that the message itself names in `params._meta` (protocol 2026-07-28 and later). */
  readonly protocolVersion: string | null;
  /** The findings for `PARAMS`, in their order. */
  readonly params: readonly Finding[];
}

export interface RpcProblem {
  readonly ok: false;
  /** Fit for the caller: names the part that is wrong, quotes nothing. */
  readonly problem: string;
}

/** From this version on there is neither a handshake nor a session. */
const SESSIONLESS_SINCE = "2026-07-28";

const VERSION_KEY = "io.modelcontextprotocol/protocolVersion";
/** The params that are judged here, or repeated in headers (wire/mcp-headers.ts). One scan of the body finds them. */
export const PARAMS = ["name", "arguments", "uri", "taskId", "_meta"] as const;
export const PARAMS_KEY = watch(
  "params",
  ...PARAMS.map((key) => (key === "_meta" ? watch(key, watch(VERSION_KEY)) : watch(key))),
);
const REQUEST_KEYS = [watch("jsonrpc"), watch("id"), watch("method"), PARAMS_KEY];
/** Ids, methods and tool names are stored and written to the wire again, so they are bounded. */
const SHORT_BYTES_MAX = 1024;
/** The length of an id in an answer, where every character may be escaped. */
export const ID_TEXT_BYTES_MAX = 6 * SHORT_BYTES_MAX;

const QUOTE = 0x22;
const OPEN_BRACKET = 0x5b;
const OPEN_BRACE = 0x7b;

const decoder = new TextDecoder();
const encoder = new TextEncoder();

/**
 * Judges whether a body is exactly one JSON-RPC 2.0 request. What is read here must be what the upstream
 * reads, so a key that decoders could resolve in two ways (given twice, in another letter case, which some
 * decoders fold, or with U+0000 behind it, where some end) is refused.
 */
export function* parseRpcRequest(body: Uint8Array): Steps<RpcRequest | RpcProblem> {
  if (!isUtf8(body)) return problem("not valid UTF-8");
  const start = yield* skipSpaceInSteps(body, 0);
  if (body[start] === OPEN_BRACKET) return problem("must be one JSON-RPC request, not a batch");
  if (body[start] !== OPEN_BRACE) return problem("must be a JSON-RPC request object");
  const outline = yield* objectOutline(body, start, REQUEST_KEYS);
  if (outline.problem === "too deep") return problem("nested too deeply");
  if (outline.problem !== null) return problem("not valid JSON");
  if ((yield* skipSpaceInSteps(body, outline.end)) !== body.length) return problem("not valid JSON");
  return judgeRequest(body, outline.findings);
}

function judgeRequest(body: Uint8Array, findings: readonly Finding[]): RpcRequest | RpcProblem {
  for (const [index, { key }] of REQUEST_KEYS.entries()) {
    const ambiguity = ambiguityOf(key, findings[index]);
    if (ambiguity !== null) return problem(ambiguity);
  }
  const [jsonrpc, id, method, params] = findings;
  if (readShort(body, jsonrpc) !== "2.0") return problem('jsonrpc: must be "2.0"');
  const name = readMethod(body, method);
  if (typeof name !== "string") return name;
  if (id?.value == null) return problem("id: required, a notification has no result");
  if (!isId(body, id.value)) return problem("id: must be a string or a number");
  const first = params?.value == null ? OPEN_BRACE : body[params.value.start];
  if (name !== TOOLS_CALL && first !== OPEN_BRACE && first !== OPEN_BRACKET) {
    return problem("params: must be an object or an array");
  }
  const judged = judgeParams(body, name, params);
  return "ok" in judged ? judged : { ok: true, method: name, id: id.value, ...judged };
}

const TOOLS_CALL = "tools/call";

/** A server may ignore letter case, and what calls a tool there must not pass for something else here. */
export function readMethod(body: Uint8Array, method: Finding | undefined): string | RpcProblem {
  const name = readName(body, method);
  if (name === null || name === "") return problem(`method: must be a non-empty string ${OF_NAMES}`);
  const isCalling = name.toUpperCase().toLowerCase() === TOOLS_CALL;
  return isCalling && name !== TOOLS_CALL ? problem(`method: must be ${TOOLS_CALL} in lower case`) : name;
}

const NO_PARAMS: MessageFacts = { tool: null, protocolVersion: null, params: [] };

/** The params of a message that has a method. */
export function judgeParams(body: Uint8Array, method: string, params: Finding | undefined): MessageFacts | RpcProblem {
  if (params?.value == null) return NO_PARAMS;
  const isCall = method === TOOLS_CALL;
  if (isCall && body[params.value.start] !== OPEN_BRACE) return problem("params: must be an object");
  const [name, given, , , meta] = params.inside;
  const ambiguity =
    ambiguityOf("params._meta", meta) ??
    ambiguityOf(`params._meta.${VERSION_KEY}`, meta?.inside[0]) ??
    (isCall ? (ambiguityOf("params.name", name) ?? ambiguityOf("params.arguments", given)) : null);
  if (ambiguity !== null) return problem(ambiguity);
  const judged = { protocolVersion: readShort(body, meta?.inside[0]), params: params.inside };
  const tool = isCall ? readName(body, name) : null;
  if (isCall && tool === null && name?.value != null) {
    return problem(`params.name: must be a string ${OF_NAMES}`);
  }
  return { tool, ...judged };
}

/** Null when every decoder reads the key in one way. */
export function ambiguityOf(field: string, finding: Finding | undefined): string | null {
  if (finding?.isMiscased) return `${field}: must be spelled exactly like this`;
  return finding?.isRepeated ? `${field}: given twice` : null;
}

export function problem(text: string): RpcProblem {
  return { ok: false, problem: text };
}

export function readShort(body: Uint8Array, finding: Finding | undefined): string | null {
  const span = finding?.value ?? null;
  if (span === null || body[span.start] !== QUOTE || span.end - span.start > SHORT_BYTES_MAX) return null;
  return String(JSON.parse(decoder.decode(body.subarray(span.start, span.end))));
}

const OF_NAMES = `of at most ${SHORT_BYTES_MAX} bytes, without control characters or blanks around it`;

/**
 * A string that all decoders read alike: no lone surrogates, which decoders replace, no control characters, at which some
 * stop, and no blanks around it, which some strip.
 */
function readName(body: Uint8Array, finding: Finding | undefined): string | null {
  const name = readShort(body, finding);
  return name?.isWellFormed() && !hasControls(name) && name.trim() === name ? name : null;
}

export function isId(body: Uint8Array, span: Span): boolean {
  if (span.end - span.start > SHORT_BYTES_MAX) return false;
  const first = body[span.start];
  return first === QUOTE || first === 0x2d || (first !== undefined && first >= 0x30 && first <= 0x39);
}

/** Whether a protocol version is one of those without handshake and session. */
export function isSessionless(version: string | null): boolean {
  return version !== null && /^\d{4}-\d{2}-\d{2}$/.test(version) && version >= SESSIONLESS_SINCE;
}

/** `body` with the bytes of `span` replaced. */
export function splice(body: Uint8Array, span: Span, replacement: Uint8Array): Uint8Array {
  const out = new Uint8Array(body.length - (span.end - span.start) + replacement.length);
  out.set(body.subarray(0, span.start));
  out.set(replacement, span.start);
  out.set(body.subarray(span.end), span.start + replacement.length);
  return out;
}

/**
 * Ids, given as JSON text, are equal as values: a server may escape a string in another way, or round a number to a
 * double. An error may name none, for the server could not read it.
 */
export function isSameId(answered: string, sent: string, isError: boolean): boolean {
  if (answered === sent) return true;
  if (answered === "null") return isError;
  return JSON.parse(answered) === JSON.parse(sent);
}

/** The JSON text of a message, as bytes. */
export function encodeRpc(message: object): Uint8Array {
  return encoder.encode(JSON.stringify({ jsonrpc: "2.0", ...message }));
}
