// The routes of the streaming path, and a request to it from the caller's end: whose session it names, its admission, the
// upstream, and the connection, which stays open however long either side is silent.

import { createHmac, timingSafeEqual } from "node:crypto";
import type { Call } from "../../core/call.ts";
import { Fault, methodNotAllowed } from "../../core/fault.ts";
import { routes } from "../../http/elysia.ts";
import { type Scope, scopeOf } from "../../http/server.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { thisMoment } from "../../kernel/time.ts";
import { untilStored } from "../../storage/failures.ts";
import { type CallBody, hashOf, judged, startOf } from "../../wire/body.ts";
import { RPC_MESSAGES, type RpcMessages, type RpcProblem } from "../../wire/jsonrpc.ts";
import type { InvocableAgent } from "../agents/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { claim, type InvocationKey, type InvocationRow } from "../invocations/service.ts";
import { type PaidHeaders, type Payments, paidByHeader } from "../payment/service.ts";
import { leadsBack } from "../streaming/response.ts";
import type { OpenedCall, OpenedConnection, StreamLimits, StreamPermit, Streams } from "../streaming/streams.ts";
import { mcpVersion, passedToStream, passesEchoedHeaders } from "../upstream/headers.ts";
import type { Claims } from "../upstream/ownership.ts";
import { type CallKind, type CheckedCall, type GatherOptions, gatherCall, type ProxyCall, shownBy } from "./gather.ts";
import { loopProblem, noAgent, type ParsedRequest, PLAIN, rateProblem, stateProblem } from "./judge.ts";
import { endSession, listen, streamCall } from "./openapi.ts";
import { acceptedOf, faultOf, otherPath, type RecordOptions, record, withId } from "./record.ts";

const METHODS = ["POST", "GET", "DELETE"];

export interface StreamRoutesOptions {
  readonly streams: Streams;
  /** The URL at which callers reach the gateway; null to use the host of the request. */
  readonly publicUrl: string | null;
  readonly sessionIdsOf: SessionIdsOf;
  /** Web origins whose pages may use mcp agents, beside the gateway's own. */
  readonly allowedOrigins: readonly string[];
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
  const scope = scopeOf(request);
  const asked = askedOf(request, scope, agentId);
  const { note, caller, holdOpen, intake } = scope;
  const { streams, admission } = options;
  const over = () => holdOpen(false);
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
  const scope = scopeOf(request);
  const asked = askedOf(request, scope, agentId);
  const over = () => scope.holdOpen(false);
  scope.holdOpen(true);
  try {
    if (scope.method === "HEAD") throw methodNotAllowed(METHODS);
    const { ids, session } = await sessionOf(options, asked, method);
    const opened = await admitConnection(options.admission, { ...asked, session }, method);
    const end = { sent() {}, endBy() {}, over, callerSignal: asked.signal };
    return asGateway(options, asked, ids, await options.streams.connect(opened, end));
  } catch (error) {
    over();
    throw error;
  }
}

interface AskedStream extends Omit<ProxyCall, "readBody" | "note"> {
  readonly signal: AbortSignal;
}

interface StreamRequest extends AskedStream {
  /** The upstream's ID of the MCP session that the caller has shown to be its own. */
  readonly session: string | null;
}

type StreamCall = ProxyCall & StreamRequest;

function askedOf({ headers, signal }: Request, { caller, requestId }: Scope, agentId: string): AskedStream {
  return { caller, agentId, headers, requestId, signal };
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
  const own = publicUrl === null ? null : new URL(publicUrl).host;
  const hosts = [own, asked.headers.get("host")].filter((host) => host !== null);
  if (leadsBack(location, hosts)) headers.delete("location");
  return response;
}

/**
 * The upstream's ID of the session that the request names, and the owner's IDs; null when the agent has no sessions that the
 * gateway knows of. A session of another caller is answered like an unknown one (404), so that an MCP client opens its own.
 * Event IDs are unique only within a session, so resuming a stream needs one.
 * @throws Fault `not_found`
 */
async function sessionOf(options: StreamRoutesOptions, { caller, agentId, headers }: AskedStream, method: string) {
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

/** MCP demands this against DNS rebinding, which forges the request's own host. @throws Fault `denied` */
function checkOrigin({ publicUrl, allowedOrigins, port }: StreamRoutesOptions, origin: string | null): void {
  if (origin === null || allowedOrigins.includes(origin)) return;
  const own = publicUrl === null ? OWN_HOSTS.map((host) => `http://${host}:${port()}`) : [new URL(publicUrl).origin];
  if (own.some((each) => new URL(each).origin === origin)) return;
  throw new Fault("denied", "Origin: not among TOLLGATE_ALLOWED_ORIGINS");
}

const OWN_HOSTS = ["localhost", "127.0.0.1", "[::1]"];

// The owner of an MCP session. The upstream knows the gateway's credential but not the callers. So a caller gets the
// upstream's session ID with a seal behind it, which binds it to the tenant, the agent and the user. Nothing is stored: a
// seal is valid after a restart, on every replica, and after a change of the master key.

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

export type SessionIds = ReturnType<typeof sessionIds>;

// Admission. A call that has passed the checks takes a slot and is recorded, paid for and claimed. If the outcome of the
// payment is unknown, the call stays pending. The same payment sent again resumes it on any replica, and only one request
// gets it: each claims with a token of its own.

export interface AdmitStreamOptions extends GatherOptions, Pick<RecordOptions, "replica" | "meters"> {
  readonly payments: Payments;
  readonly claims: Claims;
  readonly limits: StreamLimits;
  readonly stopping: AbortSignal;
}

/** @throws Fault of every kind that the order of checks names; those that come after the record carry its ID */
async function admitStream(options: AdmitStreamOptions, call: StreamCall) {
  const checked = await gatherCall(options, call, STREAMED);
  const { agent, parsed, body, earlier } = checked;
  if (earlier !== null) return { opened: await resume(options, call, checked, earlier, null), body };
  const slot = await options.limits.take(call.caller.tenant, agent.id, parsed.calls.length > 0, call.signal);
  try {
    return { opened: await open(options, call, checked, slot), body };
  } catch (error) {
    slot.release();
    throw error;
  }
}

async function open(
  options: AdmitStreamOptions,
  call: StreamCall,
  checked: CheckedCall<ParsedStreamRequest>,
  slot: StreamPermit,
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
  const body = agent.capture_body ? startOf(checked.body, MAX.capturedBytes) : new Uint8Array();
  const accepted = { ...whole, body };
  const { tenant, id, settlement_status } = accepted.row;
  const key = { tenant, id };
  call.note("invocation_id", id);
  if (settlement_status === "pending") {
    const { isNew, payment, ...stored } = await record(options, checked, { accepted, claim: null });
    if (payment === null || !isNew) return resume(options, call, checked, stored.id, slot);
    const paid = await withId(id, shownBy(STREAMED, payments.settle(payment)));
    return take(options, call, checked, { key, paid, slot });
  }
  let storedId = id;
  const opened = await attempt(claims, id, async (held) => {
    const stored = await record(options, checked, { accepted, claim: { owner, token: held.token } });
    storedId = stored.id;
    const parts = { ...held, key, slot, isResumable: false };
    return stored.isNew ? openedOf(parts, checked, accepted.call, {}) : null;
  });
  return opened ?? resume(options, call, checked, storedId, slot);
}

/** If the attempt gives null, or fails, its claim is over. A claim that was stored after all is given back later. */
async function attempt(
  claims: Claims,
  id: string,
  work: (held: Pick<OpenedCall, "token" | "claimedAt">) => Promise<OpenedCall | null>,
): Promise<OpenedCall | null> {
  const [token, claimedAt] = [claims.begin(), thisMoment()];
  let opened: OpenedCall | null = null;
  try {
    opened = await work({ token, claimedAt });
    if (opened !== null) claims.took(token, id);
    return opened;
  } finally {
    if (opened === null) claims.over(token);
  }
}

async function resume(
  options: AdmitStreamOptions,
  call: StreamCall,
  checked: CheckedCall<ParsedStreamRequest>,
  id: string,
  slot: StreamPermit | null,
): Promise<OpenedCall> {
  const { store, payments } = options;
  const key = { tenant: call.caller.tenant, id };
  call.note("invocation_id", id);
  const { mode } = await findInvocation(store.read, key.tenant, id);
  if (mode !== "streaming") throw otherPath(id);
  const paid = await withId(id, shownBy(STREAMED, payments.recall(key.tenant, id)));
  return take(options, call, checked, { key, paid, slot });
}

/** @throws Fault `unavailable` while its payment is unknown; `conflict` when it has been made, given up or taken */
async function take(
  options: AdmitStreamOptions,
  call: StreamCall,
  checked: CheckedCall<ParsedStreamRequest>,
  { key, paid, slot }: { key: InvocationKey; paid: PaidHeaders; slot: StreamPermit | null },
): Promise<OpenedCall> {
  const { store, payments, claims } = options;
  const own = slot ?? options.limits.forResumed(key.tenant, checked.agent.id);
  const opened = await attempt(claims, key.id, async (held) => {
    const claimed = await claimAs(options, call, key, held.token);
    if (claimed === null) return null;
    const isTold = Object.keys(paid).length > 0;
    const responseHeaders = isTold ? paid : await shownBy(STREAMED, payments.recall(key.tenant, key.id));
    return openedOf({ ...held, key, slot: own, isResumable: true }, checked, claimed.call, responseHeaders);
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
) {
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
  return faultOf("unavailable", message, id, { retryAfterSeconds: 5 });
}

function openedOf(
  held: Pick<OpenedCall, "key" | "token" | "claimedAt" | "slot" | "isResumable">,
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

/** @throws Fault `method_not_allowed` when the agent is not an mcp agent; otherwise like the checks of a call */
async function admitConnection(
  options: AdmitStreamOptions,
  request: StreamRequest,
  method: OpenedConnection["method"],
): Promise<OpenedConnection> {
  const { tenant } = request.caller;
  const agent = await options.agents.find(tenant, request.agentId);
  if (agent === null) throw noAgent();
  const loop = loopProblem(request.headers, options.pseudonym);
  if (loop !== null) throw loop;
  if (agent.protocol !== "mcp") throw methodNotAllowed(["POST"], " for the agent's protocol");
  const refusal = stateProblem(agent) ?? rateProblem(await options.rates.take(tenant, agent));
  if (refusal !== null) throw refusal;
  const slot = await options.limits.take(tenant, agent.id, false, request.signal);
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
    slot,
    method,
  };
}

// What the body of a call on the streaming path asks of its agent: one JSON-RPC message or a batch of them.

interface ParsedStreamRequest extends ParsedRequest {
  readonly listsTools: boolean;
}

const STREAMED: CallKind<ParsedStreamRequest> = {
  ...paidByHeader,
  suffix: "/stream",
  plain: { ...PLAIN, listsTools: false },
  parse,
  parseAny: async (body, { caller }) => {
    const [messages] = await judged(body, RPC_MESSAGES, caller.tenant);
    return { ...PLAIN, listsTools: listsTools(messages) };
  },
};

async function parse(_: InvocableAgent, body: CallBody, { headers, caller }: ProxyCall): Promise<ParsedStreamRequest> {
  const [parsed, bytes] = await judged(body, RPC_MESSAGES, caller.tenant);
  if (!parsed.ok) throw new Fault("invalid_request", `body: ${parsed.problem}`);
  const { messages } = parsed;
  const calls = messages.filter(({ isCall }) => isCall);
  const only = parsed.isBatch ? null : (messages[0] ?? null);
  const version = mcpVersion(headers) ?? only?.protocolVersion ?? null;
  const echoedMcpHeaders = passesEchoedHeaders(headers, bytes, only, version);
  // For a batch of several the history shows its call, if it has exactly one.
  const shown = messages.length === 1 ? messages : calls;
  const { method = null, tool = null } = (shown.length === 1 ? shown[0] : undefined) ?? {};
  return { method, tool, calls, echoedMcpHeaders, listsTools: listsTools(parsed) };
}

function listsTools(parsed: RpcMessages | RpcProblem): boolean {
  return parsed.ok && parsed.messages.some(({ method }) => method?.endsWith("/list"));
}
