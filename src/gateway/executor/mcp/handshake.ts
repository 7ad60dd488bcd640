// What is said on an MCP session beside the calls: `initialize`, `notifications/initialized`,
// `notifications/cancelled`, and DELETE.
// (Protocol versions up to 2025-11-25; later ones have neither.)

import { VERSION } from "../../../core/version.ts";
import type { Answer } from "../../../http/client/answer.ts";
import { encodeRpc } from "../../../wire/jsonrpc.ts";
import { credentialHeaders } from "../../upstream/headers.ts";
import { type CallContext, decodedForCall, readStart, send, type Upstreams } from "../call.ts";
import { newTrace } from "../outcome.ts";
import type { Opened, SessionTarget } from "./sessions.ts";
import { isEventStream, readMessage, readStreamAnswer } from "./stream-answer.ts";

export const MCP_HEADERS: ReadonlyArray<[string, string]> = [
  ["accept", "application/json, text/event-stream"],
  ["content-type", "application/json"],
];

export const SESSION_HEADER = "mcp-session-id";
export const VERSION_HEADER = "mcp-protocol-version";

/** Not 0, which some servers take for no id at all. */
const INITIALIZE_ID = 1;
/** An answer to `initialize` holds names and instructions. A larger one is refused. */
const INITIALIZE_BYTES_MAX = 128 * 1024;
/** Deadline of requests that no call waits for. */
const SIDE_TIMEOUT_MS = 5000;

/** Visible ASCII, as the protocol demands of session ids. */
const TOKEN = /^[\x21-\x7e]{1,1024}$/;

const encoder = new TextEncoder();

export function createMcpWire({ outbound, settings, memory, decoders }: Upstreams) {
  /** Runs a step that no call's own deadline covers. One URL counts as one agent. */
  async function within<T>(
    timeoutMs: number,
    { tenant, url }: SessionTarget,
    step: (context: CallContext) => Promise<T>,
  ): Promise<T> {
    const signal = AbortSignal.timeout(timeoutMs);
    const hold = memory.hold(tenant, url, signal);
    const decodedFor = decodedForCall(decoders, hold, signal);
    const bounded = {
      ...settings,
      max_response_bytes: Math.min(settings.max_response_bytes, INITIALIZE_BYTES_MAX),
    };
    try {
      return await step({ outbound, settings: bounded, signal, trace: newTrace(), hold, decodedFor });
    } finally {
      hold.release();
    }
  }
  return {
    open: (target: SessionTarget) =>
      within(settings.upstream_timeout_ms, target, (context) => open(context, target)).catch(() => null),
    close: (target: SessionTarget, session: Opened) =>
      within(SIDE_TIMEOUT_MS, target, (context) => close(context, target, session)).catch(() => {}),
    /**
     * Tells the server that nobody waits for a request any more. By the protocol a closed connection does not say that.
     * Never rejects.
     *
     * @param requestId as it was sent, JSON text
     */
    abandon: (target: SessionTarget, session: Opened, requestId: string) => {
      const params = { requestId: JSON.parse(requestId) as unknown };
      const message = { method: "notifications/cancelled", params };
      return within(SIDE_TIMEOUT_MS, target, (context) => notify(context, target, session, message)).catch(() => {});
    },
  };
}

export type McpWire = ReturnType<typeof createMcpWire>;

async function open(context: CallContext, target: SessionTarget): Promise<Opened | null> {
  const response = await send(context, {
    url: target.url,
    method: "POST",
    headers: [...MCP_HEADERS, ...targetHeaders(target)],
    body: encodeRpc({
      id: INITIALIZE_ID,
      method: "initialize",
      params: {
        protocolVersion: target.offer,
        capabilities: {},
        clientInfo: { name: "tollgate", version: VERSION },
      },
    }),
  });
  const version = readNegotiated(await readAnswer(context, response));
  const id = response.headers.get(SESSION_HEADER);
  if (!response.ok || version === null || (id !== null && !TOKEN.test(id))) return null;
  const opened: Opened = { id, version };
  await notify(context, target, opened, { method: "notifications/initialized" });
  return opened;
}

async function notify(context: CallContext, target: SessionTarget, session: Opened, message: object): Promise<void> {
  const response = await send(context, {
    url: target.url,
    method: "POST",
    headers: [...MCP_HEADERS, ...sessionHeaders(session), ...targetHeaders(target)],
    body: encodeRpc(message),
  });
  await readStart(context, response, 0);
}

async function close(context: CallContext, target: SessionTarget, session: Opened): Promise<void> {
  const response = await send(context, {
    url: target.url,
    method: "DELETE",
    headers: [...sessionHeaders(session), ...targetHeaders(target)],
    body: null,
  });
  await readStart(context, response, 0);
}

function targetHeaders({ via, credential }: SessionTarget): Array<[string, string]> {
  return [...(via === null ? [] : [["via", via] as [string, string]]), ...credentialHeaders(credential)];
}

function sessionHeaders(session: Opened): Array<[string, string]> {
  const version: [string, string] = [VERSION_HEADER, session.version];
  return session.id === null ? [version] : [version, [SESSION_HEADER, session.id]];
}

/** Empty when the message is not an answer. */
async function readAnswer(context: CallContext, response: Answer): Promise<Uint8Array> {
  const wireId = String(INITIALIZE_ID);
  const isEvents = isEventStream(response);
  const message = await (isEvents ? readStreamAnswer : readMessage)(context, response, {
    wireId,
    callerId: encoder.encode(wireId),
    captureBytes: INITIALIZE_BYTES_MAX,
    isHashed: false,
    dropsOthers: isEvents,
  });
  return message.answer() === null ? new Uint8Array() : message.body().start;
}

function readNegotiated(message: Uint8Array): string | null {
  if (message.length === 0) return null;
  const { result } = JSON.parse(new TextDecoder().decode(message)) as {
    result?: { protocolVersion?: unknown };
  };
  const version = result?.protocolVersion;
  return typeof version === "string" && TOKEN.test(version) ? version : null;
}
