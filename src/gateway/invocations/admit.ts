// The order of checks on a proxy call, from top to bottom: agent → invocable → rate → model → body → form →
// idempotency → policy → payment → record → settlement. What is refused leaves no invocation behind,
// except one whose payment the facilitator declined: that one was recorded before money could move.
import type { Call } from "../../core/call.ts";
import type { Caller } from "../../core/caller.ts";
import type { Clock } from "../../core/clock.ts";
import { sha256Of } from "../../core/digest.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import { parseRpcRequest } from "../../core/jsonrpc.ts";
import { agentStatus } from "../../core/states.ts";
import { type Store, UniqueViolation } from "../../storage/store.ts";
import { type InvocableAgent, priceOf } from "../agents/service.ts";
import {
  type Charge,
  type PaidHeaders,
  type PaymentRow,
  type Payments,
  type PricedCall,
  paidColumns,
  recordPayment,
} from "../payment/service.ts";
import { type PolicyService, warningOf } from "../policy/service.ts";
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
  /** Told when the body is stored, and need not be kept any longer. */
  stored(): void;
  /** Adds a field to the request's line in the log. */
  note(name: string, value: string): void;
}

export interface AdmitOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly payments: Payments;
  readonly policy: Pick<PolicyService, "judge">;
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

export interface Admitted {
  readonly id: string;
  /** Of the answer: what is told of a payment that was settled, and the policy's warning. */
  readonly headers: Readonly<Record<string, string>>;
}

/**
 * Accepts a call, durably, and settles its payment.
 *
 * @throws Fault of every kind that the order of checks names
 */
export async function admit(options: AdmitOptions, call: ProxyCall): Promise<Admitted> {
  const { payments } = options;
  const { id, isNew, payment, warning } = await record(options, call);
  call.stored();
  call.note("invocation_id", id);
  const headers = isNew ? await settle(payments, payment) : await payments.recall(call.caller.tenant, id);
  return { id, headers: warning === null ? headers : { ...headers, "x-service-policy-warning": warning } };
}

async function settle(payments: Payments, payment: PaymentRow | null): Promise<PaidHeaders> {
  return payment === null ? {} : payments.settle(payment);
}

interface Stored {
  readonly id: string;
  /** False: the call had been made before, and this is the same one. */
  readonly isNew: boolean;
  readonly payment: PaymentRow | null;
}

interface Recorded extends Stored {
  /** What the policy warns of. */
  readonly warning: string | null;
}

const earlier = (id: string): Stored => ({ id, isNew: false, payment: null });

/** From the checks to the record. The body is gone when this has ended, however long its payment takes. */
async function record(options: AdmitOptions, call: ProxyCall): Promise<Recorded> {
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
    if (first !== null) return { ...earlier(first), warning: null };
  }
  const warning = warningOf(
    await options.policy.judge({
      tenant,
      user,
      agent_id: agent.id,
      protocol: agent.protocol,
      mcp_tool: rpc?.tool ?? null,
      body_bytes: body.byteLength,
    }),
  );
  return { ...(await chargeAndStore(options, { call, agent, url, model, body, rpc, idempotency })), warning };
}

interface Judged {
  readonly call: ProxyCall;
  readonly agent: InvocableAgent;
  readonly url: string;
  readonly model: string | null;
  readonly body: Uint8Array;
  readonly rpc: Rpc | null;
  readonly idempotency: Idempotency | null;
}

/** The payment of a call that may be made, and its record. */
async function chargeAndStore(options: AdmitOptions, judged: Judged): Promise<Stored> {
  const { store, clock, payments } = options;
  const { call, agent, url, model, body, rpc, idempotency } = judged;
  const { tenant, user } = call.caller;
  const price = priceOf(agent, rpc?.tool ?? null);
  const { headers, note } = call;
  const asked = { tenant, caller: user, agent_id: agent.id, price, headers, body, note };
  const checked = await payments.check(asked);
  if (checked.kind === "known") return earlier(checked.invocation_id);

  const charge = checked.kind === "charge" ? checked.charge : null;
  const now = clock.now();
  const row = newRow({ agent, tenant, caller: user, model, rpc, charge, body, now });
  const accepted = { row, call: callOf(agent, url, call), body, idempotency };
  if (charge !== null) return storePaidCall(options, accepted, asked, charge);
  const id = await storeCall(store, accepted, null);
  if (id !== row.id) return earlier(id);
  options.offer(accepted);
  return { id, isNew: true, payment: null };
}

async function storePaidCall(
  { store, payments, offer }: AdmitOptions,
  accepted: Accepted,
  asked: PricedCall,
  charge: Charge,
): Promise<Stored> {
  const { row } = accepted;
  const payment = payments.paymentRow(charge, row);
  try {
    const id = await storeCall(store, accepted, payment);
    if (id !== row.id) return earlier(id);
  } catch (error) {
    // Someone has used the payment between the check and the record.
    const used = error instanceof UniqueViolation ? await payments.check(asked) : null;
    if (used?.kind !== "known") throw error;
    return earlier(used.invocation_id);
  }
  // Without a facilitator there is nothing to wait for.
  if (row.settlement_status === null) offer(accepted);
  return { id: row.id, isNew: true, payment };
}

/**
 * A commit whose answer was lost may have been made; then the call is accepted, and to say otherwise would have
 * it made twice.
 *
 * @throws UniqueViolation when the payment has been used here before
 */
async function storeCall(store: Store, accepted: Accepted, payment: PaymentRow | null): Promise<string> {
  const { row } = accepted;
  try {
    return await store.write(async (tx) => {
      const id = await accept(tx, accepted, row.updated_at);
      if (payment !== null && id === row.id) await recordPayment(tx, payment);
      return id;
    });
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
  return key === null ? null : { key, body_sha256: sha256Of(body) };
}

function callOf(agent: InvocableAgent, url: string, call: ProxyCall): Call {
  return {
    url,
    protocol: agent.protocol,
    mcp_protocol_version: agent.mcp_protocol_version,
    credential_ref: agent.credential_ref,
    capture: agent.capture_body,
    receipt: agent.emit_receipts,
    headers: passedHeaders(call.headers),
    request_id: call.requestId,
  };
}

const UNPAID = {
  payment_network: null,
  payment_asset: null,
  payment_amount: null,
  payment_payer: null,
  payment_nonce: null,
  settlement_status: null,
  settlement: null,
};

interface NewRow {
  readonly agent: InvocableAgent;
  readonly tenant: string;
  readonly caller: string;
  readonly model: string | null;
  readonly rpc: Rpc | null;
  readonly charge: Charge | null;
  readonly body: Uint8Array;
  readonly now: number;
}

function newRow({ agent, tenant, caller, model, rpc, charge, body, now }: NewRow): InvocationRow {
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
    ...(charge === null ? UNPAID : paidColumns(charge)),
    upstream_status: null,
    latency_ms: null,
    ttft_ms: null,
    req_size: body.byteLength,
    resp_size: null,
    req_sha256: agent.emit_receipts ? sha256Of(body) : null,
    resp_sha256: null,
    response_content_type: null,
    response_truncated: false,
    body_captured: agent.capture_body,
    emit_receipt: agent.emit_receipts,
    owner: null,
    updated_at: now,
    completed_at: null,
  };
}
