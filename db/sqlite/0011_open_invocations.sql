-- Calls that have not ended stand apart from the history: in order of arrival, with few indexes and with what is needed to
-- make them. The end of a call moves it into the history, whose rows are then written once. Whoever only
-- reads sees both as one, and each call once.

create table open_invocations (
  id text not null primary key,
  tenant text not null,
  agent_id text not null,
  caller text not null,
  mode text not null check (mode in ('transactional', 'streaming')),
  status text not null check (status in ('pending', 'running')),
  model text,
  mcp_method text,
  mcp_tool text,
  payment_network text,
  payment_asset text,
  payment_amount text,
  payment_payer text,
  payment_nonce text,
  settlement_status text,
  settlement text,
  req_size integer,
  req_sha256 text,
  body_captured integer not null check (body_captured in (0, 1)),
  emit_receipt integer not null check (emit_receipt in (0, 1)),
  accepted_by text,
  owner text,
  claim text,
  updated_at integer not null,
  -- JSON of the call as accepted.
  call text not null,
  -- The body while it is small; null for a large one, which stands in invocation_bodies.
  request blob,
  check ((status = 'running') = (owner is not null))
) strict;

-- With all that the history is filtered by, so that a walk reads nothing else.
create index open_invocations_tenant on open_invocations (tenant, id, agent_id, mode, status, model, settlement_status);
-- The scheduler's: the queue of each agent, oldest first, and the running calls of each replica.
create index open_invocations_pending on open_invocations (agent_id, id)
  where status = 'pending' and mode = 'transactional' and coalesce(settlement_status, '') <> 'pending';
create index open_invocations_running on open_invocations (owner) where status = 'running';
-- Streaming calls that are paid for while nobody waits for them, the longest unchanged first.
create index open_invocations_unclaimed on open_invocations (updated_at)
  where status = 'pending' and mode = 'streaming' and coalesce(settlement_status, '') <> 'pending';

-- Tenant by tenant along an index, and nothing of the ended calls is read.
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
  cross join invocations i on i.tenant = t.tenant and i.status in ('pending', 'running')
  cross join invocation_bodies b on b.tenant = i.tenant and b.invocation_id = i.id
where b.call is not null;

delete from invocation_bodies where (tenant, invocation_id) in
  (select tenant, id from open_invocations where request is not null);
delete from invocations where (tenant, id) in (select tenant, id from open_invocations);
-- The column itself stays, unused: dropping it would write every body anew.
update invocation_bodies set call = null where (tenant, invocation_id) in
  (select tenant, id from open_invocations where request is null);

drop index invocations_pending;
drop index invocations_unclaimed;
drop index invocations_running;
alter table invocations rename to ended_invocations;

create view invocations as
select tenant, id, agent_id, caller, mode, status,
  null as error_class, model, mcp_method, mcp_tool, payment_network, payment_asset, payment_amount, payment_payer,
  payment_nonce, settlement_status, settlement, null as upstream_status, null as latency_ms, null as ttft_ms, req_size,
  null as resp_size, req_sha256, null as resp_sha256, null as response_content_type,
  0 as response_truncated, body_captured, emit_receipt, owner, accepted_by, claim, updated_at,
  null as completed_at
from open_invocations
union all
select tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, payment_network,
  payment_asset, payment_amount, payment_payer, payment_nonce, settlement_status, settlement, upstream_status, latency_ms,
  ttft_ms, req_size, resp_size, req_sha256, resp_sha256, response_content_type, response_truncated, body_captured,
  emit_receipt, owner, accepted_by, claim, updated_at, completed_at
from ended_invocations;

-- As in 0001_initial.sql: what a large table looks like, read at open.
delete from sqlite_stat1 where idx in ('invocations_pending', 'invocations_unclaimed', 'invocations_running');
update sqlite_stat1 set tbl = 'ended_invocations' where tbl = 'invocations';
update sqlite_stat1 set idx = 'ended_invocations' where idx = 'invocations';
insert into sqlite_stat1 (tbl, idx, stat) values
  ('open_invocations', 'sqlite_autoindex_open_invocations_1', '100000 1'),
  ('open_invocations', 'open_invocations_tenant', '100000 10000 1 1 1 1 1 1'),
  ('open_invocations', 'open_invocations_pending', '100000 10000 1'),
  ('open_invocations', 'open_invocations_running', '1000 100'),
  ('open_invocations', 'open_invocations_unclaimed', '1000 2');
