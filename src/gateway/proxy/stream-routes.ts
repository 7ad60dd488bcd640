// The routes of the streaming path: which MCP session a request names, its admission, the upstream's response, and the
// caller's connection, which stays open however long either side is silent. The exchange itself is in streaming/streams.ts.
import { createHmac, timingSafeEqual } from "node:crypto";
import type { Call } from "../../core/call.ts";
import { Fault, methodNotAllowed, noSuch } from "../../core/fault.ts";
import { routes } from "../../http/elysia.ts";
import { type Scope, scopeOf } from "../../http/server.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { thisMoment } from "../../kernel/time.ts";
import { actingRequest } from "../../kernel/wait.ts";
import { untilStored } from "../../storage/failures.ts";
import { type CallBody, hashOf, judged, startOf } from "../../wire/body.ts";
import { RPC_MESSAGES, type RpcMessages, type RpcProblem } from "../../wire/jsonrpc.ts";
import { SESSION_HEADER } from "../../wire/mcp-headers.ts";
import type { Network } from "../../x402/network.ts";
import type { InvocableAgent } from "../agents/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { claim, type InvocationKey, type InvocationRow } from "../invocations/service.ts";
import { type PaidHeaders, paidByHeader } from "../payment/service.ts";
import { leadsBack } from "../streaming/response.ts";
import type { OpenedCall, OpenedConnection, StreamLimits, StreamPermit, Streams } from "../streaming/streams.ts";
import { mcpVersion, passedToStream, passesEchoedHeaders } from "../upstream/headers.ts";
import type { Claims } from "../upstream/ownership.ts";
import { type CallKind, type CallOptions, type CheckedCall, gatherCall, type ProxyCall, shownBy } from "./gather.ts";
import { loopProblem, type ParsedRequest, PLAIN, rateProblem, stateProblem } from "./judge.ts";
import { endSession, listen, streamCall } from "./openapi.ts";
import { acceptedOf, otherPathFault, record, recordedFault, withId } from "./record.ts";

const METHODS = ["POST", "GET", "DELETE"];

type Method = OpenedConnection["method"];

export interface StreamRoutesOptions {
  readonly network: Network;
  readonly streams: Streams;
  /** The URL at which callers reach the gateway; null to go by the Host header of each request. */
  readonly publicUrl: string | null;
  readonly sessionIdsOf: SessionIdsOf;
  /** Web origins whose pages may use mcp agents, in addition to the gateway's own. */
  readonly allowedOrigins: readonly string[];
  port(): number;
  readonly admission: AdmitStreamOptions;
}

export function streamRoutes(options: StreamRoutesOptions) {
  return routes()
    .post("/v1/proxy/:id/stream", ({ request, params }) => handleCall(options, request, params.id), {
      parse: "none",
      detail: streamCall(options.network),
    })
    .get("/v1/proxy/:id/stream", ({ request, params }) => handleConnection(options, request, params.id, "GET"), {
      detail: listen,
    })
    .delete("/v1/proxy/:id/stream", ({ request, params }) => handleConnection(options, request, params.id, "DELETE"), {
      parse: "none",
      detail: endSession,
    });
}

async function handleCall(options: StreamRoutesOptions, request: Request, agentId: string): Promise<Response> {
  const scope = scopeOf(request);
  const incoming = uncheckedOf(request, scope, agentId);
  const { note, caller, holdOpen, intake } = scope;
  const { streams, admission } = options;
  const over = () => holdOpen(false);
  const { promise: untilSent, resolve: sent } = Promise.withResolvers<void>();
  const { promise: ending, resolve: endBy } = Promise.withResolvers<() => void>();
  async function readBody(): Promise<CallBody> {
    const held = { until: untilSent, endBy: ending, storedMax: MAX.capturedBytes };
    const body = await intake.readBody(request, caller.tenant, MAX.bodyBytes, held);
    // From here on only the timeouts of the upstream exchange end the connection.
    holdOpen(true);
    return body;
  }
  const leave = streams.enter();
  try {
    const { ids, session } = await sessionOf(options, incoming, "POST");
    const { opened, body } = await admitStream(admission, { ...incoming, session, readBody, note });
    admission.meters.accepted();
    const response = await streams.call(opened, body, { sent, endBy, over, callerSignal: incoming.signal });
    return asGateway(options, request.headers.get("host"), ids, response);
  } catch (error) {
    sent();
    over();
    throw error;
  } finally {
    leave();
  }
}

async function handleConnection(options: StreamRoutesOptions, request: Request, agentId: string, method: Method) {
  const scope = scopeOf(request);
  const incoming = uncheckedOf(request, scope, agentId);
  const over = () => scope.holdOpen(false);
  scope.holdOpen(true);
  try {
    if (scope.method === "HEAD") throw methodNotAllowed(METHODS);
    const { ids, session } = await sessionOf(options, incoming, method);
    const opened = await admitConnection(options.admission, { ...incoming, session }, method);
    const end = { sent() {}, endBy() {}, over, callerSignal: incoming.signal };
    return asGateway(options, request.headers.get("host"), ids, await options.streams.connect(opened, end));
  } catch (error) {
    over();
    throw error;
  }
}

/** A request whose session has not been checked yet. */
interface UncheckedRequest extends Omit<ProxyCall, "readBody" | "note"> {
  readonly signal: AbortSignal;
}

interface StreamRequest extends UncheckedRequest {
  /** The upstream's ID of the MCP session, which the caller has proved to be its own; null for none. */
  readonly session: string | null;
}

type StreamCall = ProxyCall & StreamRequest;

function uncheckedOf({ headers, signal }: Request, { caller, requestId }: Scope, agentId: string): UncheckedRequest {
  return { caller, agentId, headers, requestId, signal };
}

/** Rewrites the upstream's response for the caller: seals the session ID, and drops a redirect to the gateway itself. */
function asGateway(
  { publicUrl }: StreamRoutesOptions,
  host: string | null,
  ids: SessionIds | null,
  response: Response,
) {
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
  const hosts = [own, host].filter((each) => each !== null);
  if (leadsBack(location, hosts)) headers.delete("location");
  return response;
}

/**
 * The upstream's ID of the session that the request names, and the sealer for this caller's session IDs; both null unless the
 * agent is an mcp agent. A session of another caller is a 404, like an unknown one, so that an MCP client opens its own.
 * Event IDs are unique only within a session, so `Last-Event-ID` needs one.
 * @throws Fault `not_found`
 */
async function sessionOf(options: StreamRoutesOptions, { caller, agentId, headers }: UncheckedRequest, method: string) {
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

/** MCP demands this check against DNS rebinding, where even the Host header is forged. @throws Fault `denied` */
function checkOrigin({ publicUrl, allowedOrigins, port }: StreamRoutesOptions, origin: string | null): void {
  if (origin === null || allowedOrigins.includes(origin)) return;
  const own = publicUrl === null ? OWN_HOSTS.map((host) => `http://${host}:${port()}`) : [new URL(publicUrl).origin];
  if (own.some((each) => new URL(each).origin === origin)) return;
  throw new Fault("denied", "Origin: not allowed; the operator can add it to TOLLGATE_ALLOWED_ORIGINS");
}

const OWN_HOSTS = ["localhost", "127.0.0.1", "[::1]"];

// Sealed session IDs. The upstream knows the gateway's credential but not the callers, so the gateway must tell whose session
// is whose. A caller gets the upstream's session ID followed by a seal (HMAC), which binds the ID to tenant, agent and user.
// Nothing is stored: a seal stays valid after a restart, on every replica, and after a change of the master key.

/** A session ID as MCP allows it (visible ASCII), short enough for a header. */
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
    /** The sealed ID for the caller; null when the upstream's ID is not valid. */
    toCaller: (id: string) => (UPSTREAM_ID.test(id) ? `${id}${SEPARATOR}${sealOf(id)}` : null),
    /** The upstream's ID; null when the sealed ID was not issued to this owner. */
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

// Admission. A call that has passed the checks takes a stream slot and is recorded, paid for and claimed. If the outcome of
// the payment is unknown, the call stays pending, and a retry with the payment resumes it on any replica. Each request claims
// with a token of its own, so that only one of several retries makes the call.

export interface AdmitStreamOptions extends CallOptions {
  readonly claims: Claims;
  readonly limits: StreamLimits;
  readonly stopping: AbortSignal;
}

/** A call that has passed the checks. */
interface AdmittedCall {
  readonly options: AdmitStreamOptions;
  readonly call: StreamCall;
  readonly checked: CheckedCall<ParsedStreamRequest>;
}

/** @throws Fault of every kind that the order of checks names; a Fault after the record carries the invocation's ID */
async function admitStream(options: AdmitStreamOptions, call: StreamCall) {
  const checked = await gatherCall(options, call, STREAMED);
  const { agent, parsed, body, earlierId } = checked;
  const admitted = { options, call, checked };
  if (earlierId !== null) return { opened: await resume(admitted, earlierId, null), body };
  const permit = await options.limits.take(call.caller.tenant, agent.id, parsed.calls.length > 0, call.signal);
  try {
    return { opened: await openNew(admitted, permit), body };
  } catch (error) {
    permit.release();
    throw error;
  }
}

async function openNew(admitted: AdmittedCall, permit: StreamPermit): Promise<OpenedCall> {
  const { options, call, checked } = admitted;
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
  // Only the captured start of the body is stored: a caller who resumes the call sends the body again.
  const body = agent.capture_body ? startOf(checked.body, MAX.capturedBytes) : new Uint8Array();
  const accepted = { ...whole, body };
  const { tenant, id, settlement_status } = accepted.row;
  const key = { tenant, id };
  call.note("invocation_id", id);
  if (settlement_status === "pending") {
    const { isNew, payment, ...stored } = await record(options, checked, accepted, null);
    if (payment === null || !isNew) return resume(admitted, stored.id, permit);
    const paid = await withId(id, shownBy(STREAMED, payments.settle(payment)));
    return claimPending(admitted, key, paid, permit);
  }
  let storedId = id;
  const opened = await attempt(claims, id, async (held) => {
    const stored = await record(options, checked, accepted, { owner, token: held.token });
    storedId = stored.id;
    const parts = { ...held, key, slot: permit, isResumable: false };
    return stored.isNew ? openedOf(parts, checked, accepted.call, {}) : null;
  });
  return opened ?? resume(admitted, storedId, permit);
}

/** Runs `work` under a new claim, which ends if `work` returns null or fails. A claim stored all the same is released later. */
async function attempt(
  claims: Claims,
  id: string,
  work: (held: Pick<OpenedCall, "token" | "claimedAt">) => Promise<OpenedCall | null>,
): Promise<OpenedCall | null> {
  const token = claims.begin();
  const claimedAt = thisMoment();
  let opened: OpenedCall | null = null;
  try {
    opened = await work({ token, claimedAt });
    if (opened !== null) claims.took(token, id);
    return opened;
  } finally {
    if (opened === null) claims.over(token);
  }
}

async function resume(admitted: AdmittedCall, id: string, permit: StreamPermit | null): Promise<OpenedCall> {
  const { options, call } = admitted;
  const key = { tenant: call.caller.tenant, id };
  call.note("invocation_id", id);
  const { mode } = await findInvocation(options.store.read, key.tenant, id);
  if (mode !== "streaming") throw otherPathFault(id);
  return claimPending(admitted, key, await recalled(options, key), permit);
}

/**
 * Claims a pending call for this request.
 * @throws Fault `unavailable` while the payment's outcome is unknown; `payment_required` when the payment was declined;
 *   `conflict` when the call was made, given up or claimed
 */
async function claimPending(call: AdmittedCall, key: InvocationKey, paid: PaidHeaders, permit: StreamPermit | null) {
  const { options, checked } = call;
  const request = actingRequest();
  const isTold = Object.keys(paid).length > 0;
  // What is paid for is served however long the database takes.
  if (isTold) request?.liftBound();
  const toldHeaders = async () => (isTold ? paid : recalled(options, key));
  const own = permit ?? options.limits.forResumed(key.tenant, checked.agent.id);
  const opened = await attempt(options.claims, key.id, async (held) => {
    const claimed = await claimAs(call, key, held.token);
    if (claimed === null) return null;
    // A call whose payment was declined or is unknown can't be claimed, so this one is paid for.
    request?.liftBound();
    return openedOf({ ...held, key, slot: own, isResumable: true }, checked, claimed.call, await toldHeaders());
  }).catch((error) => {
    own.release();
    throw error;
  });
  if (opened !== null) return opened;
  own.release();
  const find = () => findInvocation(options.store.read, key.tenant, key.id);
  let row = await find();
  // A claim ends after the end of its call is stored. If that came between the two, another look shows it.
  if (isLostClaim(options, row)) row = await find();
  if (row.status === "pending" || isLostClaim(options, row)) throw outcomeUnknown(key.id);
  throw recordedFault(new Fault("conflict", whyNotMade(row)), key.id, await toldHeaders());
}

const recalled = ({ payments }: AdmitStreamOptions, { tenant, id }: InvocationKey) =>
  withId(id, shownBy(STREAMED, payments.recall(tenant, id)));

/** @throws Fault `unavailable` when the caller has gone, or has waited for the store too long; the claim may be stored then */
async function claimAs({ options, call: { signal } }: AdmittedCall, key: InvocationKey, token: string) {
  const { store, clock, stopping, replica: owner } = options;
  const isOver = () => signal.aborted || stopping.aborted;
  try {
    return await untilStored(async () => {
      // Nothing is claimed for a caller who has gone, so that a retry with the payment can still resume the call.
      if (isOver()) throw outcomeUnknown(key.id);
      return claim(store, { key, owner, token, now: clock.now() });
    }, isOver);
  } catch (error) {
    const isAway = error instanceof Fault && error.kind === "unavailable";
    throw isAway ? outcomeUnknown(key.id) : error;
  }
}

/** Whether the claim is of a request here that gave up before it learned that its claim was stored. It is released soon. */
const isLostClaim = ({ claims, replica }: AdmitStreamOptions, { status, owner, claim }: InvocationRow) =>
  status === "running" && owner === replica && claim !== null && claims.fateOf(claim) === "release";

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

function outcomeUnknown(id: string): Fault {
  const message = "the payment's outcome is not known yet: send the same payment again";
  return recordedFault(new Fault("unavailable", message, { retryAfterSeconds: 5 }), id);
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
  // The MCP version that echoes parts of the body in headers is the one that lets clients cache tool lists.
  const listsTools = parsed.listsTools && protocol === "mcp" ? { hasCacheHints: parsed.echoedMcpHeaders } : null;
  return { ...held, ...request, capture, receipt, listsTools, responseHeaders };
}

/** Admits a GET or DELETE, which makes no invocation. @throws Fault `method_not_allowed` for an http agent; else as a call */
async function admitConnection(options: AdmitStreamOptions, request: StreamRequest, method: Method) {
  const { tenant } = request.caller;
  const agent = await options.agents.find(tenant, request.agentId);
  if (agent === null) throw noSuch("agt", request.agentId);
  const loop = loopProblem(request.headers, options.pseudonym);
  if (loop !== null) throw loop;
  if (agent.protocol !== "mcp") throw methodNotAllowed(["POST"], " for the agent's protocol");
  const refusal = stateProblem(agent) ?? rateProblem(await options.rates.take(tenant, agent));
  if (refusal !== null) throw refusal;
  const permit = await options.limits.take(tenant, agent.id, false, request.signal);
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
    slot: permit,
    method,
  };
}

// The body of a streamed call to an mcp agent: one JSON-RPC message, or a batch of them.

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
  // Of a batch with several messages, the history shows the one call if there is exactly one.
  const shown = messages.length === 1 ? messages : calls;
  const { method = null, tool = null } = (shown.length === 1 ? shown[0] : undefined) ?? {};
  return { method, tool, calls, echoedMcpHeaders, listsTools: listsTools(parsed) };
}

const listsTools = (parsed: RpcMessages | RpcProblem): boolean =>
  parsed.ok && parsed.messages.some(({ method }) => method?.endsWith("/list"));
