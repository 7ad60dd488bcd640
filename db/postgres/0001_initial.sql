-- The whole schema, as in ../sqlite. Text compares byte by byte (collate "C"): the order of IDs, ranges over them and lower()
-- must be the same as on SQLite, whatever the locale of the database. Bodies are stored uncompressed, since compressing
-- 32 MiB costs more than writing it.

-- Keys

-- A tenant has several keys, numbered from 1. The newest seals; the first is what other keys are derived from, for good.
create table tenant_keys (
  tenant text collate "C" not null,
  number bigint not null,
  wrapped_key bytea not null,
  master_key_id text collate "C" not null,
  created_at bigint not null,
  primary key (tenant, number)
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

-- One row: see src/keys/state.ts.
create table keyring (
  one integer not null primary key check (one = 1),
  version bigint not null,
  master_key_id text collate "C",
  next_master_key_id text collate "C",
  is_rotating boolean not null,
  revoked_at bigint not null
);

insert into keyring (one, version, is_rotating, revoked_at) values (1, 1, false, 0);

-- The tokens of a user that were made before this are refused; of all users of the tenant where the name is empty.
create table token_revocations (
  tenant text collate "C" not null,
  user_name text collate "C" not null,
  revoked_at bigint not null,
  primary key (tenant, user_name)
);

create unique index token_revocations_in_order on token_revocations (revoked_at);

-- Agents and credentials

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
  primary key (tenant, id)
);

create unique index agents_live_name on agents (tenant, name) where deleted_at is null;
create index agents_live_credential on agents (tenant, credential_ref)
  where credential_ref is not null and deleted_at is null;

-- An agent stands in a list for each answer to "which status, protocol and tag": 'active/http', 'active/any' and, unless
-- it is inactive, 'live/http' and 'live/any', and in the same with each of its tags ('live/any/red').
create table agent_lists (
  tenant text collate "C" not null,
  list text collate "C" not null,
  id text collate "C" not null,
  primary key (tenant, list, id)
);

-- All that a search looks at, apart from the rest of the agent, and the inactive ones apart from the others.
create table agent_search (
  tenant text collate "C" not null,
  inactive boolean not null,
  id text collate "C" not null,
  status text collate "C" not null check (status in ('pending', 'active', 'inactive')),
  protocol text collate "C" not null check (protocol in ('http', 'mcp')),
  size bigint not null,
  tags text collate "C",
  text text collate "C" not null,
  primary key (tenant, inactive, id)
);

-- What is counted of a tenant, exactly: 'credentials', and each list of agents.
create table catalog_totals (
  tenant text collate "C" not null,
  list text collate "C" not null,
  count bigint not null,
  primary key (tenant, list)
);

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
  -- Which of its tenant's keys wraps the data key of the secret.
  key_number bigint not null default 1,
  -- The hosts that the secret may go to: a JSON array, or null for any.
  allowed_hosts text collate "C",
  created_at bigint not null,
  updated_at bigint not null,
  primary key (tenant, id),
  check ((source = 'managed') = (sealed is not null)),
  check ((source = 'vault') = (vault_ref is not null))
);

create unique index credentials_name on credentials (tenant, name);

-- Calls

-- Calls that have not ended stand apart from the history: in order of arrival, with few indexes and with what is needed to
-- make them. The end of a call moves it into the history, whose rows are then written once.
--
-- A row is written twice: when the call is accepted, and when it is claimed. Where a page has room for both, the log says
-- only what differs between them: measured, a claim writes 550 bytes instead of 1070, and a whole call 3,320 instead of 3,960.
-- Two entries of an index without deduplication are alike only when they are of one call. Looking for others to put
-- together with them is in vain: measured, 28 instead of 31 µs of the server for a claim.
create table open_invocations (
  id text collate "C" not null primary key with (deduplicate_items = off),
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
  -- The kinds of outbox rows that are still to be written for the call, with spaces between; null for none.
  outbox text collate "C",
  -- The replica that accepted the call, which the others leave a young one to; null where there are no others.
  accepted_by text collate "C",
  owner text collate "C",
  -- A new token with each claim; it stays when the call has ended, and is null for a call that was never claimed.
  claim text collate "C",
  updated_at bigint not null,
  -- JSON of the call as accepted.
  call text collate "C" not null,
  -- The body while it is small; null for a large one, which stands in body_parts.
  request bytea,
  check ((status = 'running') = (owner is not null))
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
  autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000);

alter table open_invocations alter column request set storage external;

create index open_invocations_tenant on open_invocations (tenant, id) with (deduplicate_items = off);
-- The scheduler's: the queue of each agent, oldest first, and the running calls of each replica. A call whose payment has
-- not been collected waits aside, and one on the streaming path only its caller can make.
create index open_invocations_pending on open_invocations (agent_id, id) with (deduplicate_items = off)
  where status = 'pending' and mode = 'transactional' and coalesce(settlement_status, '') <> 'pending';
create index open_invocations_running on open_invocations (owner) where status = 'running';
-- Streaming calls that are paid for while nobody waits for them, the longest unchanged first.
create index open_invocations_unclaimed on open_invocations (updated_at)
  where status = 'pending' and mode = 'streaming' and coalesce(settlement_status, '') <> 'pending';

create table ended_invocations (
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
  -- Of the whole bodies, in lower hex; only where a receipt will say them.
  req_sha256 text collate "C",
  resp_sha256 text collate "C",
  response_content_type text collate "C",
  response_truncated boolean not null,
  body_captured boolean not null,
  -- The kinds of outbox rows that are still to be written for the call, with spaces between; null for none.
  outbox text collate "C",
  owner text collate "C",
  accepted_by text collate "C",
  claim text collate "C",
  updated_at bigint not null,
  completed_at bigint,
  primary key (tenant, id),
  check ((status in ('succeeded', 'failed')) = (completed_at is not null)),
  check (status <> 'pending' or owner is null),
  check (status <> 'running' or owner is not null)
);

-- Never measured: the planner then takes every value for a rare one, and the index that names it. With measured values it
-- walks the tenant's whole history for one that is common elsewhere.
alter table ended_invocations
  alter column agent_id set statistics 0,
  alter column status set statistics 0,
  alter column mode set statistics 0,
  alter column settlement_status set statistics 0,
  alter column error_class set statistics 0,
  alter column model set statistics 0;

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
  null::text collate "C" as error_class, model, mcp_method, mcp_tool, payment_network, payment_asset, payment_amount,
  payment_payer, payment_nonce, settlement_status, settlement, null::bigint as upstream_status,
  null::bigint as latency_ms, null::bigint as ttft_ms, req_size, null::bigint as resp_size, req_sha256,
  null::text collate "C" as resp_sha256, null::text collate "C" as response_content_type,
  false as response_truncated, body_captured, outbox, owner, accepted_by, claim, updated_at,
  null::bigint as completed_at
from open_invocations
union all
select tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, payment_network,
  payment_asset, payment_amount, payment_payer, payment_nonce, settlement_status, settlement, upstream_status, latency_ms,
  ttft_ms, req_size, resp_size, req_sha256, resp_sha256, response_content_type, response_truncated, body_captured,
  outbox, owner, accepted_by, claim, updated_at, completed_at
from ended_invocations;

create table invocation_bodies (
  tenant text collate "C" not null,
  invocation_id text collate "C" not null,
  request bytea,
  response bytea,
  primary key (tenant, invocation_id)
);

alter table invocation_bodies
  alter column request set storage external,
  alter column response set storage external;

-- Large bodies stand in parts, each written once and in order of arrival, so that no statement carries a whole one.
create table body_parts (
  invocation_id text collate "C" not null,
  tenant text collate "C" not null,
  kind text collate "C" not null check (kind in ('request', 'response')),
  n bigint not null,
  bytes bytea not null,
  primary key (invocation_id, kind, n)
);

alter table body_parts alter column bytes set storage external;

-- Bodies of which parts are to be removed, from the part `first` on; none of them before `due_at`.
create table orphaned_parts (
  invocation_id text collate "C" not null,
  tenant text collate "C" not null,
  kind text collate "C" not null check (kind in ('request', 'response')),
  first bigint not null,
  due_at bigint not null,
  primary key (invocation_id, kind)
);

-- How many calls have ended, by what they can be asked for: src/storage/totals.ts. Half of each page stays free, so that a
-- changed total stays on its page and touches no index.
create table invocation_counts (
  tenant text collate "C" not null,
  dimension text collate "C" not null,
  value text collate "C" not null,
  shard bigint not null,
  count bigint not null,
  primary key (tenant, dimension, value, shard)
) with (fillfactor = 50);

-- What a caller's key stands for until it expires.
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

create index idempotency_keys_expired on idempotency_keys (expires_at);

-- Calls whose caller was told that they were not taken while nobody could say whether they had been stored.
create table refused_calls (
  tenant text collate "C" not null,
  id text collate "C" not null,
  claim text collate "C",
  created_at bigint not null,
  primary key (tenant, id)
);

-- What replicas share

-- What works lock until they end, a row for each (src/storage/postgres/transactions.ts). Half of each page stays free, so that a lock
-- that is taken again stays on its page.
create table locks (
  key text collate "C" not null primary key,
  taken bigint not null
) with (fillfactor = 50);

-- The gateways and facilitators that run: see src/storage/leases.ts.
create table processes (
  id text collate "C" not null primary key,
  kind text collate "C" not null check (kind in ('gateway', 'facilitator')),
  lease_until bigint not null,
  master_key_ids text collate "C",
  seen_version bigint,
  wallets text collate "C",
  is_able boolean
);

-- When work that one process does for all is due again.
create table job_leases (
  job text collate "C" not null primary key,
  next_at bigint not null,
  -- Who goes on with the work until it stops; null where the work goes to the first that asks.
  holder text collate "C"
);

-- What the replicas count together: src/storage/postgres/store.ts. Nothing waits for the disk, and yet nothing of a call that
-- was accepted is lost: what is counted stands in the log before the call.

-- The token bucket of each agent that has a rate limit and was called: src/gateway/agents/store.ts. Half of each
-- page stays free, so that a bucket that is taken from stays on its page.
create table agent_buckets (
  tenant text collate "C" not null,
  agent_id text collate "C" not null,
  revision bigint not null,
  -- Tokens in a second, and the most that the bucket holds.
  rate double precision not null,
  depth double precision not null,
  -- What it held at filled_at, in microseconds since the epoch.
  tokens double precision not null,
  filled_at bigint not null,
  -- What the last statement took.
  granted bigint not null,
  primary key (tenant, agent_id)
) with (fillfactor = 50);

-- Callers whose rate a policy asks for: src/gateway/policy/observed-rate.ts. Times are in microseconds since the epoch.
create table caller_rates (
  tenant text collate "C" not null,
  agent_id text collate "C" not null,
  user_name text collate "C" not null,
  -- The last call.
  at bigint not null,
  -- All calls, how many of those were over a minute old at the last one, and how many the last statement added.
  counted bigint not null,
  gone bigint not null,
  added bigint not null,
  primary key (tenant, agent_id, user_name)
) with (fillfactor = 50);

-- How many calls a caller had made when, for the last minutes.
create table caller_calls (
  tenant text collate "C" not null,
  agent_id text collate "C" not null,
  user_name text collate "C" not null,
  at bigint not null,
  counted bigint not null,
  primary key (tenant, agent_id, user_name, at)
);

create index caller_calls_in_order on caller_calls (at);

-- When this database was last restored to an older state, in one row at most: see src/storage/restoration.ts.
create table restoration (
  one integer not null primary key check (one = 1),
  restored_at bigint not null,
  is_done boolean not null
);

-- The gateway's payments

create table settlement_configs (
  tenant text collate "C" not null primary key,
  facilitator_url text collate "C" not null,
  facilitator_credential_ref text collate "C" not null,
  created_at bigint not null,
  updated_at bigint not null
);

create table payments (
  chain_id bigint not null,
  token text collate "C" not null,
  payer text collate "C" not null,
  nonce text collate "C" not null,
  tenant text collate "C" not null,
  invocation_id text collate "C" not null,
  agent_id text collate "C" not null,
  caller text collate "C" not null,
  body_sha256 text collate "C" not null,
  authorization_digest text collate "C" not null,
  x402_version bigint not null check (x402_version in (1, 2)),
  valid_before bigint not null,
  facilitator_url text collate "C",
  facilitator_credential_ref text collate "C",
  settle_request text collate "C",
  attempts bigint not null,
  -- Attempts of which certainly nothing left the gateway.
  unsent_attempts bigint not null default 0,
  -- Written right before an attempt is dialled: null as long as certainly nothing of the payment has left the gateway.
  sent_at bigint,
  unknown_since bigint,
  -- For how long the facilitator has been asked since the outcome became unknown.
  asked_ms bigint not null default 0,
  -- The upstream's credential of a paid call that has not ended: it can't be deleted so long.
  call_credential_ref text collate "C",
  next_attempt_at bigint,
  created_at bigint not null,
  updated_at bigint not null,
  primary key (chain_id, token, payer, nonce),
  check ((next_attempt_at is not null) = (settle_request is not null))
);

create unique index payments_invocation on payments (tenant, invocation_id);
-- Tenant by tenant, so that the payments of one, however many wait, hold up nobody else's.
create index payments_due on payments (tenant, next_attempt_at) where next_attempt_at is not null;
create index payments_credential on payments (tenant, facilitator_credential_ref) where next_attempt_at is not null;
create index payments_call_credential on payments (tenant, call_credential_ref)
  where call_credential_ref is not null;

-- Policies: the decisions are found by their key, newest first

create table policies (
  tenant text collate "C" not null primary key,
  version bigint not null check (version >= 1),
  default_action text collate "C" not null check (default_action in ('allow', 'warn', 'deny')),
  on_error text collate "C" not null check (on_error in ('allow', 'warn', 'deny')),
  rules text collate "C" not null,
  updated_at bigint not null
);

create table policy_decisions (
  tenant text collate "C" not null,
  id text collate "C" not null,
  agent_id text collate "C" not null,
  protocol text collate "C" not null check (protocol in ('http', 'mcp')),
  mcp_tool text collate "C",
  action text collate "C" not null check (action in ('allow', 'warn', 'deny')),
  matched_rule bigint check (matched_rule >= 1),
  reason text collate "C" not null,
  primary key (tenant, id)
);

-- What consumers are still to be told of calls whose end and settlement are final: a row for each kind of the call, which
-- its consumer deletes

create table outbox (
  kind text collate "C" not null,
  tenant text collate "C" not null,
  invocation_id text collate "C" not null,
  primary key (kind, tenant, invocation_id)
);

-- Receipts: in the order of each tenant's chain, and the newest of each chain, which the next one refers to

create table receipt_chains (
  tenant text collate "C" not null primary key,
  sequence bigint not null check (sequence >= 1),
  sha256 text collate "C" not null
);

create table receipts (
  tenant text collate "C" not null,
  sequence bigint not null check (sequence >= 1),
  id text collate "C" not null,
  invocation_id text collate "C" not null,
  jws text collate "C" not null,
  primary key (tenant, sequence)
);

create unique index receipts_invocation on receipts (tenant, invocation_id);

-- The facilitator

create table facilitator_accounts (
  name text collate "C" not null primary key,
  enabled boolean not null,
  max_per_transaction text collate "C",
  daily_ceiling text collate "C",
  created_at bigint not null,
  updated_at bigint not null
);

create table facilitator_certificates (
  fingerprint text collate "C" not null primary key,
  account text collate "C" not null,
  created_at bigint not null
);

create index facilitator_certificates_account on facilitator_certificates (account);

create table facilitator_days (
  account text collate "C" not null,
  day text collate "C" not null,
  reserved text collate "C" not null,
  gas_burned text collate "C" not null default '0',
  -- What all transactions of the account cost on the day.
  gas_used text collate "C" not null default '0',
  primary key (account, day)
);

create table facilitator_payments (
  chain_id bigint not null,
  token text collate "C" not null,
  payer text collate "C" not null,
  nonce text collate "C" not null,
  account text collate "C" not null,
  status text collate "C" not null check (status in ('claimed', 'sent', 'settled', 'failed')),
  claim text collate "C" not null default '',
  pay_to text collate "C" not null,
  value text collate "C" not null,
  valid_after text collate "C" not null,
  valid_before text collate "C" not null,
  signature text collate "C" not null,
  requirements text collate "C" not null,
  day text collate "C" not null,
  attempts bigint not null,
  gas_reserved text collate "C" not null default '0',
  gas_held text collate "C" not null default '0',
  -- The wallet whose holder is to send it, and the payment as it was simulated.
  wallet text collate "C",
  gas_limit text collate "C",
  may_share boolean,
  transaction_hash text collate "C",
  block_number bigint,
  block_hash text collate "C",
  reason text collate "C",
  foreign_transaction text collate "C",
  -- The day on which the payment reverted: its payer is refused first.
  reverted_on text collate "C",
  created_at bigint not null,
  updated_at bigint not null,
  ended_at bigint,
  primary key (chain_id, token, payer, nonce),
  check (status <> 'settled' or (transaction_hash is not null and block_hash is not null))
);

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
  account text collate "C" not null,
  payer text collate "C" not null,
  nonce text collate "C" not null,
  reason text collate "C" not null,
  attempts bigint not null,
  created_at bigint not null,
  updated_at bigint not null,
  primary key (account, payer, nonce)
);

create index facilitator_refusals_updated on facilitator_refusals (updated_at);

create table facilitator_transactions (
  hash text collate "C" not null primary key,
  wallet text collate "C" not null,
  wallet_nonce bigint not null,
  replacement bigint not null,
  -- The payment of a transaction that makes a single one.
  payer text collate "C",
  nonce text collate "C",
  raw text collate "C" not null,
  gas text collate "C" not null,
  max_fee text collate "C" not null,
  max_priority_fee text collate "C" not null,
  gas_burned text collate "C",
  open boolean not null,
  stored_at_block bigint not null,
  created_at bigint not null,
  check ((payer is null) = (nonce is null))
);

-- One payment for each wallet nonce, even if two processes sign with one key.
create unique index facilitator_transactions_nonce on facilitator_transactions (wallet, wallet_nonce, replacement);
create index facilitator_transactions_open on facilitator_transactions (wallet, wallet_nonce) where open;
create index facilitator_transactions_payment on facilitator_transactions (payer, nonce) where payer is not null;
-- What is old enough to be removed.
create index facilitator_transactions_created on facilitator_transactions (created_at);

-- The payments of a transaction that makes several of them (TOLLGATE_BATCH).
create table facilitator_transaction_payments (
  hash text collate "C" not null,
  payer text collate "C" not null,
  nonce text collate "C" not null,
  gas text collate "C" not null,
  gas_burned text collate "C",
  primary key (hash, payer, nonce)
);

create index facilitator_transaction_payments_payment on facilitator_transaction_payments (payer, nonce);

-- Wallets are leased to one facilitator at a time: see src/facilitator/wallet/leases.ts.
create table facilitator_wallets (
  wallet text collate "C" not null primary key,
  holder text collate "C" not null,
  token bigint not null
);
