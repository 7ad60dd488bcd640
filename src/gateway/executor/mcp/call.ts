// Calls an MCP server on the transactional path: sends one JSON-RPC request and reads its response. If the server
// wants a session, one is opened and shared by all calls with the same session key. A request is sent again only if the server
// refused it for lack of a session, because then it never ran.
import { MAX } from "../../../kernel/limits.ts";
import { judged } from "../../../wire/body.ts";
import { isEventStream } from "../../../wire/event-stream.ts";
import { isSessionless, RPC_REQUEST, type RpcRequest, splice } from "../../../wire/jsonrpc.ts";
import { isEchoedHeader, SESSION_HEADER, VERSION_HEADER } from "../../../wire/mcp-headers.ts";
import { CallError } from "../../upstream/failure.ts";
import { noteHead } from "../../upstream/headers.ts";
import { type CallContext, jobHeaders, send, type UpstreamRequest, type Upstreams } from "../call.ts";
import { answered, type Job, keep, type Outcome } from "../job.ts";
import { type RpcAnswer, readMessage, readStreamAnswer } from "./response.ts";
import type { McpWire, Session, Sessions, SessionTarget } from "./sessions.ts";
import { createMcpWire, createSessions, MCP_HEADERS, sessionHeaders } from "./sessions.ts";

const NEWEST_SESSION_VERSION = "2025-11-25";

const REPLACED_HEADERS = new Set(["accept", "content-type", SESSION_HEADER, VERSION_HEADER]);

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** One try to send a request, with or without a session. */
interface McpAttempt {
  readonly job: Job;
  readonly body: Uint8Array;
  readonly request: RpcRequest;
  readonly session: Session | null;
  /** The JSON-RPC id as it is sent, as JSON text. */
  readonly wireId: string;
  /** The protocol version that the caller named, which is never replaced. */
  readonly callerVersion: string | null;
}

interface Reply {
  readonly outcome: Outcome;
  /** The status, if the server may have refused the request for lack of a session. */
  readonly refusal: 400 | 404 | null;
  /** The ID of a session that the response opened. */
  readonly sessionId: string | null;
}

export function createMcp(upstreams: Upstreams) {
  const wire = createMcpWire(upstreams);
  const sessions = createSessions(wire);
  const sweeper = setInterval(() => sessions.sweep(), 30_000);
  sweeper.unref();
  return {
    async call(job: Job, context: CallContext): Promise<Outcome> {
      const [request, body] = await judged(job.body, RPC_REQUEST, job.tenant);
      if (!request.ok) throw new CallError("internal", `not a JSON-RPC request: ${request.problem}`);
      const callerVersion = headerOf(job, VERSION_HEADER) ?? request.protocolVersion;
      const wireId = decoder.decode(body.subarray(request.id.start, request.id.end));
      const plain: McpAttempt = { job, body, request, session: null, wireId, callerVersion };
      if (isSessionless(callerVersion)) return (await attempt(plain, context)).outcome;
      // A caller's own `initialize` opens a session that nobody can use, so it is closed again.
      if (request.method === "initialize") return callInitialize(plain, context, wire);
      return callInSession(plain, context, sessions, wire);
    },
    /** Closes all sessions; resolves after two seconds at the latest. */
    async close() {
      clearInterval(sweeper);
      await sessions.close(2000);
    },
  };
}

async function callInitialize(plain: McpAttempt, context: CallContext, wire: McpWire): Promise<Outcome> {
  const { outcome, sessionId } = await attempt(plain, context);
  if (sessionId !== null) {
    const target = targetOf(plain.job);
    void wire.close(target, { id: sessionId, version: target.offer });
  }
  return outcome;
}

async function callInSession(plain: McpAttempt, context: CallContext, sessions: Sessions, wire: McpWire) {
  const { signal, trace } = context;
  const target = targetOf(plain.job);
  const key = JSON.stringify([plain.job.session_key, target.offer]);
  const known = await sessions.find(key, target, signal);
  const attemptWith = (session: Session | null) =>
    sessions.use(session, () => attemptInSession({ ...plain, session }, context, wire));
  const first = await attemptWith(known);
  // A session without an ID stands for a server that keeps no sessions, so a new session would not help.
  const isFinal = first.refusal === null || (known !== null && known.id === null);
  if (isFinal) return first.outcome;
  Object.assign(trace, { upstream_status: null, response_content_type: null, resp_size: null });
  const renewed = await sessions.renew(key, target, known, first.refusal === 404, signal);
  if (renewed === null || isSameForServer(plain, known, renewed)) return first.outcome;
  // Memory for decoders is taken only while nothing else is held: see the comment on memory in ../call.ts.
  context.hold.release();
  return (await attemptWith(renewed)).outcome;
}

async function attemptInSession(call: McpAttempt, context: CallContext, wire: McpWire): Promise<Reply> {
  const { job, session } = call;
  if (session === null || session.id === null) return attempt(call, context);
  const wireId = String(session.nextId());
  try {
    return await attempt({ ...call, wireId }, context);
  } catch (error) {
    if (context.signal.aborted) void wire.abandon(targetOf(job), session, wireId);
    throw error;
  }
}

/** Whether the request in the renewed session would be the same as the first one. */
function isSameForServer(plain: McpAttempt, known: Session | null, renewed: Session): boolean {
  if (renewed.id !== (known?.id ?? null)) return false;
  return versionOf({ ...plain, session: known }) === versionOf({ ...plain, session: renewed });
}

async function attempt(call: McpAttempt, context: CallContext): Promise<Reply> {
  const { job, body, request, session, wireId } = call;
  const callerId = body.subarray(request.id.start, request.id.end);
  const isShared = session !== null && session.id !== null;
  const response = await send(context, {
    url: job.call.url,
    method: "POST",
    headers: headersOf(call),
    body: isShared ? splice(body, request.id, encoder.encode(wireId)) : body,
  });
  noteHead(context.trace, response);
  const sessionId = response.headers.get(SESSION_HEADER);
  const isEvents = response.ok && isEventStream(response);
  const { capture, receipt: isHashed } = job.call;
  const options = { wireId, callerId, captureBytes: capture ? MAX.capturedBytes : 0, isHashed };
  const read = isEvents ? readStreamAnswer : readMessage;
  const message = await read(context, response, { ...options, dropsOthers: isEvents });
  if (isEvents) context.trace.response_content_type = "application/json";
  const stored = keep(message.body(), capture);
  const outcome = answered(context.trace, response.status, stored, performance.now());
  return { outcome, refusal: refusalOf(response.status, message.answer()), sessionId };
}

/**
 * 400 and 404 may mean that the session is missing or forgotten; then the request never ran. A message that names our request
 * and brings a result, or an error of the application, shows that the request did run.
 */
function refusalOf(status: number, answer: RpcAnswer | null): 400 | 404 | null {
  if (status !== 400 && status !== 404) return null;
  if (answer === null) return status;
  const isOfProtocol = answer.code !== null && answer.code >= -32768 && answer.code <= -32000;
  // NaN: an error without a readable code.
  return isOfProtocol || Number.isNaN(answer.code) ? status : null;
}

function headersOf(call: McpAttempt): UpstreamRequest["headers"] {
  const { job, session } = call;
  const version = versionOf(call);
  // The server may have negotiated a version that lacks the headers which repeat parts of the body.
  const echoes = isSessionless(version);
  const passed = job.call.headers.filter(([name]) => !REPLACED_HEADERS.has(name) && (echoes || !isEchoedHeader(name)));
  return [...passed, ...MCP_HEADERS, ...sessionHeaders({ id: session?.id ?? null, version }), ...jobHeaders(job)];
}

const versionOf = ({ job, session, callerVersion }: McpAttempt) => callerVersion ?? session?.version ?? offerOf(job);

const offerOf = (job: Job): string => job.call.mcp_protocol_version ?? NEWEST_SESSION_VERSION;

function targetOf(job: Job): SessionTarget {
  const { tenant, credential, call } = job;
  return { tenant, url: call.url, credential, offer: offerOf(job), via: headerOf(job, "via") };
}

const headerOf = (job: Job, wanted: string) => job.call.headers.find(([name]) => name === wanted)?.[1] ?? null;
