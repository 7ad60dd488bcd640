// The claims of a receipt, made from an ended invocation. One schema serves to make them and to verify them. Also the
// hash that links each receipt to the one before it.
import { createHash } from "node:crypto";
import { type Static, type TSchema, Type } from "@sinclair/typebox";
import { idTime } from "../../core/id.ts";
import { ERROR_CLASSES, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import { formatDateTime } from "../../core/time.ts";
import type { InvocationRow } from "../invocations/service.ts";

/** The header's `typ`, so that nothing else which such a key may sign passes for a receipt (RFC 8725, section 3.11). */
export const RECEIPT_TYPE = "receipt+jwt";

const UUID_V7 = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}";
const id = (prefix: string) => Type.String({ pattern: `^${prefix}_${UUID_V7}$` });
const oneOf = <T extends string>(values: readonly T[]) => Type.Union(values.map((value) => Type.Literal(value)));
const orNull = <T extends TSchema>(schema: T) => Type.Union([schema, Type.Null()]);
const text = Type.String({ minLength: 1 });
const whole = orNull(Type.Integer({ minimum: 0 }));
const amount = Type.String({ pattern: "^[0-9]+$" });
const dateTime = Type.String({ pattern: "^\\d{4}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d{3}Z$" });
const sha256 = orNull(Type.String({ pattern: "^[0-9a-f]{64}$" }));

const Settlement = Type.Object({
  status: oneOf(SETTLEMENT_STATUSES),
  tx_hash: Type.Optional(text),
  settled_amount: Type.Optional(amount),
  operator_amount: Type.Optional(amount),
  facilitator_fee: Type.Optional(amount),
  attempts: Type.Optional(Type.Integer({ minimum: 0 })),
  reason: Type.Optional(text),
  settled_at: Type.Optional(dateTime),
});

export const ReceiptClaims = Type.Object({
  receipt_id: id("rcpt"),
  tenant: text,
  agent_id: id("agt"),
  invocation_id: id("inv"),
  caller: text,
  mode: oneOf(MODES),
  status: oneOf(["succeeded", "failed"]),
  error_class: orNull(oneOf(ERROR_CLASSES)),
  upstream_status: whole,
  created_at: dateTime,
  completed_at: dateTime,
  latency_ms: whole,
  req_size: whole,
  resp_size: whole,
  req_sha256: sha256,
  resp_sha256: sha256,
  payment: orNull(Type.Object({ network: text, asset: text, amount, payer: text, nonce: text })),
  settlement: orNull(Settlement),
  /** The link of the tenant's receipt before this one; null in its first. */
  previous: sha256,
});
export type ReceiptClaims = Static<typeof ReceiptClaims>;

/** What the next receipt says of this one as its `previous`. */
export function linkOf(jws: string): string {
  return createHash("sha256").update(jws).digest("hex");
}

/** @throws Error for an invocation that has not ended */
export function claimsOf(row: InvocationRow, receipt_id: string, previous: string | null): ReceiptClaims {
  const { status, completed_at } = row;
  if (completed_at === null || (status !== "succeeded" && status !== "failed")) {
    throw new Error("a receipt of an invocation that has not ended");
  }
  return {
    receipt_id,
    tenant: row.tenant,
    agent_id: row.agent_id,
    invocation_id: row.id,
    caller: row.caller,
    mode: row.mode,
    status,
    error_class: row.error_class,
    upstream_status: row.upstream_status,
    created_at: formatDateTime(idTime(row.id)),
    completed_at: formatDateTime(completed_at),
    latency_ms: row.latency_ms,
    req_size: row.req_size,
    resp_size: row.resp_size,
    req_sha256: row.req_sha256,
    resp_sha256: row.resp_sha256,
    payment: paymentOf(row),
    settlement: settlementOf(row),
    previous,
  };
}

function paymentOf(row: InvocationRow): ReceiptClaims["payment"] {
  const {
    payment_network: network,
    payment_asset: asset,
    payment_amount: amount,
    payment_payer: payer,
    payment_nonce: nonce,
  } = row;
  if (network === null || asset === null || amount === null || payer === null || nonce === null) return null;
  return { network, asset, amount, payer, nonce };
}

function settlementOf({ settlement_status: status, settlement }: InvocationRow): ReceiptClaims["settlement"] {
  if (status === null) return null;
  return { status, ...(JSON.parse(settlement ?? "{}") as Omit<Static<typeof Settlement>, "status">) };
}
