// Invocations as tests of the gateway's inside need them: an accepted call, and how one ends well.
import type { CountDimension } from "../../../db/schema.ts";
import { newId } from "../../../src/core/id.ts";
import { matchingCalls } from "../../../src/gateway/invocations/history-scan.ts";
import type { AcceptedCall, Ending, InvocationRow } from "../../../src/gateway/invocations/service.ts";
import type { Reader } from "../../../src/storage/store.ts";

/** What a call shows of its payment. */
export const PAID: Partial<InvocationRow> = {
  payment_network: "base",
  payment_asset: "USDC",
  payment_amount: "1500",
  payment_payer: "0x1111111111111111111111111111111111111111",
  payment_nonce: `0x${"ab".repeat(32)}`,
};

/** A call of tenant acme to agent agt_a, as admission hands it over. */
export function accepted(
  now: number,
  fields: Partial<InvocationRow> = {},
  body = "hello",
): AcceptedCall & { readonly row: InvocationRow } {
  const row: InvocationRow = {
    tenant: "acme",
    id: newId("inv", now),
    agent_id: "agt_a",
    caller: "alice",
    mode: "transactional",
    status: "pending",
    error_class: null,
    error_detail: null,
    model: null,
    mcp_method: null,
    mcp_tool: null,
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
    req_size: body.length,
    resp_size: null,
    req_sha256: null,
    resp_sha256: null,
    response_content_type: null,
    response_truncated: false,
    body_captured: true,
    outbox: null,
    owner: null,
    claim: null,
    accepted_by: null,
    updated_at: now,
    completed_at: null,
    ...fields,
  };
  const call = {
    url: "https://example.com/",
    protocol: "http",
    mcp_protocol_version: null,
    credential_ref: null,
    capture: row.body_captured,
    receipt: row.outbox !== null,
    headers: [["content-type", "text/plain"]],
    request_id: "r1",
  } as const;
  return { row, call, body: new TextEncoder().encode(body), idempotency: null };
}

export const SUCCESS: Ending = {
  status: "succeeded",
  error_class: null,
  upstream_status: 200,
  latency_ms: 5,
  resp_size: 5,
  resp_sha256: null,
  response: new TextEncoder().encode("world"),
  response_truncated: false,
  response_content_type: "text/plain",
};

/** How many calls match a filter, as a page of the history says. */
export async function counted(
  reader: Reader,
  tenant: string,
  dimension: CountDimension,
  value: string,
): Promise<number> {
  return (await matchingCalls(reader, tenant, [dimension, value])).total;
}
