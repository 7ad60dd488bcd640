-- Calls that have not ended stand apart from the history: in order of arrival, with few indexes and with what is needed to
-- make them. The end of a call moves it into the history, whose rows are then written once. Whoever only
-- reads sees both as one, and each call once.

-- Nobody may store, change or end a call from the look at the open ones until they stand elsewhere.
lock table invocations, invocation_bodies, invocation_counts in access exclusive mode;

create table open_invocations (
  id text collate "C" not null primary key,
  tenant text collate "C" not null,
  agent_id text collate "C" not null,
  caller text collate "C" not null,
  mode text collate "C" not null check (mode in ('transactional', 'streaming')),
  status text collate "C" not null check (status in ('pending', 'running')),
  model text collate "C",
  mcp_method text collate "C",
  mcp_tool text collate "C",
  payment_network text collate "C",
  payment_asset text collate "C",
  payment_amount text collate "C",
  payment_payer text collate "C",
  payment_nonce text collate "C",
  settlement_status text collate "C",
  settlement text collate "C",
  req_size bigint,
  req_sha256 text collate "C",
  body_captured boolean not null,
  emit_receipt boolean not null,
  accepted_by text collate "C",
  owner text collate "C",
  claim text collate "C",
  updated_at bigint not null,
  -- JSON of the call as accepted.
  call text collate "C" not null,
  -- The body while it is small; null for a large one, which stands in invocation_bodies.
  request bytea,
  check ((status = 'running') = (owner is not null))
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
  autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000);

alter table open_invocations alter column request set storage external;

create index open_invocations_tenant on open_invocations (tenant, id);
-- The scheduler's: the queue of each agent, oldest first, and the running calls of each replica.
create index open_invocations_pending on open_invocations (agent_id, id)
  where status = 'pending' and mode = 'transactional' and coalesce(settlement_status, '') <> 'pending';
create index open_invocations_running on open_invocations (owner) where status = 'running';
-- Streaming calls that are paid for while nobody waits for them, the longest unchanged first.
create index open_invocations_unclaimed on open_invocations (updated_at)
  where status = 'pending' and mode = 'streaming' and coalesce(settlement_status, '') <> 'pending';

-- Along indexes only, whatever the statistics say: what this takes grows with the open calls and the tenants, and not with
-- the history. A million ended calls, half a GB, made it twice as long when they were read.
set local enable_seqscan = off;
set local enable_hashjoin = off;
set local enable_mergejoin = off;

with recursive tenants (tenant) as (
  select min(tenant) from invocations
  union all
  select (select min(i.tenant) from invocations i where i.tenant > t.tenant) from tenants t where t.tenant is not null
)
insert into open_invocations (id, tenant, agent_id, caller, mode, status, model, mcp_method, mcp_tool, payment_network,
  payment_asset, payment_amount, payment_payer, payment_nonce, settlement_status, settlement, req_size, req_sha256,
  body_captured, emit_receipt, accepted_by, owner, claim, updated_at, call, request)
select i.id, i.tenant, i.agent_id, i.caller, i.mode, i.status, i.model, i.mcp_method, i.mcp_tool, i.payment_network,
  i.payment_asset, i.payment_amount, i.payment_payer, i.payment_nonce, i.settlement_status, i.settlement, i.req_size,
  i.req_sha256, i.body_captured, i.emit_receipt, i.accepted_by, i.owner, i.claim, i.updated_at, b.call,
  case when length(b.request) <= 8192 then b.request end
from tenants t
  join invocations i on i.tenant = t.tenant and i.status in ('pending', 'running')
  join invocation_bodies b on b.tenant = i.tenant and b.invocation_id = i.id
where b.call is not null;

delete from invocation_bodies b using open_invocations o
where b.tenant = o.tenant and b.invocation_id = o.id and o.request is not null;
delete from invocations i using open_invocations o where i.tenant = o.tenant and i.id = o.id;
set local enable_seqscan to default;
set local enable_hashjoin to default;
set local enable_mergejoin to default;

alter table invocation_bodies drop column call;

drop index invocations_pending;
drop index invocations_unclaimed;
drop index invocations_running;
alter table invocations rename to ended_invocations;

create view invocations as
select tenant, id, agent_id, caller, mode, status,
  null::text collate "C" as error_class, model, mcp_method, mcp_tool, payment_network, payment_asset, payment_amount, payment_payer,
  payment_nonce, settlement_status, settlement, null::bigint as upstream_status, null::bigint as latency_ms, null::bigint as ttft_ms, req_size,
  null::bigint as resp_size, req_sha256, null::text collate "C" as resp_sha256, null::text collate "C" as response_content_type,
  false as response_truncated, body_captured, emit_receipt, owner, accepted_by, claim, updated_at,
  null::bigint as completed_at
from open_invocations
union all
select tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, payment_network,
  payment_asset, payment_amount, payment_payer, payment_nonce, settlement_status, settlement, upstream_status, latency_ms,
  ttft_ms, req_size, resp_size, req_sha256, resp_sha256, response_content_type, response_truncated, body_captured,
  emit_receipt, owner, accepted_by, claim, updated_at, completed_at
from ended_invocations;
