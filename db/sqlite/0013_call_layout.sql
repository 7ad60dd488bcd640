-- What a call writes, for many tenants at once.

-- Additions to the totals of the history, one row for each group of writes: src/storage/sqlite-totals.ts.
create table count_additions (
  id integer not null primary key,
  -- Whether it takes back what has been moved into invocation_counts from the rows before it.
  is_moved integer not null check (is_moved in (0, 1)),
  -- JSON: for each tenant and period [tenant, period, dimension, value, delta, dimension, value, delta, …].
  additions text not null
) strict;

-- Calls that have ended, in the order of their ends, with their bodies: src/storage/sqlite-recent.ts. Later they are moved
-- into ended_invocations and invocation_bodies, whose trees are ordered by tenant.
create table recent_invocations (
  n integer not null primary key,
  id text not null unique,
  tenant text not null,
  agent_id text not null,
  caller text not null,
  mode text not null,
  status text not null,
  error_class text,
  model text,
  mcp_method text,
  mcp_tool text,
  upstream_status integer,
  latency_ms integer,
  ttft_ms integer,
  req_size integer,
  resp_size integer,
  req_sha256 text,
  resp_sha256 text,
  response_content_type text,
  response_truncated integer not null,
  body_captured integer not null,
  emit_receipt integer not null,
  accepted_by text,
  claim text,
  updated_at integer not null,
  completed_at integer not null,
  request blob,
  response blob
) strict;

-- How far the first of them, up to number n, have been moved: tenant by tenant, and by ID.
create table recent_moved (n integer not null, tenant text not null, id text not null) strict;
insert into recent_moved (n, tenant, id) values (0, '', '');

drop view invocations;
create view invocations as
select tenant, id, agent_id, caller, mode, status,
  null as error_class, model, mcp_method, mcp_tool, payment_network, payment_asset, payment_amount, payment_payer,
  payment_nonce, settlement_status, settlement, null as upstream_status, null as latency_ms, null as ttft_ms, req_size,
  null as resp_size, req_sha256, null as resp_sha256, null as response_content_type,
  0 as response_truncated, body_captured, emit_receipt, owner, accepted_by, claim, updated_at,
  null as completed_at
from open_invocations
union all
select tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, null as payment_network,
  null as payment_asset, null as payment_amount, null as payment_payer, null as payment_nonce, null as settlement_status,
  null as settlement, upstream_status, latency_ms, ttft_ms, req_size, resp_size, req_sha256, resp_sha256,
  response_content_type, response_truncated, body_captured, emit_receipt, null as owner, accepted_by, claim, updated_at,
  completed_at
from recent_invocations
where n > (select m.n from recent_moved m) or (tenant, id) > (select m.tenant, m.id from recent_moved m)
union all
select tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, payment_network,
  payment_asset, payment_amount, payment_payer, payment_nonce, settlement_status, settlement, upstream_status, latency_ms,
  ttft_ms, req_size, resp_size, req_sha256, resp_sha256, response_content_type, response_truncated, body_captured,
  emit_receipt, owner, accepted_by, claim, updated_at, completed_at
from ended_invocations;
insert into sqlite_stat1 (tbl, idx, stat) values
  ('recent_invocations', 'sqlite_autoindex_recent_invocations_1', '10000 1');
