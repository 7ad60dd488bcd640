// JSON-RPC 2.0 as MCP uses it: judges the one request of a polled call, and the messages that an MCP client posts on the
// streaming path. Messages are read and rewritten as bytes, so that big numbers, key order and spacing survive.
//
// The gateway must read what the upstream will read. So it refuses keys that decoders could read in two ways: given twice, in
// another letter case, which some decoders ignore, or followed by U+0000, where some stop.
import { isUtf8 } from "node:buffer";
import { hasControls } from "../core/text.ts";
import { MAX } from "../kernel/limits.ts";
import { wholeBodyTask } from "./body.ts";
import type { ByteRange, FoundKey, Items, Watched } from "./json-scan.ts";
import { arrayOutline, objectOutline, skipSpace, watch } from "./json-scan.ts";

export interface RpcRequest extends MessageFacts {
  readonly ok: true;
  readonly method: string;
  /** The position of the id in the body. */
  readonly id: ByteRange;
}

/** What the gateway reads from a message that has a method. */
interface MessageFacts {
  /** `params.name` of a `tools/call`. */
  readonly tool: string | null;
  /** The protocol version that the message itself names in `params._meta` (protocol 2026-07-28 and later). */
  readonly protocolVersion: string | null;
  /** The findings for `PARAMS`, in their order. */
  readonly params: readonly FoundKey[];
}

export interface RpcProblem {
  readonly ok: false;
  /** For the caller: names the wrong part and quotes nothing. */
  readonly problem: string;
}

/** From this protocol version on there is neither a handshake nor a session. */
const SESSIONLESS_SINCE = "2026-07-28";

const VERSION_KEY = "io.modelcontextprotocol/protocolVersion";
/** The params that are judged here, or repeated in headers (wire/mcp-headers.ts). One scan of the body finds all of them. */
export const PARAMS = ["name", "arguments", "uri", "taskId", "_meta"] as const;
const PARAMS_KEY = watch(
  "params",
  ...PARAMS.map((key) => (key === "_meta" ? watch(key, watch(VERSION_KEY)) : watch(key))),
);
const REQUEST_KEYS = [watch("jsonrpc"), watch("id"), watch("method"), PARAMS_KEY];
/** The longest id in a response, where every character may be escaped. */
export const ID_TEXT_BYTES_MAX = 6 * MAX.rpcNameBytes;

const [QUOTE, OPEN_BRACKET, OPEN_BRACE] = [0x22, 0x5b, 0x7b];

const decoder = new TextDecoder();

export const RPC_REQUEST = wholeBodyTask("rpc request", parseRpcRequest);
export const RPC_MESSAGES = wholeBodyTask("rpc messages", parseRpcMessages);

/** Judges whether a body is exactly one JSON-RPC 2.0 request. */
export function parseRpcRequest(body: Uint8Array): RpcRequest | RpcProblem {
  if (!isUtf8(body)) return problem("not valid UTF-8");
  const start = skipSpace(body, 0);
  if (body[start] === OPEN_BRACKET) return problem("must be one JSON-RPC request, not a batch");
  if (body[start] !== OPEN_BRACE) return problem("must be a JSON-RPC request object");
  const { findings, ...outline } = objectOutline(body, start, REQUEST_KEYS);
  return problemOf(body, outline) ?? judgeRequest(body, findings);
}

/** Why the body is not one JSON text; null when it is. */
function problemOf(body: Uint8Array, { end, problem: why }: Pick<Items, "end" | "problem">): RpcProblem | null {
  if (why === "too many") return problem(`a batch of more than ${MAX.batchMessages} messages`);
  if (why === "too deep") return problem("nested too deeply");
  const isWhole = why === null && skipSpace(body, end) === body.length;
  return isWhole ? null : problem("not valid JSON");
}

function judgeRequest(body: Uint8Array, findings: readonly FoundKey[]): RpcRequest | RpcProblem {
  const ambiguity = firstAmbiguity(REQUEST_KEYS, findings);
  if (ambiguity !== null) return problem(ambiguity);
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

/** A request, a notification or a response, on the streaming path. */
export interface RpcMessage extends MessageFacts {
  /** Null for a response. */
  readonly method: string | null;
  /** Whether the message is judged by the policy and paid for; otherwise it is part of the connection. */
  readonly isCall: boolean;
}

export interface RpcMessages {
  readonly ok: true;
  readonly isBatch: boolean;
  readonly messages: readonly RpcMessage[];
}

const MESSAGE_KEYS = [...REQUEST_KEYS, watch("result"), watch("error")];

/** Requests of the connection itself, which no tool, resource or prompt answers. Requests named `…/list` count as such too. */
const CONNECTION_REQUESTS = new Set([
  ...["initialize", "ping", "server/discover", "subscriptions/listen", "completion/complete", "logging/setLevel"],
  ...["tasks/get", "tasks/update", "tasks/cancel", "resources/subscribe", "resources/unsubscribe"],
]);

/** Judges whether a body is one JSON-RPC 2.0 message or a batch of them, as strictly as `parseRpcRequest` does. */
export function parseRpcMessages(body: Uint8Array): RpcMessages | RpcProblem {
  if (!isUtf8(body)) return problem("not valid UTF-8");
  const start = skipSpace(body, 0);
  if (body[start] === OPEN_BRACKET) return parseBatch(body, start);
  if (body[start] !== OPEN_BRACE) return NO_MESSAGE;
  const { findings, ...outline } = objectOutline(body, start, MESSAGE_KEYS);
  const malformed = problemOf(body, outline);
  if (malformed !== null) return malformed;
  const message = judgeMessage(body, findings);
  return "ok" in message ? message : { ok: true, isBatch: false, messages: [message] };
}

/** Each message is judged while the batch is read, so nothing is read twice. */
function parseBatch(body: Uint8Array, start: number): RpcMessages | RpcProblem {
  const outline = arrayOutline(body, start, MAX.batchMessages, MESSAGE_KEYS);
  const malformed = problemOf(body, outline);
  if (malformed !== null) return malformed;
  if (outline.items.length === 0) return problem("an empty batch");
  const messages: RpcMessage[] = [];
  for (const item of outline.items) {
    const message = body[item.start] === OPEN_BRACE ? judgeMessage(body, item.findings) : NO_MESSAGE;
    if ("ok" in message) return message;
    messages.push(message);
  }
  return { ok: true, isBatch: true, messages };
}

const NO_MESSAGE = problem("must be a JSON-RPC message object");

const RESPONSE: RpcMessage = { method: null, tool: null, isCall: false, protocolVersion: null, params: [] };

function judgeMessage(body: Uint8Array, findings: readonly FoundKey[]): RpcMessage | RpcProblem {
  const ambiguity = firstAmbiguity(MESSAGE_KEYS, findings);
  if (ambiguity !== null) return problem(ambiguity);
  const [jsonrpc, id, method, params, result, error] = findings;
  if (readShort(body, jsonrpc) !== "2.0") return problem('jsonrpc: must be "2.0"');
  const isAnswer = result?.value != null || error?.value != null;
  if (method?.value == null) {
    if (!isAnswer || id?.value == null) return problem("method: required, but for a response");
    return RESPONSE;
  }
  // Refused, since one decoder may take the message for a request and another one for a response.
  if (isAnswer) return problem("result, error: not in a message that has a method");
  const name = readMethod(body, method);
  if (typeof name !== "string") return name;
  if (id?.value != null && !isId(body, id.value)) return problem("id: must be a string or a number");
  const judged = judgeParams(body, name, params);
  return "ok" in judged ? judged : { method: name, isCall: !isConnection(name, id?.value != null), ...judged };
}

/** Any other message is a call, so that nothing gets past the policy. A server may act on a notification named like a request. */
function isConnection(method: string, hasId: boolean): boolean {
  if (!hasId) return method.startsWith("notifications/");
  return CONNECTION_REQUESTS.has(method) || method.endsWith("/list");
}

const TOOLS_CALL = "tools/call";

/** Refuses `tools/call` in another letter case, since a server may ignore case and call the tool. */
function readMethod(body: Uint8Array, method: FoundKey | undefined): string | RpcProblem {
  const name = readName(body, method);
  if (name === null || name === "") return problem(`method: must be a non-empty string ${OF_NAMES}`);
  const isCalling = name.toUpperCase().toLowerCase() === TOOLS_CALL;
  return isCalling && name !== TOOLS_CALL ? problem(`method: must be ${TOOLS_CALL} in lower case`) : name;
}

function judgeParams(body: Uint8Array, method: string, params: FoundKey | undefined): MessageFacts | RpcProblem {
  if (params?.value == null) return { tool: null, protocolVersion: null, params: [] };
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
  const isBad = isCall && tool === null && name?.value != null;
  return isBad ? problem(`params.name: must be a string ${OF_NAMES}`) : { tool, ...judged };
}

function firstAmbiguity(keys: readonly Watched[], findings: readonly FoundKey[]): string | null {
  for (const [index, { key }] of keys.entries()) {
    const ambiguity = ambiguityOf(key, findings[index]);
    if (ambiguity !== null) return ambiguity;
  }
  return null;
}

/** Why decoders may read the key differently; null if they can't. */
export function ambiguityOf(field: string, finding: FoundKey | undefined): string | null {
  if (finding?.isMiscased) return `${field}: must be spelled exactly like this`;
  return finding?.isRepeated ? `${field}: given twice` : null;
}

function problem(text: string): RpcProblem {
  return { ok: false, problem: text };
}

function readShort(body: Uint8Array, finding: FoundKey | undefined): string | null {
  const span = finding?.value ?? null;
  if (span === null || body[span.start] !== QUOTE || span.end - span.start > MAX.rpcNameBytes) return null;
  return String(JSON.parse(decoder.decode(body.subarray(span.start, span.end))));
}

const OF_NAMES = `of at most ${MAX.rpcNameBytes} bytes, without control characters or blanks around it`;

/** Null unless all decoders read the string alike: some replace lone surrogates, stop at control characters or strip blanks. */
function readName(body: Uint8Array, finding: FoundKey | undefined): string | null {
  const name = readShort(body, finding);
  return name?.isWellFormed() && !hasControls(name) && name.trim() === name ? name : null;
}

function isId(body: Uint8Array, span: ByteRange): boolean {
  if (span.end - span.start > MAX.rpcNameBytes) return false;
  const first = body[span.start];
  return first === QUOTE || first === 0x2d || (first !== undefined && first >= 0x30 && first <= 0x39);
}

export function isSessionless(version: string | null): boolean {
  return version !== null && /^\d{4}-\d{2}-\d{2}$/.test(version) && version >= SESSIONLESS_SINCE;
}

export function splice(body: Uint8Array, span: ByteRange, replacement: Uint8Array): Uint8Array {
  const out = new Uint8Array(body.length - (span.end - span.start) + replacement.length);
  out.set(body.subarray(0, span.start));
  out.set(replacement, span.start);
  out.set(body.subarray(span.end), span.start + replacement.length);
  return out;
}

/**
 * Whether two ids, given as JSON text, are equal as values: a server may escape a string in another way, or round a number to a
 * double. An error may have the id null, since the server may not have been able to read the id.
 */
export function isSameId(answered: string, sent: string, isError: boolean): boolean {
  if (answered === sent) return true;
  if (answered === "null") return isError;
  return JSON.parse(answered) === JSON.parse(sent);
}

export function encodeRpc(message: object): Uint8Array {
  return new TextEncoder().encode(JSON.stringify({ jsonrpc: "2.0", ...message }));
}
