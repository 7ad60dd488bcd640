-- The first schema, as in ../sqlite. Text compares byte by byte (collate "C"): the order of IDs, ranges over
-- them and lower() must be the same as on SQLite, whatever the locale of the database. Bodies are stored
-- uncompressed, since compressing 32 MiB costs more than writing it.

create table tenant_keys (
  tenant text collate "C" not null primary key,
  wrapped_key bytea not null,
  master_key_id text collate "C" not null,
  created_at bigint not null
);

create table signing_keys (
  kid text collate "C" not null primary key,
  purpose text collate "C" not null check (purpose in ('issuer', 'receipts')),
  public_jwk text collate "C" not null,
  wrapped_private_key bytea not null,
  master_key_id text collate "C" not null,
  created_at bigint not null,
  retired_at bigint
);

-- Two processes that start on an empty database at once agree on one key of each purpose.
create unique index signing_keys_in_use on signing_keys (purpose) where retired_at is null;

create table agents (
  tenant text collate "C" not null,
  id text collate "C" not null,
  name text collate "C" not null,
  description text collate "C" not null,
  tags text collate "C",
  metadata text collate "C" not null,
  upstream_url text collate "C",
  credential_ref text collate "C",
  suspended boolean not null,
  invocation_rate_limit double precision,
  invocation_burst bigint,
  rate_revision bigint not null,
  emit_receipts boolean not null,
  capture_body boolean not null,
  protocol text collate "C" not null check (protocol in ('http', 'mcp')),
  mcp_transport text collate "C",
  mcp_protocol_version text collate "C",
  pricing text collate "C",
  created_by text collate "C" not null,
  created_at bigint not null,
  updated_at bigint not null,
  deleted_at bigint,
  search_text text collate "C" not null,
  primary key (tenant, id)
);

create unique index agents_live_name on agents (tenant, name) where deleted_at is null;
create index agents_live_credential on agents (tenant, credential_ref)
  where credential_ref is not null and deleted_at is null;

create table credentials (
  tenant text collate "C" not null,
  id text collate "C" not null,
  name text collate "C" not null,
  auth_type text collate "C" not null check (auth_type in ('bearer', 'api_key', 'none')),
  source text collate "C" not null check (source in ('managed', 'vault')),
  masked_hint text collate "C",
  vault_ref text collate "C",
  version bigint not null check (version >= 1),
  sealed bytea,
  created_at bigint not null,
  updated_at bigint not null,
  primary key (tenant, id),
  check ((source = 'managed') = (sealed is not null)),
  check ((source = 'vault') = (vault_ref is not null))
);

create unique index credentials_name on credentials (tenant, name);

create table invocations (
  tenant text collate "C" not null,
  id text collate "C" not null,
  agent_id text collate "C" not null,
  caller text collate "C" not null,
  mode text collate "C" not null check (mode in ('transactional', 'streaming')),
  status text collate "C" not null check (status in ('pending', 'running', 'succeeded', 'failed')),
  error_class text collate "C",
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
  upstream_status bigint,
  latency_ms bigint,
  ttft_ms bigint,
  req_size bigint,
  resp_size bigint,
  response_content_type text collate "C",
  response_truncated boolean not null,
  body_captured boolean not null,
  emit_receipt boolean not null,
  owner text collate "C",
  updated_at bigint not null,
  completed_at bigint,
  primary key (tenant, id),
  check ((status in ('succeeded', 'failed')) = (completed_at is not null)),
  check (status <> 'pending' or owner is null),
  check (status <> 'running' or owner is not null)
);

-- Never measured: the planner then takes every value for a rare one, and the index that names it. With
-- measured values it walks the tenant's whole history for one that is common elsewhere.
alter table invocations
  alter column agent_id set statistics 0,
  alter column status set statistics 0,
  alter column mode set statistics 0,
  alter column settlement_status set statistics 0,
  alter column error_class set statistics 0,
  alter column model set statistics 0;

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
  tenant text collate "C" not null,
  invocation_id text collate "C" not null,
  call text collate "C",
  request bytea,
  response bytea,
  primary key (tenant, invocation_id)
);

alter table invocation_bodies
  alter column request set storage external,
  alter column response set storage external;

-- Half of each page stays free, so that a changed total stays on its page and touches no index.
create table invocation_counts (
  tenant text collate "C" not null,
  dimension text collate "C" not null,
  value text collate "C" not null,
  shard bigint not null,
  count bigint not null,
  primary key (tenant, dimension, value, shard)
) with (fillfactor = 50);

create table idempotency_keys (
  tenant text collate "C" not null,
  caller text collate "C" not null,
  agent_id text collate "C" not null,
  key text collate "C" not null,
  body_sha256 text collate "C" not null,
  invocation_id text collate "C" not null,
  expires_at bigint not null,
  primary key (tenant, caller, agent_id, key)
);

create index idempotency_keys_expiry on idempotency_keys (expires_at);

create table replicas (
  id text collate "C" not null primary key,
  lease_until bigint not null
);
