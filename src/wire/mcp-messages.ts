// JSON-RPC messages as an MCP client posts them on the streaming path: requests, notifications and responses, one or
// a batch. Each is either a call, which is judged and paid for, or part of the connection. A message not known to be
// part of the connection is a call, so that nothing gets past the policy by its form.
import { isUtf8 } from "node:buffer";
import type { Steps } from "../concurrency/steps.ts";
import { BATCH_MESSAGES_MAX } from "../core/limits.ts";
import { arrayOutline, type Finding, type Items, objectOutline, skipSpaceInSteps, watch } from "./json-scan.ts";
import {
  ambiguityOf,
  isId,
  judgeParams,
  PARAMS_KEY,
  problem,
  type RpcProblem,
  readMethod,
  readShort,
} from "./jsonrpc.ts";

export interface RpcMessage {
  /** Null for a response. */
  readonly method: string | null;
  /** `params.name` of a `tools/call`. */
  readonly tool: string | null;
  readonly isCall: boolean;
  readonly protocolVersion: string | null;
  /** Of `PARAMS`, in their order. */
  readonly params: readonly Finding[];
}

export interface RpcMessages {
  readonly ok: true;
  readonly isBatch: boolean;
  readonly messages: readonly RpcMessage[];
}

const KEYS = [watch("jsonrpc"), watch("id"), watch("method"), PARAMS_KEY, watch("result"), watch("error")];

const OPEN_BRACKET = 0x5b;
const OPEN_BRACE = 0x7b;

/** Beside every list: what the connection and its dialogues need, and no tool, resource or prompt answers. */
const CONNECTION_REQUESTS = new Set([
  ...["initialize", "ping", "server/discover", "subscriptions/listen", "completion/complete", "logging/setLevel"],
  ...["tasks/get", "tasks/update", "tasks/cancel", "resources/subscribe", "resources/unsubscribe"],
]);

/** Judges whether a body is one JSON-RPC 2.0 message or a batch of them, as strictly as `parseRpcRequest` does. */
export function* parseRpcMessages(body: Uint8Array): Steps<RpcMessages | RpcProblem> {
  if (!isUtf8(body)) return problem("not valid UTF-8");
  const start = yield* skipSpaceInSteps(body, 0);
  if (body[start] === OPEN_BRACKET) return yield* parseBatch(body, start);
  if (body[start] !== OPEN_BRACE) return NO_MESSAGE;
  const { findings, ...outline } = yield* objectOutline(body, start, KEYS);
  const malformed = yield* problemOf(body, outline);
  if (malformed !== null) return malformed;
  const message = judgeMessage(body, findings);
  return message.ok ? { ok: true, isBatch: false, messages: [message.value] } : message;
}

/** Each message is judged while the batch is read, so nothing is read twice. */
function* parseBatch(body: Uint8Array, start: number): Steps<RpcMessages | RpcProblem> {
  const outline = yield* arrayOutline(body, start, BATCH_MESSAGES_MAX, KEYS);
  const malformed = yield* problemOf(body, outline);
  if (malformed !== null) return malformed;
  if (outline.items.length === 0) return problem("an empty batch");
  const messages: RpcMessage[] = [];
  for (const item of outline.items) {
    const message = body[item.start] === OPEN_BRACE ? judgeMessage(body, item.findings) : NO_MESSAGE;
    if (!message.ok) return message;
    messages.push(message.value);
  }
  return { ok: true, isBatch: true, messages };
}

/** Why the body is not one JSON text; null when it is. */
function* problemOf(body: Uint8Array, { end, problem: why }: Pick<Items, "end" | "problem">): Steps<RpcProblem | null> {
  if (why === "too many") return problem(`a batch of more than ${BATCH_MESSAGES_MAX} messages`);
  if (why === "too deep") return problem("nested too deeply");
  const isWhole = why === null && (yield* skipSpaceInSteps(body, end)) === body.length;
  return isWhole ? null : problem("not valid JSON");
}

const NO_MESSAGE = problem("must be a JSON-RPC message object");

const RESPONSE: RpcMessage = { method: null, tool: null, isCall: false, protocolVersion: null, params: [] };

type ParsedMessage = { readonly ok: true; readonly value: RpcMessage } | RpcProblem;

function judgeMessage(body: Uint8Array, findings: readonly Finding[]): ParsedMessage {
  for (const [index, { key }] of KEYS.entries()) {
    const ambiguity = ambiguityOf(key, findings[index]);
    if (ambiguity !== null) return problem(ambiguity);
  }
  const [jsonrpc, id, method, params, result, error] = findings;
  if (readShort(body, jsonrpc) !== "2.0") return problem('jsonrpc: must be "2.0"');
  const isAnswer = result?.value != null || error?.value != null;
  if (method?.value == null) {
    if (!isAnswer || id?.value == null) return problem("method: required, but for a response");
    return { ok: true, value: RESPONSE };
  }
  // A message that one decoder takes for a request and another for a response is judged as neither.
  if (isAnswer) return problem("result, error: not in a message that has a method");
  const name = readMethod(body, method);
  if (typeof name !== "string") return name;
  const hasId = id?.value != null;
  if (id?.value != null && !isId(body, id.value)) return problem("id: must be a string or a number");
  const judged = judgeParams(body, name, params);
  if ("ok" in judged) return judged;
  return { ok: true, value: { method: name, isCall: !isConnection(name, hasId), ...judged } };
}

/** Without an id it is a notification, but a server may act on a notification that has the name of a request. */
function isConnection(method: string, hasId: boolean): boolean {
  if (!hasId) return method.startsWith("notifications/");
  return CONNECTION_REQUESTS.has(method) || method.endsWith("/list");
}
