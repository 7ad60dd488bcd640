// Records a call that has passed the checks: its row, all that is needed to make it later, and its payment, in one write.
// Both paths of calls use it, and it also makes the errors of recorded calls, which carry the invocation's ID.
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import type { Mode } from "../../core/states.ts";
import { CommitUnknown, type Tx, UniqueViolation } from "../../storage/store.ts";
import { holdCredential, mayGoTo } from "../credentials/service.ts";
import type { UnsureCall } from "../invocations/lost-commits.ts";
import { type AcceptedCall, type AcceptedRow, type AcceptingClaim, accept } from "../invocations/service.ts";
import { type PricedCall, paidColumns } from "../payment/service.ts";
import { insertPayment, type PaymentRow } from "../payment/store.ts";
import { agentIsChanging, type CallOptions, type CheckedCall, type ProxyCall } from "./gather.ts";
import type { ParsedRequest } from "./judge.ts";

interface StoredCall {
  readonly id: string;
  /** False when `id` is an earlier call that this request repeats. */
  readonly isNew: boolean;
  readonly payment: PaymentRow | null;
}

export function acceptedOf(
  options: CallOptions,
  call: ProxyCall,
  checked: CheckedCall<ParsedRequest>,
  { mode, headers, hash }: { readonly mode: Mode; readonly headers: Call["headers"]; readonly hash: string | null },
): AcceptedCall {
  const { agent, body, idempotency } = checked;
  const accepted: Call = {
    url: agent.upstream_url ?? "",
    protocol: agent.protocol,
    mcp_protocol_version: agent.mcp_protocol_version,
    credential_ref: agent.credential_ref,
    capture: agent.capture_body,
    receipt: agent.emit_receipts,
    headers,
    request_id: call.requestId,
  };
  return { row: newRow(options, call, checked, mode, hash), call: accepted, body, idempotency };
}

/**
 * Stores a checked call with its payment.
 * @param claim is made in the same write; null leaves the call pending
 * @throws Fault `conflict` for a key that had another body; `payment_required` for a payment used meanwhile
 */
export async function record(
  options: CallOptions,
  { payment: charged }: CheckedCall<ParsedRequest>,
  accepted: AcceptedCall,
  claim: AcceptingClaim | null,
): Promise<StoredCall> {
  const { row, call } = accepted;
  const payment = charged === null ? null : options.payments.paymentRow(charged.charge, row, call.credential_ref);
  const storing = (paid: PaymentRow) => async (tx: Tx) => {
    await requireCredential(tx, row.tenant, call);
    await insertPayment(tx, paid);
  };
  for (let tries = 1; ; tries++) {
    let id: string;
    try {
      id = await accept(options.store, accepted, claim, payment && storing(payment));
    } catch (error) {
      const unsure = { tenant: row.tenant, id: row.id, claim: claim?.token ?? null };
      id = await idDespite(error, options, unsure, charged?.priced ?? null);
    }
    if (id === row.id) {
      if (payment !== null) options.meters.payment("accepted");
      return { id, isNew: true, payment };
    }
    // The earlier call may be a refused one whose record has only just appeared; once that is removed, a retry may succeed.
    const isEarlier = tries === 3 || !(await options.refusals.removeIfRefused({ tenant: row.tenant, id }));
    if (isEarlier) return { id, isNew: false, payment: null };
  }
}

/** The ID of the call that is stored although this write has failed. A refusal would make its caller send the call twice. */
async function idDespite(
  error: unknown,
  { refusals, payments }: CallOptions,
  call: UnsureCall,
  priced: PricedCall | null,
): Promise<string> {
  if (error instanceof CommitUnknown && (await refusals.wasStored(call))) return call.id;
  // Another request may have used the payment between the check and the write.
  const isUsed = error instanceof UniqueViolation && priced !== null;
  const used = isUsed ? await payments.check(priced) : null;
  if (used?.kind !== "known") throw error;
  return used.invocation_id;
}

/**
 * Locks the credential of a paid call until the write ends; a credential that a stored call needs can't be deleted.
 * @throws Fault `unavailable` when it was deleted; `agent_not_invocable` when its `allowed_hosts` omit the host
 */
async function requireCredential(tx: Tx, tenant: string, { credential_ref, url }: Call): Promise<void> {
  if (credential_ref === null) return;
  const held = await holdCredential(tx, tenant, credential_ref);
  if (held === null) throw agentIsChanging();
  if (mayGoTo(held, url)) return;
  throw new Fault("agent_not_invocable", "the credential's allowed_hosts omit the agent's host");
}

function newRow(
  { store, clock, replica }: CallOptions,
  { caller }: ProxyCall,
  checked: CheckedCall<ParsedRequest>,
  mode: Mode,
  req_sha256: string | null,
): AcceptedRow {
  const { agent, model, parsed, body, payment } = checked;
  const now = clock.now();
  const row: AcceptedRow = {
    tenant: caller.tenant,
    id: newId("inv", now),
    agent_id: agent.id,
    caller: caller.user,
    mode,
    model,
    mcp_method: parsed.method,
    mcp_tool: parsed.tool,
    payment_network: null,
    payment_asset: null,
    payment_amount: null,
    payment_payer: null,
    payment_nonce: null,
    settlement_status: null,
    settlement: null,
    req_size: body.byteLength,
    req_sha256,
    body_captured: agent.capture_body,
    outbox: agent.emit_receipts ? "receipt" : null,
    accepted_by: store.isShared ? replica : null,
    updated_at: now,
  };
  return payment === null ? row : { ...row, ...paidColumns(payment.charge) };
}

// Errors of a call that has a record. They carry its ID, so that the caller can look the call up.

export function recordedFault(
  { kind, message, retryAfterSeconds, answer }: Fault,
  id: string,
  paid: Readonly<Record<string, string>> = {},
): Fault {
  const headers = { ...answer?.headers, ...paid, "x-service-invocation-id": id };
  const retry = retryAfterSeconds !== undefined && { retryAfterSeconds };
  return new Fault(kind, message, { ...retry, answer: { body: { error: message }, headers } });
}

export async function withId<T>(id: string, work: Promise<T>): Promise<T> {
  return work.catch((error) => {
    throw error instanceof Fault ? recordedFault(error, id) : error;
  });
}

/** The idempotency key or payment belongs to a call on the other path: polled instead of streamed, or the reverse. */
export const otherPathFault = (id: string): Fault =>
  recordedFault(new Fault("conflict", "this key or payment belongs to a call on the agent's other path"), id);
