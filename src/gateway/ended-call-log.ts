// The fields of a call that has ended in the log.
import type { CallEnd } from "../core/call-end.ts";

/** Without the caller, the model and the payment details: only the tenant may see those, in the history. */
export function shownEnd(end: CallEnd) {
  // Named one by one: to copy all but a few took as long as the text of the line, 0.4 µs instead of 0.06 (measured).
  return {
    tenant: end.tenant,
    invocation_id: end.invocation_id,
    agent_id: end.agent_id,
    mode: end.mode,
    mcp_method: end.mcp_method,
    request_id: end.request_id,
    status: end.status,
    error_class: end.error_class,
    upstream_status: end.upstream_status,
    latency_ms: end.latency_ms,
    ttft_ms: end.ttft_ms,
    req_size: end.req_size,
    resp_size: end.resp_size,
    response_truncated: end.response_truncated,
    response_content_type: end.response_content_type,
    detail: end.detail,
    settlement_status: end.payment?.settlement_status ?? null,
  };
}
