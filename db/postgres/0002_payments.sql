-- Payments: the gateway's (settlement_configs, payments) and the facilitator's. Amounts are decimal texts of up to
-- 256 bits; hex is lower case, so that text compares as the value does.

-- A call whose payment has not been collected waits aside: the dispatcher must not find it.
drop index invocations_pending;
create index invocations_pending on invocations (agent_id, id)
  where status = 'pending' and coalesce(settlement_status, '') <> 'pending';

create table settlement_configs (
  tenant text not null primary key,
  facilitator_url text not null,
  facilitator_credential_ref text not null,
  created_at bigint not null,
  updated_at bigint not null
);

create table payments (
  chain_id bigint not null,
  token text not null,
  payer text not null,
  nonce text not null,
  tenant text not null,
  invocation_id text not null,
  agent_id text not null,
  caller text not null,
  body_sha256 text not null,
  authorization_digest text not null,
  x402_version bigint not null check (x402_version in (1, 2)),
  valid_before bigint not null,
  facilitator_url text,
  facilitator_credential_ref text,
  settle_request text,
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
  name text not null primary key,
  fingerprint text not null unique,
  enabled boolean not null,
  max_per_transaction text,
  daily_ceiling text,
  created_at bigint not null,
  updated_at bigint not null
);

create table facilitator_days (
  account text not null,
  day text not null,
  reserved text not null,
  primary key (account, day)
);

create table facilitator_payments (
  chain_id bigint not null,
  token text not null,
  payer text not null,
  nonce text not null,
  account text not null,
  status text not null check (status in ('claimed', 'sent', 'settled', 'failed')),
  pay_to text not null,
  value text not null,
  valid_after text not null,
  valid_before text not null,
  signature text not null,
  requirements text not null,
  day text not null,
  attempts bigint not null,
  transaction_hash text,
  block_number bigint,
  block_hash text,
  reason text,
  foreign_transaction text,
  created_at bigint not null,
  updated_at bigint not null,
  ended_at bigint,
  primary key (chain_id, token, payer, nonce),
  check (status <> 'settled' or (transaction_hash is not null and block_hash is not null))
);

create index facilitator_payments_open on facilitator_payments (status) where status in ('claimed', 'sent');

create table facilitator_refusals (
  account text not null,
  payer text not null,
  nonce text not null,
  reason text not null,
  attempts bigint not null,
  created_at bigint not null,
  updated_at bigint not null,
  primary key (account, payer, nonce)
);

create index facilitator_refusals_updated on facilitator_refusals (updated_at);

create table facilitator_transactions (
  hash text not null primary key,
  wallet text not null,
  wallet_nonce bigint not null,
  replacement bigint not null,
  payer text,
  nonce text,
  raw text not null,
  gas text not null,
  max_fee text not null,
  max_priority_fee text not null,
  open boolean not null,
  stored_at_block bigint not null,
  created_at bigint not null,
  check ((payer is null) = (nonce is null))
);

-- One payment for each wallet nonce, even if two processes sign with one key.
create unique index facilitator_transactions_nonce on facilitator_transactions (wallet, wallet_nonce, replacement);
create index facilitator_transactions_open on facilitator_transactions (wallet, wallet_nonce) where open;
create index facilitator_transactions_payment on facilitator_transactions (payer, nonce) where payer is not null;
