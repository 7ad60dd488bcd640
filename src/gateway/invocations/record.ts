// The record of a call that has passed the checks: its row, what is kept to make it, and its payment, in one write.
import type { Call } from "../../core/call.ts";
import type { Clock } from "../../core/clock.ts";
import { sha256Of } from "../../core/digest.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import type { Mode } from "../../core/states.ts";
import { type Store, UniqueViolation } from "../../storage/store.ts";
import {
  type Charge,
  type PaymentRow,
  type Payments,
  paidColumns,
  recordPayment,
} from "../payment/service.ts";
import type { Checked, Form, ProxyCall } from "./checks.ts";
import { findInvocation } from "./history.ts";
import { type Accepted, accept, claim, type InvocationRow } from "./service.ts";

export interface RecordOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly payments: Pick<Payments, "check" | "paymentRow">;
}

/** A checked call as it is to be stored. */
export interface Draft {
  readonly accepted: Accepted;
  /** The replica that takes the call in the same write; null leaves it pending. */
  readonly owner: string | null;
}

export interface Stored {
  readonly id: string;
  /** False: the call had been made before, and this is the same one. */
  readonly isNew: boolean;
  readonly payment: PaymentRow | null;
}

export function acceptedOf(
  call: ProxyCall,
  checked: Checked<Form>,
  mode: Mode,
  headers: Call["headers"],
  now: number,
): Accepted {
  const { agent, url, body, idempotency } = checked;
  const accepted: Call = {
    url,
    protocol: agent.protocol,
    mcp_protocol_version: agent.mcp_protocol_version,
    credential_ref: agent.credential_ref,
    capture: agent.capture_body,
    receipt: agent.emit_receipts,
    headers,
    request_id: call.requestId,
  };
  return { row: newRow(call, checked, mode, now), call: accepted, body, idempotency };
}

/**
 * Stores a checked call, with the payment that it came with.
 *
 * @throws Fault `conflict` when its idempotency key was taken with another body; `payment_required` when its payment
 *   was used for another call meanwhile
 */
export async function record(
  { store, clock, payments }: RecordOptions,
  { standing }: Checked<Form>,
  draft: Draft,
): Promise<Stored> {
  const { row } = draft.accepted;
  if (standing.kind !== "charge") return stored(row, await storeCall(store, clock, draft, null), null);
  const payment = payments.paymentRow(standing.charge, row);
  try {
    return stored(row, await storeCall(store, clock, draft, payment), payment);
  } catch (error) {
    // Someone has used the payment between the check and the record.
    const used = error instanceof UniqueViolation ? await payments.check(standing.asked) : null;
    if (used?.kind !== "known") throw error;
    return { id: used.invocation_id, isNew: false, payment: null };
  }
}

function stored(row: InvocationRow, id: string, payment: PaymentRow | null): Stored {
  return id === row.id ? { id, isNew: true, payment } : { id, isNew: false, payment: null };
}

/**
 * A commit whose answer was lost may have been made; then the call is accepted, and to say otherwise would have
 * it made twice.
 *
 * @throws UniqueViolation when the payment has been used here before
 */
async function storeCall(
  store: Store,
  clock: Clock,
  { accepted, owner }: Draft,
  payment: PaymentRow | null,
): Promise<string> {
  const { row, call, body } = accepted;
  try {
    return await store.write(async (tx) => {
      const id = await accept(tx, accepted, row.updated_at);
      if (id !== row.id) return id;
      if (payment !== null) await recordPayment(tx, payment);
      if (owner !== null) {
        await claim(tx, {
          key: { tenant: row.tenant, id },
          owner,
          now: clock.now(),
          inHand: { call, body },
          again: false,
        });
      }
      return id;
    });
  } catch (error) {
    if (!(error instanceof Fault) || error.kind !== "unavailable") throw error;
    const found = await findInvocation(store.read, row.tenant, row.id).catch(() => null);
    if (found === null) throw error;
    return found.id;
  }
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

function chargeOf({ standing }: Checked<Form>): Charge | null {
  return standing.kind === "charge" ? standing.charge : null;
}

function newRow({ caller }: ProxyCall, checked: Checked<Form>, mode: Mode, now: number): InvocationRow {
  const { agent, model, form, body } = checked;
  const charge = chargeOf(checked);
  return {
    tenant: caller.tenant,
    id: newId("inv", now),
    agent_id: agent.id,
    caller: caller.user,
    mode,
    status: "pending",
    error_class: null,
    model,
    mcp_method: form.method,
    mcp_tool: form.tool,
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
