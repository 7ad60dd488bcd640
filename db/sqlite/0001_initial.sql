-- The whole schema. Tables that are found by their key are WITHOUT ROWID: one tree to keep instead of two. Every history
-- index ends in id, so that a page newest first is a walk along one index. There are no foreign keys: rows that belong
-- together are written and removed together by the works that own them. What each column means stands in ../schema.ts.
-- Amounts are decimal texts of up to 256 bits; hex is lower case, so that text compares as the value does.

-- Without statistics SQLite takes the primary key for a filtered history page and walks the tenant's whole history. The
-- rows at the end of this file, read at open and never measured again, say what large tables look like.
analyze;

-- Keys

-- A tenant has several keys, numbered from 1. The newest seals; the first is what other keys are derived from, for good.
create table tenant_keys (
  tenant text not null,
  number integer not null,
  wrapped_key blob not null,
  master_key_id text not null,
  created_at integer not null,
  primary key (tenant, number)
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

-- One row: see src/keys/state.ts.
create table keyring (
  one integer not null primary key check (one = 1),
  version integer not null,
  master_key_id text,
  next_master_key_id text,
  is_rotating integer not null check (is_rotating in (0, 1)),
  revoked_at integer not null
) strict;

insert into keyring (one, version, is_rotating, revoked_at) values (1, 1, 0, 0);

-- The tokens of a user that were made before this are refused; of all users of the tenant where the name is empty.
create table token_revocations (
  tenant text not null,
  user_name text not null,
  revoked_at integer not null,
  primary key (tenant, user_name)
) strict, without rowid;

create unique index token_revocations_in_order on token_revocations (revoked_at);

-- Agents and credentials

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
  primary key (tenant, id)
) strict, without rowid;

create unique index agents_live_name on agents (tenant, name) where deleted_at is null;
create index agents_live_credential on agents (tenant, credential_ref)
  where credential_ref is not null and deleted_at is null;

-- An agent stands in a list for each answer to "which status, protocol and tag": 'active/http', 'active/any' and, unless
-- it is inactive, 'live/http' and 'live/any', and in the same with each of its tags ('live/any/red').
create table agent_lists (
  tenant text not null,
  list text not null,
  id text not null,
  primary key (tenant, list, id)
) strict, without rowid;

-- All that a search looks at, apart from the rest of the agent, and the inactive ones apart from the others.
create table agent_search (
  tenant text not null,
  inactive integer not null check (inactive in (0, 1)),
  id text not null,
  status text not null check (status in ('pending', 'active', 'inactive')),
  protocol text not null check (protocol in ('http', 'mcp')),
  size integer not null,
  tags text,
  text text not null,
  primary key (tenant, inactive, id)
) strict, without rowid;

-- What is counted of a tenant, exactly: 'credentials', and each list of agents.
create table catalog_totals (
  tenant text not null,
  list text not null,
  count integer not null,
  primary key (tenant, list)
) strict, without rowid;

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
  -- Which of its tenant's keys wraps the data key of the secret.
  key_number integer not null default 1,
  -- The hosts that the secret may go to: a JSON array, or null for any.
  allowed_hosts text,
  created_at integer not null,
  updated_at integer not null,
  primary key (tenant, id),
  check ((source = 'managed') = (sealed is not null)),
  check ((source = 'vault') = (vault_ref is not null))
) strict, without rowid;

create unique index credentials_name on credentials (tenant, name);

-- Calls

-- Calls that have not ended stand apart from the history: in order of arrival, with few indexes and with what is needed to
-- make them. The end of a call moves it into the history, whose rows are then written once.
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
  -- The kinds of outbox rows that are still to be written for the call, with spaces between; null for none.
  outbox text,
  -- The replica that accepted the call, which the others leave a young one to; null where there are no others.
  accepted_by text,
  owner text,
  -- A new token with each claim; it stays when the call has ended, and is null for a call that was never claimed.
  claim text,
  updated_at integer not null,
  -- JSON of the call as accepted.
  call text not null,
  -- The body while it is small; null for a large one, which stands in body_parts.
  request blob,
  -- The time of the first ID of a batch of arrival: batches have the order of the IDs, and so have the calls in them.
  batch integer not null default 0,
  check ((status = 'running') = (owner is not null))
) strict;

-- By the tenant in batches of arrival, so that new calls stand close together, whatever tenant they are of. By the tenant
-- alone the new calls of a thousand tenants with a backlog stood on a page each, and each page was written again for every
-- one of them (4.2 of 9 KB of the log for each accept). A walk along a tenant's calls passes over all batches, half a
-- microsecond for each. With all that the history is filtered by, so that the walk reads nothing else.
create index open_invocations_tenant
  on open_invocations (batch, tenant, id, agent_id, mode, status, model, settlement_status);
-- The scheduler's: the queue of each agent, oldest first, and the running calls of each replica. A call whose payment has
-- not been collected waits aside, and one on the streaming path only its caller can make.
create index open_invocations_pending on open_invocations (agent_id, id)
  where status = 'pending' and mode = 'transactional' and coalesce(settlement_status, '') <> 'pending';
create index open_invocations_running on open_invocations (owner) where status = 'running';
-- Streaming calls that are paid for while nobody waits for them, the longest unchanged first.
create index open_invocations_unclaimed on open_invocations (updated_at)
  where status = 'pending' and mode = 'streaming' and coalesce(settlement_status, '') <> 'pending';

create table ended_invocations (
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
  -- Of the whole bodies, in lower hex; only where a receipt will say them.
  req_sha256 text,
  resp_sha256 text,
  response_content_type text,
  response_truncated integer not null check (response_truncated in (0, 1)),
  body_captured integer not null check (body_captured in (0, 1)),
  -- The kinds of outbox rows that are still to be written for the call, with spaces between; null for none.
  outbox text,
  owner text,
  accepted_by text,
  claim text,
  updated_at integer not null,
  completed_at integer,
  primary key (tenant, id),
  check ((status in ('succeeded', 'failed')) = (completed_at is not null)),
  check (status <> 'pending' or owner is null),
  check (status <> 'running' or owner is not null)
) strict, without rowid;

create index invocations_agent on ended_invocations (tenant, agent_id, id);
create index invocations_status on ended_invocations (tenant, status, id);
create index invocations_mode on ended_invocations (tenant, mode, id);
create index invocations_settlement on ended_invocations (tenant, settlement_status, id)
  where settlement_status is not null;
create index invocations_error_class on ended_invocations (tenant, error_class, id) where error_class is not null;
create index invocations_model on ended_invocations (tenant, model, id) where model is not null;

-- Both as one, each call once, for readers only.
create view invocations as
select tenant, id, agent_id, caller, mode, status,
  null as error_class, model, mcp_method, mcp_tool, payment_network, payment_asset, payment_amount, payment_payer,
  payment_nonce, settlement_status, settlement, null as upstream_status, null as latency_ms, null as ttft_ms, req_size,
  null as resp_size, req_sha256, null as resp_sha256, null as response_content_type,
  0 as response_truncated, body_captured, outbox, owner, accepted_by, claim, updated_at,
  null as completed_at
from open_invocations
union all
select tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, payment_network,
  payment_asset, payment_amount, payment_payer, payment_nonce, settlement_status, settlement, upstream_status, latency_ms,
  ttft_ms, req_size, resp_size, req_sha256, resp_sha256, response_content_type, response_truncated, body_captured,
  outbox, owner, accepted_by, claim, updated_at, completed_at
from ended_invocations;

create table invocation_bodies (
  tenant text not null,
  invocation_id text not null,
  request blob,
  response blob,
  primary key (tenant, invocation_id)
) strict, without rowid;

-- Large bodies stand in parts, each written once and in order of arrival, so that no statement carries a whole one. With
-- row IDs: in a tree of keys SQLite reads all of a part to compare its key with another (to find one of 1,200 parts took
-- 1.8 ms, with row IDs 0.01).
create table body_parts (
  invocation_id text not null,
  tenant text not null,
  kind text not null check (kind in ('request', 'response')),
  n integer not null,
  bytes blob not null,
  primary key (invocation_id, kind, n)
) strict;

-- Bodies of which parts are to be removed, from the part `first` on; none of them before `due_at`.
create table orphaned_parts (
  invocation_id text not null,
  tenant text not null,
  kind text not null check (kind in ('request', 'response')),
  first integer not null,
  due_at integer not null,
  primary key (invocation_id, kind)
) strict, without rowid;

-- How many calls have ended, by what they can be asked for: src/storage/totals.ts. Here a total is one row, of shard 0.
create table invocation_counts (
  tenant text not null,
  dimension text not null,
  value text not null,
  shard integer not null,
  count integer not null,
  primary key (tenant, dimension, value, shard)
) strict, without rowid;

-- What a caller's key stands for until it expires.
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

create index idempotency_keys_expired on idempotency_keys (expires_at);

-- Calls whose caller was told that they were not taken while nobody could say whether they had been stored.
create table refused_calls (
  tenant text not null,
  id text not null,
  claim text,
  created_at integer not null,
  primary key (tenant, id)
) strict, without rowid;

-- What replicas share. Here there is one process, which asks nobody.

-- The gateways and facilitators that run: see src/storage/leases.ts.
create table processes (
  id text not null primary key,
  kind text not null check (kind in ('gateway', 'facilitator')),
  lease_until integer not null,
  master_key_ids text,
  seen_version integer,
  wallets text,
  is_able integer check (is_able in (0, 1))
) strict, without rowid;

-- When work that one process does for all is due again.
create table job_leases (
  job text not null primary key,
  next_at integer not null,
  -- Who goes on with the work until it stops; null where the work goes to the first that asks.
  holder text
) strict, without rowid;

-- When this database was last restored to an older state, in one row at most: see src/storage/restoration.ts.
create table restoration (
  one integer not null primary key check (one = 1),
  restored_at integer not null,
  is_done integer not null check (is_done in (0, 1))
) strict;

-- The gateway's payments

create table settlement_configs (
  tenant text not null primary key,
  facilitator_url text not null,
  facilitator_credential_ref text not null,
  created_at integer not null,
  updated_at integer not null
) strict, without rowid;

create table payments (
  chain_id integer not null,
  token text not null,
  payer text not null,
  nonce text not null,
  tenant text not null,
  invocation_id text not null,
  agent_id text not null,
  caller text not null,
  body_sha256 text not null,
  authorization_digest text not null,
  x402_version integer not null check (x402_version in (1, 2)),
  valid_before integer not null,
  facilitator_url text,
  facilitator_credential_ref text,
  settle_request text,
  attempts integer not null,
  -- Attempts of which certainly nothing left the gateway.
  unsent_attempts integer not null default 0,
  -- Written right before an attempt is dialled: null as long as certainly nothing of the payment has left the gateway.
  sent_at integer,
  unknown_since integer,
  -- For how long the facilitator has been asked since the outcome became unknown.
  asked_ms integer not null default 0,
  -- The upstream's credential of a paid call that has not ended: it can't be deleted so long.
  call_credential_ref text,
  next_attempt_at integer,
  created_at integer not null,
  updated_at integer not null,
  primary key (chain_id, token, payer, nonce),
  check ((next_attempt_at is not null) = (settle_request is not null))
) strict, without rowid;

create unique index payments_invocation on payments (tenant, invocation_id);
-- Tenant by tenant, so that the payments of one, however many wait, hold up nobody else's.
create index payments_due on payments (tenant, next_attempt_at) where next_attempt_at is not null;
create index payments_credential on payments (tenant, facilitator_credential_ref) where next_attempt_at is not null;
create index payments_call_credential on payments (tenant, call_credential_ref)
  where call_credential_ref is not null;

-- Policies: the decisions are found by their key, newest first

create table policies (
  tenant text not null primary key,
  version integer not null check (version >= 1),
  default_action text not null check (default_action in ('allow', 'warn', 'deny')),
  on_error text not null check (on_error in ('allow', 'warn', 'deny')),
  rules text not null,
  updated_at integer not null
) strict, without rowid;

create table policy_decisions (
  tenant text not null,
  id text not null,
  agent_id text not null,
  protocol text not null check (protocol in ('http', 'mcp')),
  mcp_tool text,
  action text not null check (action in ('allow', 'warn', 'deny')),
  matched_rule integer check (matched_rule >= 1),
  reason text not null,
  primary key (tenant, id)
) strict, without rowid;

-- What consumers are still to be told of calls whose end and settlement are final: a row for each kind of the call, which
-- its consumer deletes

create table outbox (
  kind text not null,
  tenant text not null,
  invocation_id text not null,
  primary key (kind, tenant, invocation_id)
) strict, without rowid;

-- Receipts: in the order of each tenant's chain, and the newest of each chain, which the next one refers to

create table receipt_chains (
  tenant text not null primary key,
  sequence integer not null check (sequence >= 1),
  sha256 text not null
) strict, without rowid;

-- With a rowid: a row is too large to stand well in a tree of keys.
create table receipts (
  tenant text not null,
  sequence integer not null check (sequence >= 1),
  id text not null,
  invocation_id text not null,
  jws text not null,
  primary key (tenant, sequence)
) strict;

create unique index receipts_invocation on receipts (tenant, invocation_id);

-- The facilitator

create table facilitator_accounts (
  name text not null primary key,
  enabled integer not null check (enabled in (0, 1)),
  max_per_transaction text,
  daily_ceiling text,
  created_at integer not null,
  updated_at integer not null
) strict, without rowid;

create table facilitator_certificates (
  fingerprint text not null primary key,
  account text not null,
  created_at integer not null
) strict, without rowid;

create index facilitator_certificates_account on facilitator_certificates (account);

create table facilitator_days (
  account text not null,
  day text not null,
  reserved text not null,
  gas_burned text not null default '0',
  -- What all transactions of the account cost on the day.
  gas_used text not null default '0',
  primary key (account, day)
) strict, without rowid;

create table facilitator_payments (
  chain_id integer not null,
  token text not null,
  payer text not null,
  nonce text not null,
  account text not null,
  status text not null check (status in ('claimed', 'sent', 'settled', 'failed')),
  claim text not null default '',
  pay_to text not null,
  value text not null,
  valid_after text not null,
  valid_before text not null,
  signature text not null,
  requirements text not null,
  day text not null,
  attempts integer not null,
  gas_reserved text not null default '0',
  gas_held text not null default '0',
  -- The wallet whose holder is to send it, and the payment as it was simulated.
  wallet text,
  gas_limit text,
  may_share integer check (may_share in (0, 1)),
  transaction_hash text,
  block_number integer,
  block_hash text,
  reason text,
  foreign_transaction text,
  -- The day on which the payment reverted: its payer is refused first.
  reverted_on text,
  created_at integer not null,
  updated_at integer not null,
  ended_at integer,
  primary key (chain_id, token, payer, nonce),
  check (status <> 'settled' or (transaction_hash is not null and block_hash is not null))
) strict, without rowid;

create index facilitator_payments_open on facilitator_payments (status) where status in ('claimed', 'sent');
create index facilitator_payments_account_open on facilitator_payments (account)
  where status in ('claimed', 'sent');
create index facilitator_payments_payer_open on facilitator_payments (payer) where status in ('claimed', 'sent');
create index facilitator_payments_payer_settled on facilitator_payments (payer, block_number)
  where status = 'settled';
create index facilitator_payments_reverted on facilitator_payments (payer, reverted_on) where reverted_on is not null;
-- What is old enough to be removed.
create index facilitator_payments_ended on facilitator_payments (ended_at) where ended_at is not null;

create table facilitator_refusals (
  account text not null,
  payer text not null,
  nonce text not null,
  reason text not null,
  attempts integer not null,
  created_at integer not null,
  updated_at integer not null,
  primary key (account, payer, nonce)
) strict, without rowid;

create index facilitator_refusals_updated on facilitator_refusals (updated_at);

create table facilitator_transactions (
  hash text not null primary key,
  wallet text not null,
  wallet_nonce integer not null,
  replacement integer not null,
  -- The payment of a transaction that makes a single one.
  payer text,
  nonce text,
  raw text not null,
  gas text not null,
  max_fee text not null,
  max_priority_fee text not null,
  gas_burned text,
  open integer not null check (open in (0, 1)),
  stored_at_block integer not null,
  created_at integer not null,
  check ((payer is null) = (nonce is null))
) strict, without rowid;

-- One payment for each wallet nonce, even if two processes sign with one key.
create unique index facilitator_transactions_nonce on facilitator_transactions (wallet, wallet_nonce, replacement);
create index facilitator_transactions_open on facilitator_transactions (wallet, wallet_nonce) where open = 1;
create index facilitator_transactions_payment on facilitator_transactions (payer, nonce) where payer is not null;
-- What is old enough to be removed.
create index facilitator_transactions_created on facilitator_transactions (created_at);

-- The payments of a transaction that makes several of them (TOLLGATE_BATCH).
create table facilitator_transaction_payments (
  hash text not null,
  payer text not null,
  nonce text not null,
  gas text not null,
  gas_burned text,
  primary key (hash, payer, nonce)
) strict, without rowid;

create index facilitator_transaction_payments_payment on facilitator_transaction_payments (payer, nonce);

-- Wallets are leased to one facilitator at a time: see src/facilitator/wallet/leases.ts. On SQLite one process has them all.
create table facilitator_wallets (
  wallet text not null primary key,
  holder text not null,
  token integer not null
) strict, without rowid;

-- What large tables look like. That there are few batches of open calls is known from here.
insert into sqlite_stat1 (tbl, idx, stat) values
  ('tenant_keys', 'tenant_keys', '10000 2 1'),
  ('token_revocations', 'token_revocations', '10000 10 1'),
  ('token_revocations', 'token_revocations_in_order', '10000 1'),
  ('open_invocations', 'sqlite_autoindex_open_invocations_1', '100000 1'),
  ('open_invocations', 'open_invocations_tenant', '100000 1000 20 1 1 1 1 1 1'),
  ('open_invocations', 'open_invocations_pending', '100000 10000 1'),
  ('open_invocations', 'open_invocations_running', '1000 100'),
  ('open_invocations', 'open_invocations_unclaimed', '1000 2'),
  ('ended_invocations', 'ended_invocations', '1000000 1000000 1'),
  ('ended_invocations', 'invocations_agent', '1000000 1000000 10000 1'),
  ('ended_invocations', 'invocations_status', '1000000 1000000 10000 1'),
  ('ended_invocations', 'invocations_mode', '1000000 1000000 10000 1'),
  ('ended_invocations', 'invocations_settlement', '1000000 1000000 10000 1'),
  ('ended_invocations', 'invocations_error_class', '1000000 1000000 10000 1'),
  ('ended_invocations', 'invocations_model', '1000000 1000000 10000 1'),
  ('body_parts', 'sqlite_autoindex_body_parts_1', '100000 4 2 1'),
  ('orphaned_parts', 'orphaned_parts', '1000 1 1');
