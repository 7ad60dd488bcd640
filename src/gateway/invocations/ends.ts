// The one end of every call, for every reason. In the write that ends the row it updates the totals, owes the receipt
// and releases what the call held. Listeners are called when that is durable.
import { and, eq } from "drizzle-orm";
import { asBuffer } from "../../core/bytes.ts";
import type { CallEnd, CallPayment } from "../../core/call-end.ts";
import { idTime } from "../../core/id.ts";
import { type ErrorClass, type InvocationStatus, SETTLEMENT_EVENTS, type SettlementStatus } from "../../core/states.ts";
import type { Tx } from "../../storage/store.ts";
import { countErrorClass, countMove } from "./counters.ts";
import type { Ending, InvocationKey } from "./service.ts";
import { dropBodies, type failRow, keepBodies, moveSettlement, NOTHING_YET, oweReceipt } from "./statements.ts";

/** The end of a call, as its cause reports it. */
export interface RecordedEnd {
  readonly key: InvocationKey;
  readonly from: InvocationStatus;
  readonly ending: Ending;
  readonly at: number;
  readonly request_id: string | null;
  readonly detail: string | null;
}

/** Columns of the row after its end. */
type EndedRow = Awaited<ReturnType<ReturnType<typeof failRow>["execute"]>>[number];

/** The one end of every call: it counts, owes the receipt, and tells the listeners once all of this is durable. */
export async function endInvocation(tx: Tx, end: RecordedEnd, row: EndedRow): Promise<void> {
  const { key, from, ending } = end;
  countMove(tx, key.tenant, from, ending.status);
  if (row.payment_nonce !== null) await freeCallCredential(tx, key);
  // A receipt states the final payment, so while the payment is open the receipt is owed later.
  if (row.emit_receipt && row.settlement_status !== "pending") await oweReceipt(tx).execute(key);
  if (ending.error_class !== null) countErrorClass(tx, key.tenant, ending.error_class);
  // A call that was paid for and failed must show both.
  const isLost = ending.status === "failed" && row.settlement_status === "settled";
  if (isLost) await moveSettlement(tx, key, "lose", {});
  tx.ended(callEnd(end, row, isLost ? SETTLEMENT_EVENTS.lose.to : row.settlement_status));
  if (!row.body_captured) {
    await dropBodies(tx).execute(key);
    return;
  }
  const { response } = ending;
  await keepBodies(tx).execute({ ...key, response: response === null ? null : asBuffer(response) });
}

function callEnd(
  { key, ending, at, request_id, detail }: RecordedEnd,
  row: EndedRow,
  settlementStatus: SettlementStatus | null,
): CallEnd {
  const { agent_id, caller, mode, model, mcp_method, req_size } = row;
  return {
    tenant: key.tenant,
    invocation_id: key.id,
    agent_id,
    caller,
    mode,
    model,
    mcp_method,
    request_id,
    status: ending.status,
    error_class: ending.error_class,
    upstream_status: ending.upstream_status,
    latency_ms: ending.latency_ms,
    ttft_ms: ending.ttft_ms ?? null,
    req_size,
    resp_size: ending.resp_size,
    response_truncated: ending.response_truncated,
    response_content_type: ending.response_content_type,
    accepted_at: idTime(key.id),
    ended_at: at,
    payment: callPayment(row, settlementStatus),
    detail,
  };
}

/** Null for a call that cost nothing. */
function callPayment(
  { payment_network, payment_asset, payment_amount }: EndedRow,
  settlement_status: SettlementStatus | null,
): CallPayment | null {
  if (payment_network === null || payment_asset === null || payment_amount === null) return null;
  return { network: payment_network, asset: payment_asset, amount: payment_amount, settlement_status };
}

/** The upstream's credential of a paid call may be deleted again. */
async function freeCallCredential(tx: Tx, key: InvocationKey): Promise<void> {
  const { payments: t } = tx.tables;
  await tx.db
    .update(t)
    .set({ call_credential_ref: null })
    .where(and(eq(t.tenant, key.tenant), eq(t.invocation_id, key.id)));
}

/** Of a call that has no answer of its upstream. */
export function withoutAnswer(
  key: InvocationKey,
  from: InvocationStatus,
  error_class: ErrorClass | null,
  at: number,
): RecordedEnd {
  const ending: Ending = { ...NOTHING_YET, status: "failed", error_class, response: null };
  return { key, from, ending, at, request_id: null, detail: null };
}
