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
insert into sqlite_stat1 (tbl, idx, stat) values
  ('invocations', 'invocations_pending', '10000 1000 1 1'),
  ('invocations', 'invocations_unclaimed', '1000 2');

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
  unknown_since integer,
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

create table facilitator_accounts (
  name text not null primary key,
  fingerprint text not null unique,
  enabled integer not null check (enabled in (0, 1)),
  max_per_transaction text,
  daily_ceiling text,
  created_at integer not null,
  updated_at integer not null
) strict, without rowid;

create table facilitator_days (
  account text not null,
  day text not null,
  reserved text not null,
  primary key (account, day)
) strict, without rowid;

create table facilitator_payments (
  chain_id integer not null,
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
  attempts integer not null,
  transaction_hash text,
  block_number integer,
  block_hash text,
  reason text,
  foreign_transaction text,
  created_at integer not null,
  updated_at integer not null,
  ended_at integer,
  primary key (chain_id, token, payer, nonce),
  check (status <> 'settled' or (transaction_hash is not null and block_hash is not null))
) strict, without rowid;

create index facilitator_payments_open on facilitator_payments (status) where status in ('claimed', 'sent');

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
  payer text,
  nonce text,
  raw text not null,
  gas text not null,
  max_fee text not null,
  max_priority_fee text not null,
  open integer not null check (open in (0, 1)),
  stored_at_block integer not null,
  created_at integer not null,
  check ((payer is null) = (nonce is null))
) strict, without rowid;

-- One payment for each wallet nonce, even if two processes sign with one key.
create unique index facilitator_transactions_nonce on facilitator_transactions (wallet, wallet_nonce, replacement);
create index facilitator_transactions_open on facilitator_transactions (wallet, wallet_nonce) where open = 1;
create index facilitator_transactions_payment on facilitator_transactions (payer, nonce) where payer is not null;
