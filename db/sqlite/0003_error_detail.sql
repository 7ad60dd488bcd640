-- Why a failed call has no whole answer, as its caller may know it. Null for calls that older programs end, and have ended.
alter table ended_invocations add column error_detail text;

drop view invocations;
create view invocations as
select tenant, id, agent_id, caller, mode, status,
  null as error_class, model, mcp_method, mcp_tool, payment_network, payment_asset, payment_amount, payment_payer,
  payment_nonce, settlement_status, settlement, null as upstream_status, null as latency_ms, null as ttft_ms, req_size,
  null as resp_size, req_sha256, null as resp_sha256, null as response_content_type,
  0 as response_truncated, body_captured, outbox, owner, accepted_by, claim, updated_at,
  null as completed_at, null as error_detail
from open_invocations
union all
select tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, payment_network,
  payment_asset, payment_amount, payment_payer, payment_nonce, settlement_status, settlement, upstream_status, latency_ms,
  ttft_ms, req_size, resp_size, req_sha256, resp_sha256, response_content_type, response_truncated, body_captured,
  outbox, owner, accepted_by, claim, updated_at, completed_at, error_detail
from ended_invocations;
