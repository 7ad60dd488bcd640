-- Payments: the gateway's (settlement_configs, payments) and the facilitator's. Amounts are decimal texts of up to
-- 256 bits; hex is lower case, so that text compares as the value does.

-- A call whose payment has not been collected waits aside: the dispatcher must not find it. Nor must it find one on
-- the streaming path, which only its caller can have made.
drop index invocations_pending;
create index invocations_pending on invocations (agent_id, id)
  where status = 'pending' and mode = 'transactional' and coalesce(settlement_status, '') <> 'pending';
-- Streaming calls that are paid for while nobody waits for them, the longest unchanged first.
create index invocations_unclaimed on invocations (updated_at)
  where status = 'pending' and mode = 'streaming' and coalesce(settlement_status, '') <> 'pending';

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
  unknown_since bigint,
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

create table facilitator_accounts (
  name text collate "C" not null primary key,
  fingerprint text collate "C" not null unique,
  enabled boolean not null,
  max_per_transaction text collate "C",
  daily_ceiling text collate "C",
  created_at bigint not null,
  updated_at bigint not null
);

create table facilitator_days (
  account text collate "C" not null,
  day text collate "C" not null,
  reserved text collate "C" not null,
  primary key (account, day)
);

create table facilitator_payments (
  chain_id bigint not null,
  token text collate "C" not null,
  payer text collate "C" not null,
  nonce text collate "C" not null,
  account text collate "C" not null,
  status text collate "C" not null check (status in ('claimed', 'sent', 'settled', 'failed')),
  pay_to text collate "C" not null,
  value text collate "C" not null,
  valid_after text collate "C" not null,
  valid_before text collate "C" not null,
  signature text collate "C" not null,
  requirements text collate "C" not null,
  day text collate "C" not null,
  attempts bigint not null,
  transaction_hash text collate "C",
  block_number bigint,
  block_hash text collate "C",
  reason text collate "C",
  foreign_transaction text collate "C",
  created_at bigint not null,
  updated_at bigint not null,
  ended_at bigint,
  primary key (chain_id, token, payer, nonce),
  check (status <> 'settled' or (transaction_hash is not null and block_hash is not null))
);

create index facilitator_payments_open on facilitator_payments (status) where status in ('claimed', 'sent');

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
  payer text collate "C",
  nonce text collate "C",
  raw text collate "C" not null,
  gas text collate "C" not null,
  max_fee text collate "C" not null,
  max_priority_fee text collate "C" not null,
  open boolean not null,
  stored_at_block bigint not null,
  created_at bigint not null,
  check ((payer is null) = (nonce is null))
);

-- One payment for each wallet nonce, even if two processes sign with one key.
create unique index facilitator_transactions_nonce on facilitator_transactions (wallet, wallet_nonce, replacement);
create index facilitator_transactions_open on facilitator_transactions (wallet, wallet_nonce) where open;
create index facilitator_transactions_payment on facilitator_transactions (payer, nonce) where payer is not null;
