// JSON-RPC messages as an MCP client posts them on the streaming path: requests, notifications and responses, one or
// a batch. Each is either a call, which is judged and paid for, or part of the connection; what is not known to be
// the connection's is a call, so that nothing comes past the policy by its form.
import { isUtf8 } from "node:buffer";
import { ambiguityOf, isId, problem, type RpcProblem, readName, readShort } from "./jsonrpc.ts";
import { BATCH_MESSAGES_MAX } from "./limits.ts";
import { type Finding, outlineArray, outlineObject, skipSpace, watch } from "./scan.ts";

export interface RpcMessage {
  /** Null for a response. */
  readonly method: string | null;
  /** `params.name` of a `tools/call`. */
  readonly tool: string | null;
  readonly isCall: boolean;
}

export interface RpcMessages {
  readonly ok: true;
  readonly messages: readonly RpcMessage[];
}

const KEYS = [
  watch("jsonrpc"),
  watch("id"),
  watch("method"),
  watch("params", watch("name")),
  watch("result"),
  watch("error"),
];

const OPEN_BRACKET = 0x5b;
const OPEN_BRACE = 0x7b;

const CONNECTION_REQUESTS = new Set(["initialize", "ping"]);

/** Judges whether a body is one JSON-RPC 2.0 message or a batch of them, as strictly as `parseRpcRequest` does. */
export function parseRpcMessages(body: Uint8Array): RpcMessages | RpcProblem {
  if (!isUtf8(body)) return problem("not valid UTF-8");
  const start = skipSpace(body, 0);
  if (body[start] === OPEN_BRACKET) return parseBatch(body, start);
  const { message, end } = parseMessage(body, start);
  if (!message.ok) return message;
  if (skipSpace(body, end) !== body.length) return problem("not valid JSON");
  return { ok: true, messages: [message.value] };
}

function parseBatch(body: Uint8Array, start: number): RpcMessages | RpcProblem {
  const { items, end, problem: why } = outlineArray(body, start, BATCH_MESSAGES_MAX);
  if (why === "too many") return problem(`a batch of more than ${BATCH_MESSAGES_MAX} messages`);
  if (why === "too deep") return problem("nested too deeply");
  if (why !== null || skipSpace(body, end) !== body.length) return problem("not valid JSON");
  if (items.length === 0) return problem("an empty batch");
  const messages: RpcMessage[] = [];
  for (const item of items) {
    const { message } = parseMessage(body, item.start);
    if (!message.ok) return message;
    messages.push(message.value);
  }
  return { ok: true, messages };
}

type Parsed = { readonly ok: true; readonly value: RpcMessage } | RpcProblem;

function parseMessage(body: Uint8Array, start: number): { message: Parsed; end: number } {
  if (body[start] !== OPEN_BRACE) return { message: problem("must be a JSON-RPC message object"), end: -1 };
  const { findings, end, problem: why } = outlineObject(body, start, KEYS);
  if (why === "too deep") return { message: problem("nested too deeply"), end };
  if (why !== null) return { message: problem("not valid JSON"), end };
  return { message: judgeMessage(body, findings), end };
}

function judgeMessage(body: Uint8Array, findings: readonly Finding[]): Parsed {
  for (const [index, { key }] of KEYS.entries()) {
    const ambiguity = ambiguityOf(key, findings[index]);
    if (ambiguity !== null) return problem(ambiguity);
  }
  const [jsonrpc, id, method, params, result, error] = findings;
  if (readShort(body, jsonrpc) !== "2.0") return problem('jsonrpc: must be "2.0"');
  const isAnswer = result?.value != null || error?.value != null;
  if (method?.value == null) {
    if (!isAnswer || id?.value == null) return problem("method: required, but for a response");
    return { ok: true, value: { method: null, tool: null, isCall: false } };
  }
  // What one decoder takes for a request and another for a response is judged as neither.
  if (isAnswer) return problem("result, error: not in a message that has a method");
  const name = readName(body, method);
  if (name === null || name === "") return problem("method: must be a non-empty string");
  const hasId = id?.value != null;
  if (id?.value != null && !isId(body, id.value)) return problem("id: must be a string or a number");
  const isCall = !isConnection(name, hasId);
  if (name !== "tools/call") return { ok: true, value: { method: name, tool: null, isCall } };
  return judgeToolCall(body, params);
}

/** Without an id it is a notification, but a server may act on one that has the name of a request. */
function isConnection(method: string, hasId: boolean): boolean {
  if (!hasId) return method.startsWith("notifications/");
  return CONNECTION_REQUESTS.has(method) || method.endsWith("/list");
}

function judgeToolCall(body: Uint8Array, params: Finding | undefined): Parsed {
  const call = { method: "tools/call", tool: null, isCall: true };
  if (params?.value == null) return { ok: true, value: call };
  if (body[params.value.start] !== OPEN_BRACE) return problem("params: must be an object");
  const [name] = params.inside;
  const ambiguity = ambiguityOf("params.name", name);
  if (ambiguity !== null) return problem(ambiguity);
  const tool = readName(body, name);
  if (tool === null && name?.value != null) return problem("params.name: must be a string");
  return { ok: true, value: { ...call, tool } };
}
