// JSON-RPC 2.0 as MCP uses it, read and rewritten on the bytes themselves: the form of a request, and the
// exchange of an id in place. Bodies are never re-serialised, so big numbers, key order and spacing survive.
import { isUtf8 } from "node:buffer";
import { type Finding, outlineObject, type Span, skipSpace, watch } from "./scan.ts";

export interface RpcRequest {
  readonly ok: true;
  readonly method: string;
  /** `params.name` of a `tools/call`. */
  readonly tool: string | null;
  /** Where the id stands. */
  readonly id: Span;
  /** The protocol version that the request itself names in `params._meta` (protocol 2026-07-28 and later). */
  readonly protocolVersion: string | null;
}

export interface RpcProblem {
  readonly ok: false;
  /** Fit for the caller: names the part that is wrong, quotes nothing. */
  readonly problem: string;
}

/** From this version on there is neither a handshake nor a session. */
const SESSIONLESS_SINCE = "2026-07-28";

const VERSION_KEY = "io.modelcontextprotocol/protocolVersion";
const REQUEST_KEYS = [
  watch("jsonrpc"),
  watch("id"),
  watch("method"),
  watch("params", watch("name"), watch("_meta", watch(VERSION_KEY))),
];
const ANSWER_KEYS = [watch("id"), watch("method"), watch("result"), watch("error", watch("code"))];
/** Ids, methods and tool names are stored and written to the wire again, so they are bounded. */
const SHORT_BYTES_MAX = 1024;

const QUOTE = 0x22;
const OPEN_BRACKET = 0x5b;
const OPEN_BRACE = 0x7b;

const decoder = new TextDecoder();
const encoder = new TextEncoder();

/**
 * Judges whether a body is exactly one JSON-RPC 2.0 request. What is read here must be what the upstream
 * reads, so a key that decoders could resolve in two ways (given twice, or in another letter case, which
 * some decoders fold) is refused.
 */
export function parseRpcRequest(body: Uint8Array): RpcRequest | RpcProblem {
  if (!isUtf8(body)) return problem("not valid UTF-8");
  const start = skipSpace(body, 0);
  if (body[start] === OPEN_BRACKET) return problem("must be one JSON-RPC request, not a batch");
  if (body[start] !== OPEN_BRACE) return problem("must be a JSON-RPC request object");
  const outline = outlineObject(body, start, REQUEST_KEYS);
  if (outline.problem === "too deep") return problem("nested too deeply");
  if (outline.problem !== null || skipSpace(body, outline.end) !== body.length) {
    return problem("not valid JSON");
  }
  return judgeRequest(body, outline.findings);
}

function judgeRequest(body: Uint8Array, findings: readonly Finding[]): RpcRequest | RpcProblem {
  for (const [index, { key }] of REQUEST_KEYS.entries()) {
    const ambiguity = ambiguityOf(key, findings[index]);
    if (ambiguity !== null) return problem(ambiguity);
  }
  const [jsonrpc, id, method, params] = findings;
  if (readShort(body, jsonrpc) !== "2.0") return problem('jsonrpc: must be "2.0"');
  const name = readName(body, method);
  if (name === null || name === "") return problem("method: must be a non-empty string");
  if (id?.value == null) return problem("id: required, a notification has no result");
  if (!isId(body, id.value)) return problem("id: must be a string or a number");
  const request = { ok: true, method: name, tool: null, id: id.value, protocolVersion: null } as const;
  return params?.value == null ? request : judgeParams(body, request, params.value, params.inside);
}

function judgeParams(
  body: Uint8Array,
  request: RpcRequest,
  params: Span,
  [name, meta]: readonly Finding[],
): RpcRequest | RpcProblem {
  const isCall = request.method === "tools/call";
  const first = body[params.start];
  if (isCall && first !== OPEN_BRACE) return problem("params: must be an object");
  if (first !== OPEN_BRACE && first !== OPEN_BRACKET) {
    return problem("params: must be an object or an array");
  }
  const protocolVersion = meta?.value == null ? null : readShort(body, meta.inside[0]);
  if (!isCall) return { ...request, protocolVersion };
  const ambiguity = ambiguityOf("params.name", name);
  if (ambiguity !== null) return problem(ambiguity);
  const tool = readName(body, name);
  if (tool === null && name?.value != null) return problem("params.name: must be a string");
  return { ...request, tool, protocolVersion };
}

export function ambiguityOf(field: string, finding: Finding | undefined): string | null {
  if (finding?.isMiscased) return `${field}: must be lower case`;
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

/** A string that can be stored and compared: no lone surrogates, which decoders replace, no control characters. */
export function readName(body: Uint8Array, finding: Finding | undefined): string | null {
  const name = readShort(body, finding);
  // biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what it looks for.
  return name?.isWellFormed() && !/[\u0000-\u001f\u007f]/.test(name) ? name : null;
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

export interface RpcAnswer {
  readonly id: Span;
  /** The error code; null for a result. */
  readonly code: number | null;
}

/**
 * The response to the request with this id, when `message` is that; null for notifications, requests and
 * other responses. An error with a null id is taken for it too: the server could not read the id. A message
 * that is cut off is read as far as it goes.
 *
 * @param wireId the id as it was sent, as JSON text
 */
export function findAnswer(message: Uint8Array, wireId: string): RpcAnswer | null {
  const { findings } = outlineObject(message, skipSpace(message, 0), ANSWER_KEYS);
  const [id, method, , error] = findings;
  if (id?.value == null || method?.value != null) return null;
  const isError = error?.value != null;
  if (!sameId(readId(message, id.value), wireId, isError)) return null;
  return { id: id.value, code: isError ? readCode(message, error.inside[0]) : null };
}

function readId(message: Uint8Array, span: Span): string {
  if (span.end - span.start > 6 * SHORT_BYTES_MAX) return "";
  return decoder.decode(message.subarray(span.start, span.end));
}

/** Ids are equal as values: a server may escape a string in another way, or round a number to a double. */
function sameId(answered: string, sent: string, isError: boolean): boolean {
  if (answered === sent) return true;
  if (answered === "null") return isError;
  if (answered === "") return false;
  return JSON.parse(answered) === JSON.parse(sent);
}

function readCode(message: Uint8Array, code: Finding | undefined): number {
  return code?.value == null ? Number.NaN : Number(readId(message, code.value));
}

/** `message` with the id at `span` replaced by `id`, given as JSON text; a null id stays. */
export function withId(message: Uint8Array, span: Span, id: Uint8Array): Uint8Array {
  const current = message.subarray(span.start, span.end);
  const isNull = decoder.decode(current) === "null";
  return isNull || Buffer.compare(current, id) === 0 ? message : splice(message, span, id);
}

/** The JSON text of a message, as bytes. */
export function encodeRpc(message: object): Uint8Array {
  return encoder.encode(JSON.stringify({ jsonrpc: "2.0", ...message }));
}
