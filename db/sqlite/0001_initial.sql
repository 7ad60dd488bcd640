-- The first schema. Tables that are found by their key are WITHOUT ROWID: one tree to keep instead of two. Every
-- history index ends in id, so that a page newest first is a walk along one index. There are no foreign keys:
-- rows that belong together are written and removed together by the works that own them.

create table tenant_keys (
  tenant text not null primary key,
  wrapped_key blob not null,
  master_key_id text not null,
  created_at integer not null
) strict, without rowid;

create table signing_keys (
  kid text not null primary key,
  purpose text not null check (purpose in ('issuer', 'receipts')),
  public_jwk text not null,
  wrapped_private_key blob not null,
  master_key_id text not null,
  created_at integer not null,
  retired_at integer
) strict, without rowid;

-- Two processes that start on an empty database at once agree on one key of each purpose.
create unique index signing_keys_in_use on signing_keys (purpose) where retired_at is null;

create table agents (
  tenant text not null,
  id text not null,
  name text not null,
  description text not null,
  tags text,
  metadata text not null,
  upstream_url text,
  credential_ref text,
  suspended integer not null check (suspended in (0, 1)),
  invocation_rate_limit real,
  invocation_burst integer,
  rate_revision integer not null,
  emit_receipts integer not null check (emit_receipts in (0, 1)),
  capture_body integer not null check (capture_body in (0, 1)),
  protocol text not null check (protocol in ('http', 'mcp')),
  mcp_transport text,
  mcp_protocol_version text,
  pricing text,
  created_by text not null,
  created_at integer not null,
  updated_at integer not null,
  deleted_at integer,
  search_text text not null,
  primary key (tenant, id)
) strict, without rowid;

create unique index agents_live_name on agents (tenant, name) where deleted_at is null;
create index agents_live_credential on agents (tenant, credential_ref)
  where credential_ref is not null and deleted_at is null;

create table credentials (
  tenant text not null,
  id text not null,
  name text not null,
  auth_type text not null check (auth_type in ('bearer', 'api_key', 'none')),
  source text not null check (source in ('managed', 'vault')),
  masked_hint text,
  vault_ref text,
  version integer not null check (version >= 1),
  sealed blob,
  created_at integer not null,
  updated_at integer not null,
  primary key (tenant, id),
  check ((source = 'managed') = (sealed is not null)),
  check ((source = 'vault') = (vault_ref is not null))
) strict, without rowid;

create unique index credentials_name on credentials (tenant, name);

create table invocations (
  tenant text not null,
  id text not null,
  agent_id text not null,
  caller text not null,
  mode text not null check (mode in ('transactional', 'streaming')),
  status text not null check (status in ('pending', 'running', 'succeeded', 'failed')),
  error_class text,
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
  upstream_status integer,
  latency_ms integer,
  ttft_ms integer,
  req_size integer,
  resp_size integer,
  response_content_type text,
  response_truncated integer not null check (response_truncated in (0, 1)),
  body_captured integer not null check (body_captured in (0, 1)),
  emit_receipt integer not null check (emit_receipt in (0, 1)),
  owner text,
  updated_at integer not null,
  completed_at integer,
  primary key (tenant, id),
  check ((status in ('succeeded', 'failed')) = (completed_at is not null)),
  check (status <> 'pending' or owner is null),
  check (status <> 'running' or owner is not null)
) strict, without rowid;

create index invocations_agent on invocations (tenant, agent_id, id);
create index invocations_status on invocations (tenant, status, id);
create index invocations_mode on invocations (tenant, mode, id);
create index invocations_settlement on invocations (tenant, settlement_status, id)
  where settlement_status is not null;
create index invocations_error_class on invocations (tenant, error_class, id) where error_class is not null;
create index invocations_model on invocations (tenant, model, id) where model is not null;
-- The dispatcher's: the queue of each agent, oldest first, and the running calls of each replica.
create index invocations_pending on invocations (agent_id, id) where status = 'pending';
create index invocations_running on invocations (owner) where status = 'running';

create table invocation_bodies (
  tenant text not null,
  invocation_id text not null,
  call text,
  request blob,
  response blob,
  primary key (tenant, invocation_id)
) strict, without rowid;

create table invocation_counts (
  tenant text not null,
  dimension text not null,
  value text not null,
  shard integer not null,
  count integer not null,
  primary key (tenant, dimension, value, shard)
) strict, without rowid;

create table idempotency_keys (
  tenant text not null,
  caller text not null,
  agent_id text not null,
  key text not null,
  body_sha256 text not null,
  invocation_id text not null,
  expires_at integer not null,
  primary key (tenant, caller, agent_id, key)
) strict, without rowid;

create index idempotency_keys_expiry on idempotency_keys (expires_at);

create table replicas (
  id text not null primary key,
  lease_until integer not null
) strict, without rowid;

-- Without statistics SQLite takes the primary key for a filtered history page and walks the tenant's whole
-- history. These rows, read at open and never measured anew, say what a large history looks like.
analyze;
insert into sqlite_stat1 (tbl, idx, stat) values
  ('invocations', 'invocations', '1000000 1000000 1'),
  ('invocations', 'invocations_agent', '1000000 1000000 10000 1'),
  ('invocations', 'invocations_status', '1000000 1000000 10000 1'),
  ('invocations', 'invocations_mode', '1000000 1000000 10000 1'),
  ('invocations', 'invocations_settlement', '1000000 1000000 10000 1'),
  ('invocations', 'invocations_error_class', '1000000 1000000 10000 1'),
  ('invocations', 'invocations_model', '1000000 1000000 10000 1'),
  ('invocations', 'invocations_pending', '10000 1000 1 1'),
  ('invocations', 'invocations_running', '1000 100 1 1');
