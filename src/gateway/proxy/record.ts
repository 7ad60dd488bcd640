// The record of a call that has passed the checks: its row, what is kept to make it, and its payment, in one write.
import type { Call } from "../../core/call.ts";
import { Fault, type FaultKind } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import type { Meters } from "../../core/meters.ts";
import type { Mode } from "../../core/states.ts";
import type { Clock } from "../../core/time.ts";
import { CommitUnknown, type Store, type Tx, UniqueViolation } from "../../storage/store.ts";
import { holdCredential, mayGoTo } from "../credentials/service.ts";
import type { LostCommits } from "../invocations/lost-commits.ts";
import { type AcceptedCall, accept, type Claim, type InvocationRow } from "../invocations/service.ts";
import { type Payments, type PricedCall, paidColumns } from "../payment/service.ts";
import { insertPayment, type PaymentRow } from "../payment/store.ts";
import { beingChanged, type CheckedCall, type ProxyCall } from "./gather.ts";
import type { ParsedRequest } from "./judge.ts";

export interface RecordOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly payments: Pick<Payments, "check" | "paymentRow">;
  readonly refusals: Pick<LostCommits, "isRefused" | "wasStored">;
  readonly meters: Pick<Meters, "accepted" | "payment">;
  readonly replica: string;
}

export interface Draft {
  readonly accepted: AcceptedCall;
  /** Takes the call in the same write; null leaves it pending. */
  readonly claim: Pick<Claim, "owner" | "token"> | null;
}

export interface StoredCall {
  readonly id: string;
  /** False: the call had been made before, and this is the same one. */
  readonly isNew: boolean;
  readonly payment: PaymentRow | null;
}

export function acceptedOf(
  options: RecordOptions,
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
 * Stores a checked call, with the payment that it came with.
 * @throws Fault `conflict` when its idempotency key was taken with another body; `payment_required` when its payment was
 *   used for another call meanwhile
 */
export async function record(
  options: RecordOptions,
  { payment: asked }: CheckedCall<ParsedRequest>,
  draft: Draft,
): Promise<StoredCall> {
  const { row, call } = draft.accepted;
  const payment = asked === null ? null : options.payments.paymentRow(asked.charge, row, call.credential_ref);
  const inItsWrite =
    payment === null
      ? null
      : async (tx: Tx) => {
          await requireCredential(tx, row.tenant, call);
          await insertPayment(tx, payment);
        };
  for (let tries = 1; ; tries++) {
    let id: string;
    try {
      id = await accept(options.store, draft.accepted, draft.claim, inItsWrite);
    } catch (error) {
      id = await storedAllTheSame(options, draft, asked?.asked ?? null, error);
    }
    if (id === row.id) {
      if (payment !== null) options.meters.payment("accepted");
      return { id, isNew: true, payment };
    }
    // The earlier call may be a refused one whose record has only just appeared; after three of them it is taken for earlier.
    const isEarlier = tries === 3 || !(await options.refusals.isRefused({ tenant: row.tenant, id }));
    if (isEarlier) return { id, isNew: false, payment: null };
  }
}

/** The ID of the call that is stored although this write has failed. Refusing it would make its caller send it twice. */
async function storedAllTheSame(
  { refusals, payments }: RecordOptions,
  { accepted: { row }, claim }: Draft,
  asked: PricedCall | null,
  error: unknown,
): Promise<string> {
  if (error instanceof CommitUnknown) {
    const { tenant, id } = row;
    if (await refusals.wasStored({ tenant, id, claim: claim?.token ?? null })) return id;
  }
  // Someone has used the payment between the check and the record.
  const isUsed = error instanceof UniqueViolation && asked !== null;
  const used = isUsed ? await payments.check(asked) : null;
  if (used?.kind !== "known") throw error;
  return used.invocation_id;
}

/**
 * A paid call needs its credential, which can't be deleted once the call is stored.
 * @throws Fault `unavailable` when it was deleted a moment ago, so that the agent is not the one that was read;
 *   `agent_not_invocable` when the call would fail for it
 */
async function requireCredential(
  tx: Tx,
  tenant: string,
  { credential_ref, url }: Pick<Call, "credential_ref" | "url">,
): Promise<void> {
  if (credential_ref === null) return;
  const held = await holdCredential(tx, tenant, credential_ref);
  if (held === null) throw beingChanged();
  if (!mayGoTo(held, url)) throw new Fault("agent_not_invocable", "the agent's credential is not for its host");
}

function newRow(
  { store, clock, replica }: RecordOptions,
  { caller }: ProxyCall,
  checked: CheckedCall<ParsedRequest>,
  mode: Mode,
  req_sha256: string | null,
): InvocationRow {
  const { agent, model, parsed, body, payment } = checked;
  const now = clock.now();
  const row: InvocationRow = {
    tenant: caller.tenant,
    id: newId("inv", now),
    agent_id: agent.id,
    caller: caller.user,
    mode,
    status: "pending",
    error_class: null,
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
    upstream_status: null,
    latency_ms: null,
    ttft_ms: null,
    req_size: body.byteLength,
    resp_size: null,
    req_sha256,
    resp_sha256: null,
    response_content_type: null,
    response_truncated: false,
    body_captured: agent.capture_body,
    emit_receipt: agent.emit_receipts,
    owner: null,
    claim: null,
    accepted_by: store.isShared ? replica : null,
    updated_at: now,
    completed_at: null,
  };
  return payment === null ? row : { ...row, ...paidColumns(payment.charge) };
}

// Refusals of a call that has a record. They carry its ID, so that the caller can look it up.

export function faultOf(
  kind: FaultKind,
  message: string,
  id: string,
  {
    headers,
    ...detail
  }: { readonly headers?: Readonly<Record<string, string>>; readonly retryAfterSeconds?: number } = {},
): Fault {
  const named = { ...headers, "x-service-invocation-id": id };
  return new Fault(kind, message, { ...detail, answer: { body: { error: message }, headers: named } });
}

export async function withId<T>(id: string, work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    if (!(error instanceof Fault)) throw error;
    const { kind, message, retryAfterSeconds, answer } = error;
    const detail = {
      headers: answer?.headers ?? {},
      ...(retryAfterSeconds !== undefined && { retryAfterSeconds }),
    };
    throw faultOf(kind, message, id, detail);
  }
}

/** The key or payment belongs to a call that was sent to the agent's other path. */
export function otherPath(id: string): Fault {
  return faultOf("conflict", "this key or payment belongs to a call on the agent's other path", id);
}
