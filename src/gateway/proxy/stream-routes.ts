// The routes of the streaming path, and a request to it from the caller's end: whose session it names, its admission, the
// upstream, and the connection, which stays open however long either side is silent.

import { createHmac, timingSafeEqual } from "node:crypto";
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { routes } from "../../http/elysia.ts";
import { scopeOf } from "../../http/server.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { thisMoment } from "../../kernel/time.ts";
import { bodyInSteps } from "../../kernel/turns.ts";
import { untilStored } from "../../storage/failures.ts";
import { type CallBody, hashOf, startOf, wholeOf } from "../../wire/body.ts";
import { parseRpcMessages, type RpcMessage, type RpcMessages, type RpcProblem } from "../../wire/jsonrpc.ts";
import type { InvocableAgent } from "../agents/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { claim, type InvocationKey, type InvocationRow, type PendingCall } from "../invocations/service.ts";
import { type PaidHeaders, type Payments, paidByHeader } from "../payment/service.ts";
import { leadsBack } from "../streaming/response-headers.ts";
import type { OpenedCall, OpenedConnection, StreamPermit } from "../streaming/service.ts";
import type { StreamLimits } from "../streaming/stream-limits.ts";
import type { Streams } from "../streaming/streams.ts";
import type { Claims } from "../upstream/ownership.ts";
import { type CallKind, type CheckedCall, type GatherOptions, gatherCall, type ProxyCall } from "./gather.ts";
import { loopProblem, noAgent, type ParsedRequest, rateProblem, stateProblem } from "./judge.ts";
import { endSession, listen, streamCall } from "./openapi.ts";
import { acceptedOf, faultOf, otherPath, type RecordOptions, record, withId } from "./record.ts";
import { mcpVersion, passedToStream, passesEchoedHeaders } from "./request-headers.ts";

const METHODS = ["POST", "GET", "DELETE"];

export interface StreamRoutesOptions {
  readonly streams: Streams;
  /** The URL at which callers reach the gateway; null to use the host of the request. */
  readonly publicUrl: string | null;
  readonly sessionIdsOf: SessionIdsOf;
  /** Web origins whose pages may use mcp agents, beside the gateway's own. */
  readonly allowedOrigins: readonly string[];
  /** The port on which callers reach this process. */
  port(): number;
  readonly admission: AdmitStreamOptions;
}

export function streamRoutes(options: StreamRoutesOptions) {
  return routes()
    .post("/v1/proxy/:id/stream", ({ request, params }) => call(options, request, params.id), {
      parse: "none",
      detail: streamCall,
    })
    .get("/v1/proxy/:id/stream", ({ request, params }) => connect(options, request, params.id, "GET"), {
      detail: listen,
    })
    .delete("/v1/proxy/:id/stream", ({ request, params }) => connect(options, request, params.id, "DELETE"), {
      parse: "none",
      detail: endSession,
    });
}

async function call(options: StreamRoutesOptions, request: Request, agentId: string): Promise<Response> {
  const { scope, asked, over } = askedOf(request, agentId);
  const { note, caller, holdOpen, intake } = scope;
  const { streams, admission } = options;
  const { promise: until, resolve: sent } = Promise.withResolvers<void>();
  const { promise: ending, resolve: endBy } = Promise.withResolvers<() => void>();
  async function readBody(): Promise<CallBody> {
    const held = { until, endBy: ending, storedMax: MAX.capturedBytes };
    const body = await intake.readBody(request, caller.tenant, MAX.bodyBytes, held);
    // From here on only the timeouts of the exchange limit the connection.
    holdOpen(true);
    return body;
  }
  const leave = streams.enter();
  try {
    const { ids, session } = await sessionOf(options, asked, "POST");
    const { opened, body } = await admitStream(admission, { ...asked, session, readBody, note });
    admission.meters.accepted();
    const response = await streams.call(opened, body, { sent, endBy, over, callerSignal: asked.signal });
    return asGateway(options, asked, ids, response);
  } catch (error) {
    sent();
    over();
    throw error;
  } finally {
    leave();
  }
}

async function connect(
  options: StreamRoutesOptions,
  request: Request,
  agentId: string,
  method: OpenedConnection["method"],
): Promise<Response> {
  const { scope, asked, over } = askedOf(request, agentId);
  scope.holdOpen(true);
  try {
    if (scope.method === "HEAD") {
      throw new Fault("method_not_allowed", "this route has other methods", { allow: METHODS });
    }
    const { ids, session } = await sessionOf(options, asked, method);
    const opened = await admitConnection(options.admission, { ...asked, session }, method);
    const end = { sent() {}, endBy() {}, over, callerSignal: asked.signal };
    return asGateway(options, asked, ids, await options.streams.connect(opened, end));
  } catch (error) {
    over();
    throw error;
  }
}

/** A request to an agent's streaming path, as it came. */
interface AskedStream extends Omit<ProxyCall, "readBody" | "note"> {
  /** Aborted when the caller has gone. */
  readonly signal: AbortSignal;
}

interface StreamRequest extends AskedStream {
  /** The upstream's ID of the MCP session that the caller has shown to be its own. */
  readonly session: string | null;
}

type StreamCall = ProxyCall & StreamRequest;

function askedOf(request: Request, agentId: string) {
  const scope = scopeOf(request);
  const { headers, signal } = request;
  const { caller, requestId, holdOpen } = scope;
  const asked: AskedStream = { caller, agentId, headers, requestId, signal };
  return { scope, asked, over: () => holdOpen(false) };
}

const SESSION_HEADER = "mcp-session-id";

/** The answer as one of the gateway: the caller's own session, and no redirect to the gateway itself. */
function asGateway(
  { publicUrl }: StreamRoutesOptions,
  asked: AskedStream,
  ids: SessionIds | null,
  response: Response,
): Response {
  const { headers } = response;
  const id = headers.get(SESSION_HEADER);
  if (ids !== null && id !== null) {
    const sealed = ids.toCaller(id);
    if (sealed === null) headers.delete(SESSION_HEADER);
    else headers.set(SESSION_HEADER, sealed);
  }
  const location = headers.get("location");
  if (location === null) return response;
  const hosts = [publicUrl === null ? null : new URL(publicUrl).host, asked.headers.get("host")];
  if (
    leadsBack(
      location,
      hosts.filter((host) => host !== null),
    )
  )
    headers.delete("location");
  return response;
}

interface NamedSession {
  /** Null when the agent has no sessions that the gateway knows of. */
  readonly ids: SessionIds | null;
  /** The upstream's ID of the one that the request names. */
  readonly session: string | null;
}

/**
 * A session of another caller is answered like an unknown one (404), so that an MCP client opens its own. Event IDs are
 * unique only within a session, so resuming a stream needs one.
 *
 * @throws Fault `not_found`
 */
async function sessionOf(
  options: StreamRoutesOptions,
  { caller, agentId, headers }: AskedStream,
  method: string,
): Promise<NamedSession> {
  const { admission, sessionIdsOf } = options;
  const agent = await admission.agents.find(caller.tenant, agentId);
  if (agent?.protocol !== "mcp") return { ids: null, session: null };
  checkOrigin(options, headers.get("origin"));
  const { tenant, user } = caller;
  const ids = await sessionIdsOf({ tenant, agentId: agent.id, user });
  const sealed = headers.get(SESSION_HEADER);
  const session = sealed === null ? null : ids.toUpstream(sealed);
  const needsOne = sealed !== null || (method === "GET" && headers.has("last-event-id"));
  if (needsOne && session === null) throw new Fault("not_found", "no such session");
  return { ids, session };
}

/**
 * MCP demands this against DNS rebinding, which forges the request's own host.
 *
 * @throws Fault `denied` for a page of another origin
 */
function checkOrigin({ publicUrl, allowedOrigins, port }: StreamRoutesOptions, origin: string | null): void {
  if (origin === null || allowedOrigins.includes(origin)) return;
  const own = publicUrl === null ? OWN_HOSTS.map((host) => `http://${host}:${port()}`) : [new URL(publicUrl).origin];
  if (own.some((each) => new URL(each).origin === origin)) return;
  throw new Fault("denied", "Origin: not among TOLLGATE_ALLOWED_ORIGINS");
}

const OWN_HOSTS = ["localhost", "127.0.0.1", "[::1]"];

// The owner of an MCP session. The upstream keeps the sessions, and it knows the gateway's credential but not the
// callers. So a caller gets the upstream's session ID with a seal behind it, which binds it to the tenant, the agent
// and the user. It sends both with each request. Nothing is stored: a seal is valid after a restart, on every replica,
// and after a change of the master key.

/** An ID as the protocol allows it, of a length that fits a header. */
const UPSTREAM_ID = /^[\x21-\x7e]{1,1024}$/;
const SEPARATOR = ".";
/** SHA-256 in base64url. */
const SEAL_CHARACTERS = 43;

export interface SessionOwner {
  readonly tenant: string;
  readonly agentId: string;
  readonly user: string;
}

export type SessionIdsOf = (owner: SessionOwner) => Promise<SessionIds>;

/** @param deriveKey the tenant's key for sessions */
export function createSessionIds(deriveKey: (tenant: string) => Promise<Uint8Array>): SessionIdsOf {
  const keys = boundedCache<string, Uint8Array>(MAX.tenantKeys);
  return async (owner) => {
    let key = keys.get(owner.tenant);
    if (key === undefined) {
      key = await deriveKey(owner.tenant);
      keys.set(owner.tenant, key);
    }
    return sessionIds(key, owner);
  };
}

function sessionIds(key: Uint8Array, { tenant, agentId, user }: SessionOwner) {
  const sealOf = (id: string) =>
    createHmac("sha256", key)
      .update(JSON.stringify([tenant, agentId, user, id]))
      .digest("base64url");
  return {
    /** The ID for the caller; null when the upstream's is not valid. */
    toCaller: (id: string) => (UPSTREAM_ID.test(id) ? `${id}${SEPARATOR}${sealOf(id)}` : null),
    /** The ID for the upstream; null when the caller's was not given to this owner. */
    toUpstream(sealed: string): string | null {
      const end = sealed.length - SEAL_CHARACTERS - SEPARATOR.length;
      const id = sealed.slice(0, Math.max(end, 0));
      if (!UPSTREAM_ID.test(id) || sealed[end] !== SEPARATOR) return null;
      const seal = Buffer.from(sealed.slice(end + SEPARATOR.length), "latin1");
      return timingSafeEqual(seal, Buffer.from(sealOf(id), "latin1")) ? id : null;
    },
  };
}

/** Translates the session IDs of one owner between caller and upstream. */
export type SessionIds = ReturnType<typeof sessionIds>;

// Admission on the streaming path. A call that has passed the checks takes a place and is recorded, paid for and
// claimed. Then it is made on its caller's connection. If the outcome of the payment is unknown, the call stays
// pending. The same payment sent again resumes it on any replica, and only one request gets it: each claims with a
// token of its own.

export interface AdmitStreamOptions extends GatherOptions, Pick<RecordOptions, "replica" | "meters"> {
  readonly payments: Payments;
  readonly claims: Claims;
  readonly limits: StreamLimits;
  /** Aborted when the process is about to end. */
  readonly stopping: AbortSignal;
}

const RETRY_AFTER_SECONDS = 5;

/**
 * Accepts a call that is to be made at once.
 *
 * @throws Fault of every kind that the order of checks names; those that come after the record carry its ID
 */
async function admitStream(options: AdmitStreamOptions, call: StreamCall) {
  const checked = await gatherCall(options, call, STREAMED);
  const { agent, parsed, body, earlier } = checked;
  if (earlier !== null) return { opened: await resume(options, call, checked, earlier, null), body };
  const place = await options.limits.take(call.caller.tenant, agent.id, parsed.calls.length > 0, call.signal);
  try {
    return { opened: await open(options, call, checked, place), body };
  } catch (error) {
    place.release();
    throw error;
  }
}

async function open(
  options: AdmitStreamOptions,
  call: StreamCall,
  checked: CheckedCall<ParsedStreamRequest>,
  place: StreamPermit,
): Promise<OpenedCall> {
  const { payments, claims, pseudonym, replica: owner } = options;
  const { agent, parsed } = checked;
  const headers = passedToStream(call.headers, {
    protocol: agent.protocol,
    echoedMcpHeaders: parsed.echoedMcpHeaders,
    pseudonym,
    session: call.session,
    resumes: false,
  });
  const hash = agent.emit_receipts ? await hashOf(checked.body, call.caller.tenant) : null;
  const whole = acceptedOf(options, call, checked, { mode: "streaming", headers, hash });
  // Store only the part of the body that may be shown: a caller who resumes the call sends the body again.
  const accepted = { ...whole, body: shownPart(checked) };
  const { tenant, id, settlement_status } = accepted.row;
  const key = { tenant, id };
  call.note("invocation_id", id);
  if (settlement_status === "pending") {
    const { isNew, payment, ...stored } = await record(options, checked, { accepted, claim: null });
    if (payment === null || !isNew) return resume(options, call, checked, stored.id, place);
    const paid = await withId(id, payments.settle(payment));
    return take(options, call, checked, { key, paid, place });
  }
  const opened = await attempt(claims, id, async (held) => {
    const claim = { owner, token: held.token };
    const { isNew, ...stored } = await record(options, checked, { accepted, claim });
    const parts = { ...held, key, place, isResumable: false };
    return isNew ? openedOf(parts, checked, accepted.call, {}) : stored.id;
  });
  return typeof opened === "string" ? resume(options, call, checked, opened, place) : opened;
}

interface ClaimAttempt extends Pick<OpenedCall, "token" | "claimedAt"> {}

/** If the attempt does not open the call, its claim is over. A claim that was stored after all is given back later. */
async function attempt<T>(
  claims: Claims,
  id: string,
  work: (attempt: ClaimAttempt) => Promise<OpenedCall | T>,
): Promise<OpenedCall | T> {
  const [token, claimedAt] = [claims.begin(), thisMoment()];
  let isTaken = false;
  try {
    const opened = await work({ token, claimedAt });
    isTaken = typeof opened === "object" && opened !== null && "token" in opened;
    if (isTaken) claims.took(token, id);
    return opened;
  } finally {
    if (!isTaken) claims.over(token);
  }
}

/** The start of the body, as far as it is captured. */
function shownPart({ agent, body }: CheckedCall<ParsedRequest>): CallBody {
  return agent.capture_body ? startOf(body, MAX.capturedBytes) : new Uint8Array();
}

async function resume(
  options: AdmitStreamOptions,
  call: StreamCall,
  checked: CheckedCall<ParsedStreamRequest>,
  id: string,
  place: StreamPermit | null,
): Promise<OpenedCall> {
  const { store, payments } = options;
  const key = { tenant: call.caller.tenant, id };
  call.note("invocation_id", id);
  const { mode } = await findInvocation(store.read, key.tenant, id);
  if (mode !== "streaming") throw otherPath(id);
  const paid = await withId(id, payments.recall(key.tenant, id));
  return take(options, call, checked, { key, paid, place });
}

interface WaitingCall {
  readonly key: InvocationKey;
  /** Response headers about its payment so far. */
  readonly paid: PaidHeaders;
  /** Null where the request holds none yet. */
  readonly place: StreamPermit | null;
}

/**
 * Claims a paid call, unless another request has.
 *
 * @throws Fault `unavailable` while its payment is unknown; `conflict` when it has been made, or given up
 */
async function take(
  options: AdmitStreamOptions,
  call: StreamCall,
  checked: CheckedCall<ParsedStreamRequest>,
  { key, paid, place }: WaitingCall,
): Promise<OpenedCall> {
  const { store, payments, claims } = options;
  const own = place ?? options.limits.forResumed(key.tenant, checked.agent.id);
  const opened = await attempt(claims, key.id, async (held) => {
    const claimed = await claimAs(options, call, key, held.token);
    if (claimed === null) return null;
    const isTold = Object.keys(paid).length > 0;
    const responseHeaders = isTold ? paid : await payments.recall(key.tenant, key.id);
    return openedOf({ ...held, key, place: own, isResumable: true }, checked, claimed.call, responseHeaders);
  }).catch((error) => {
    own.release();
    throw error;
  });
  if (opened !== null) return opened;
  own.release();
  const row = await findInvocation(store.read, key.tenant, key.id);
  if (row.status === "pending") throw unknownYet(key.id);
  throw faultOf("conflict", whyNotMade(row), key.id, { headers: paid });
}

function claimAs(
  { store, clock, stopping, replica: owner }: AdmitStreamOptions,
  { signal }: StreamCall,
  key: InvocationKey,
  token: string,
): Promise<PendingCall | null> {
  const isOver = () => signal.aborted || stopping.aborted;
  return untilStored(() => {
    // The call is not claimed for a caller who has gone, so the same payment can still resume it.
    if (isOver()) throw unknownYet(key.id);
    return claim(store, { key, owner, token, now: clock.now() });
  }, isOver);
}

/** Error classes of calls that were claimed but never made. */
const NOT_MADE: ReadonlySet<unknown> = new Set(["credential_error", "ssrf_blocked"]);

function whyNotMade({ claim, error_class, settlement_status }: InvocationRow): string {
  if (claim === null) {
    const isPaid = settlement_status === "settled_upstream_failed";
    const payment = isPaid ? "its payment was collected, and it" : "it";
    return `this call was given up: ${payment} was cancelled, or not fetched in time, before it was made`;
  }
  if (error_class === "cancelled") return "this call was cancelled";
  return NOT_MADE.has(error_class) ? `this call could not be made: ${error_class}` : "this call has been made already";
}

function unknownYet(id: string): Fault {
  const message = "the payment's outcome is not known yet: send the same payment again";
  return faultOf("unavailable", message, id, { retryAfterSeconds: RETRY_AFTER_SECONDS });
}

function openedOf(
  held: Pick<OpenedCall, "key" | "token" | "claimedAt" | "place" | "isResumable">,
  { agent, parsed, warning }: CheckedCall<ParsedStreamRequest>,
  { url, protocol, credential_ref, headers, request_id, capture, receipt }: Call,
  paid: PaidHeaders,
): OpenedCall {
  const responseHeaders = warning === null ? paid : { ...paid, "x-service-policy-warning": warning };
  const { tenant } = held.key;
  const request = { tenant, agentId: agent.id, url, credential_ref, headers, request_id };
  // Headers that mirror the body came with the protocol that knows of caches.
  const listsTools = parsed.listsTools && protocol === "mcp" ? { isNewest: parsed.echoedMcpHeaders } : null;
  return { ...held, ...request, capture, receipt, listsTools, responseHeaders };
}

/**
 * A GET or DELETE to an mcp agent. It is part of the connection, so it is neither judged nor paid for.
 *
 * @throws Fault `method_not_allowed` when the agent is not an mcp agent; otherwise like the checks of a call
 */
async function admitConnection(
  options: AdmitStreamOptions,
  request: StreamRequest,
  method: OpenedConnection["method"],
): Promise<OpenedConnection> {
  const { tenant } = request.caller;
  const agent = await options.agents.find(tenant, request.agentId);
  if (agent === null) throw noAgent();
  refuseIf(loopProblem(request.headers, options.pseudonym));
  if (agent.protocol !== "mcp") {
    throw new Fault("method_not_allowed", "the agent's protocol has other methods", { allow: ["POST"] });
  }
  refuseIf(stateProblem(agent));
  refuseIf(rateProblem(await options.rates.take(tenant, agent)));
  const place = await options.limits.take(tenant, agent.id, false, request.signal);
  return {
    tenant,
    agentId: agent.id,
    url: agent.upstream_url ?? "",
    credential_ref: agent.credential_ref,
    headers: passedToStream(request.headers, {
      protocol: agent.protocol,
      // There is no body, so no header repeats parts of it.
      echoedMcpHeaders: false,
      pseudonym: options.pseudonym,
      session: request.session,
      resumes: method === "GET" && request.session !== null,
    }),
    request_id: request.requestId,
    place,
    method,
  };
}

function refuseIf(problem: Fault | null): void {
  if (problem !== null) throw problem;
}

// What the body of a call on the streaming path asks of its agent: one JSON-RPC message or a batch of them.

interface ParsedStreamRequest extends ParsedRequest {
  readonly listsTools: boolean;
}

const PLAIN: ParsedStreamRequest = {
  method: null,
  tool: null,
  calls: [{ tool: null }],
  echoedMcpHeaders: false,
  listsTools: false,
};

const STREAMED: CallKind<ParsedStreamRequest> = {
  ...paidByHeader,
  suffix: "/stream",
  plain: PLAIN,
  parse,
  parseAny: async (body, { caller }) => {
    const bytes = await wholeOf(body, caller.tenant);
    const messages = await bodyInSteps(bytes, parseRpcMessages(bytes), caller.tenant);
    return { ...PLAIN, listsTools: listsTools(messages) };
  },
};

async function parse(_: InvocableAgent, body: CallBody, { headers, caller }: ProxyCall): Promise<ParsedStreamRequest> {
  const bytes = await wholeOf(body, caller.tenant);
  const parsed = await bodyInSteps(bytes, parseRpcMessages(bytes), caller.tenant);
  if (!parsed.ok) throw new Fault("invalid_request", `body: ${parsed.problem}`);
  const { messages } = parsed;
  const calls = messages.filter(({ isCall }) => isCall);
  const shown = shownMessage(messages, calls);
  const only = parsed.isBatch ? null : (messages[0] ?? null);
  const echoedMcpHeaders = passesEchoedHeaders(
    headers,
    bytes,
    only,
    mcpVersion(headers) ?? only?.protocolVersion ?? null,
  );
  const { method = null, tool = null } = shown ?? {};
  return { method, tool, calls, echoedMcpHeaders, listsTools: listsTools(parsed) };
}

function listsTools(parsed: RpcMessages | RpcProblem): boolean {
  return parsed.ok && parsed.messages.some(({ method }) => method?.endsWith("/list"));
}

/** For a batch the history shows its call, if it has exactly one. */
function shownMessage(messages: readonly RpcMessage[], calls: readonly RpcMessage[]): RpcMessage | undefined {
  if (messages.length === 1) return messages[0];
  return calls.length === 1 ? calls[0] : undefined;
}
