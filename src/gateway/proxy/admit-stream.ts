// Admission on the streaming path. A call that has passed the checks takes a place and is recorded, paid for and
// claimed. Then it is made on its caller's connection. If the outcome of the payment is unknown, the call stays
// pending. The same payment sent again resumes it on any replica, and only one request gets it: each claims with a
// token of its own.

import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { CAPTURE_BYTES_MAX } from "../../kernel/limits.ts";
import { thisMoment } from "../../kernel/time.ts";
import { bodyInSteps } from "../../kernel/turns.ts";
import { untilStored } from "../../storage/failures.ts";
import { type CallBody, hashOf, startOf, wholeOf } from "../../wire/body.ts";
import { parseRpcMessages, type RpcMessage, type RpcMessages, type RpcProblem } from "../../wire/jsonrpc.ts";
import type { InvocableAgent } from "../agents/store.ts";
import { findInvocation } from "../invocations/history.ts";
import {
  type Claims,
  claim,
  type InvocationKey,
  type InvocationRow,
  type PendingCall,
} from "../invocations/service.ts";
import type { PaidHeaders, Payments } from "../payment/service.ts";
import type { OpenedCall, OpenedConnection, StreamCall, StreamPermit, StreamRequest } from "../streaming/service.ts";
import type { StreamLimits } from "../streaming/stream-limits.ts";
import {
  type CallKind,
  type CheckedCall,
  type CheckOptions,
  checkCall,
  checkRate,
  existing,
  invocableUrl,
  type ParsedRequest,
  type ProxyCall,
  refuseLoop,
} from "./checks.ts";
import { acceptedOf, faultOf, otherPath, type RecordOptions, record, withId } from "./record.ts";
import { mcpVersion, passedToStream, passesEchoedHeaders } from "./request-headers.ts";

export interface AdmitStreamOptions extends CheckOptions, Pick<RecordOptions, "replica" | "meters"> {
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
export async function admitStream(options: AdmitStreamOptions, call: StreamCall) {
  const checked = await checkCall(options, call, STREAMING);
  const { agent, parsed, body, paymentState } = checked;
  if (paymentState.kind === "earlier")
    return { opened: await resume(options, call, checked, paymentState.id, null), body };
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
  return agent.capture_body ? startOf(body, CAPTURE_BYTES_MAX) : new Uint8Array();
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
    return claim(store, { key, owner, token, now: clock.now(), inHand: null });
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
export async function admitConnection(
  options: AdmitStreamOptions,
  request: StreamRequest,
  method: OpenedConnection["method"],
): Promise<OpenedConnection> {
  const agent = existing(await options.findAgent(request.caller.tenant, request.agentId));
  refuseLoop(options, request);
  if (agent.protocol !== "mcp") {
    throw new Fault("method_not_allowed", "the agent's protocol has other methods", { allow: ["POST"] });
  }
  const url = invocableUrl(agent);
  checkRate(await options.takeToken(request.caller.tenant, agent));
  const place = await options.limits.take(request.caller.tenant, agent.id, false, request.signal);
  return {
    tenant: request.caller.tenant,
    agentId: agent.id,
    url,
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

// What the body of a call on the streaming path asks of its agent: one JSON-RPC message or a batch of them.

export interface ParsedStreamRequest extends ParsedRequest {
  readonly listsTools: boolean;
}

const PLAIN: ParsedStreamRequest = {
  method: null,
  tool: null,
  calls: [{ tool: null }],
  echoedMcpHeaders: false,
  listsTools: false,
};

const STREAMING: CallKind<ParsedStreamRequest> = {
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
