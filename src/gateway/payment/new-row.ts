// The row of a payment that was verified, before anything of it has left.
import { settleRequestJson } from "../../x402/codec.ts";
import { keyOf } from "../../x402/verify.ts";
import type { InvocationRow } from "../invocations/service.ts";
import type { Charge } from "./service.ts";
import type { PaymentRow } from "./store.ts";

export function paymentRowOf(charge: Charge, row: InvocationRow, now: number, leaseUntil: number): PaymentRow {
  const { payment, wire, body_sha256, digest, config } = charge;
  const { validBefore } = payment.authorization;
  return {
    ...keyOf(payment.authorization),
    tenant: row.tenant,
    invocation_id: row.id,
    agent_id: row.agent_id,
    caller: row.caller,
    body_sha256,
    authorization_digest: digest,
    x402_version: payment.x402Version,
    valid_before: Number(validBefore > LATEST_SECONDS ? LATEST_SECONDS : validBefore),
    facilitator_url: config?.facilitator_url ?? null,
    facilitator_credential_ref: config?.facilitator_credential_ref ?? null,
    settle_request: config === null ? null : JSON.stringify(settleRequestJson(payment, wire)),
    attempts: config === null ? 0 : 1,
    unsent_attempts: 0,
    sent_at: null,
    unknown_since: null,
    asked_ms: 0,
    call_credential_ref: null,
    next_attempt_at: config === null ? null : leaseUntil,
    created_at: now,
    updated_at: now,
  };
}

/** Later than any clock of ours will ever show, and exact as a number. */
const LATEST_SECONDS = 9_000_000_000_000n;
