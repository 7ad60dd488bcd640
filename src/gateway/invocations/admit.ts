// The order of checks on a proxy call, from top to bottom: agent → invocable → rate → model → body → form →
// idempotency → policy (to come) → payment → record. What is refused leaves no invocation behind.
import { createHash } from "node:crypto";
import type { Call } from "../../core/call.ts";
import type { Caller } from "../../core/caller.ts";
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import { parseRpcRequest } from "../../core/jsonrpc.ts";
import { agentStatus } from "../../core/states.ts";
import type { Store } from "../../storage/store.ts";
import { type InvocableAgent, priceOf } from "../agents/service.ts";
import { idempotencyKey, passedHeaders, serviceModel } from "./command.ts";
import { findInvocation } from "./history.ts";
import { findByIdempotencyKey, type Idempotency } from "./idempotency.ts";
import { type Accepted, accept, type InvocationRow } from "./service.ts";

export interface ProxyCall {
  readonly caller: Caller;
  readonly agentId: string;
  readonly headers: Headers;
  readonly requestId: string;
  readBody(): Promise<Uint8Array>;
}

export interface AdmitOptions {
  readonly store: Store;
  readonly clock: Clock;
  findAgent(tenant: string, agentId: string): Promise<InvocableAgent | null>;
  /** Takes a token of the agent's bucket: null, or the whole seconds until there is one. */
  takeToken(agent: InvocableAgent): number | null;
  /** Told of each accepted call, after it is durable. */
  offer(accepted: Accepted): void;
}

interface Rpc {
  readonly method: string;
  readonly tool: string | null;
}

/**
 * Accepts a call, durably: resolves to the invocation's ID.
 *
 * @throws Fault of every kind that the order of checks names
 */
export async function admit(options: AdmitOptions, call: ProxyCall): Promise<string> {
  const { store, clock } = options;
  const { tenant, user } = call.caller;
  const agent = await options.findAgent(tenant, call.agentId);
  if (agent === null) throw new Fault("not_found", "no such agent");
  const url = invocableUrl(agent);
  const retryAfterSeconds = options.takeToken(agent);
  if (retryAfterSeconds !== null) {
    throw new Fault("rate_limited", "the agent's invocation rate limit is exceeded", { retryAfterSeconds });
  }
  const model = serviceModel(call.headers);
  const body = await call.readBody();
  const rpc = agent.protocol === "mcp" ? requireRpc(body) : null;
  const idempotency = readIdempotency(call.headers, body);
  if (idempotency !== null) {
    const owner = { tenant, caller: user, agent_id: agent.id };
    const first = await findByIdempotencyKey(store.read, owner, idempotency, clock.now());
    if (first !== null) return first;
  }
  requirePayment(agent, rpc);

  const now = clock.now();
  const row = newRow({ agent, tenant, caller: user, model, rpc, size: body.byteLength, now });
  const accepted = { row, call: callOf(agent, url, call), body, idempotency };
  const id = await storeCall(store, accepted, now);
  if (id === row.id) options.offer(accepted);
  return id;
}

/**
 * A commit whose answer was lost may have been made; then the call is accepted, and to say otherwise would have
 * it made twice.
 */
async function storeCall(store: Store, accepted: Accepted, now: number): Promise<string> {
  const { row } = accepted;
  try {
    return await store.write((tx) => accept(tx, accepted, now));
  } catch (error) {
    if (!(error instanceof Fault) || error.kind !== "unavailable") throw error;
    const found = await findInvocation(store.read, row.tenant, row.id).catch(() => null);
    if (found === null) throw error;
    return found.id;
  }
}

function invocableUrl(agent: InvocableAgent): string {
  const refuse = (why: string) => new Fault("agent_not_invocable", `the agent ${why}`);
  if (agentStatus(agent) === "inactive") throw refuse("is inactive");
  if (agent.suspended) throw refuse("is suspended");
  if (agent.upstream_url === null) throw refuse("has no upstream_url");
  return agent.upstream_url;
}

function requireRpc(body: Uint8Array): Rpc {
  const request = parseRpcRequest(body);
  if (!request.ok) throw new Fault("invalid_request", `body: ${request.problem}`);
  return request;
}

function readIdempotency(headers: Headers, body: Uint8Array): Idempotency | null {
  const key = idempotencyKey(headers);
  return key === null ? null : { key, body_sha256: createHash("sha256").update(body).digest("hex") };
}

/** A priced call must be paid for, and payments are not taken yet: refusing it is what loses nobody money. */
function requirePayment(agent: InvocableAgent, rpc: Rpc | null): void {
  if (priceOf(agent, rpc?.tool ?? null) !== null) {
    throw new Fault("payment_required", "the agent is priced, and this version takes no payments yet");
  }
}

function callOf(agent: InvocableAgent, url: string, call: ProxyCall): Call {
  return {
    url,
    protocol: agent.protocol,
    mcp_protocol_version: agent.mcp_protocol_version,
    credential_ref: agent.credential_ref,
    capture: agent.capture_body,
    headers: passedHeaders(call.headers),
    request_id: call.requestId,
  };
}

interface NewRow {
  readonly agent: InvocableAgent;
  readonly tenant: string;
  readonly caller: string;
  readonly model: string | null;
  readonly rpc: Rpc | null;
  readonly size: number;
  readonly now: number;
}

function newRow({ agent, tenant, caller, model, rpc, size, now }: NewRow): InvocationRow {
  return {
    tenant,
    id: newId("inv", now),
    agent_id: agent.id,
    caller,
    mode: "transactional",
    status: "pending",
    error_class: null,
    model,
    mcp_method: rpc?.method ?? null,
    mcp_tool: rpc?.tool ?? null,
    payment_network: null,
    payment_asset: null,
    payment_amount: null,
    payment_payer: null,
    payment_nonce: null,
    settlement_status: null,
    settlement: null,
    upstream_status: null,
    latency_ms: null,
    ttft_ms: null,
    req_size: size,
    resp_size: null,
    response_content_type: null,
    response_truncated: false,
    body_captured: agent.capture_body,
    emit_receipt: agent.emit_receipts,
    owner: null,
    updated_at: now,
    completed_at: null,
  };
}
