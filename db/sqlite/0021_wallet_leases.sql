-- Wallets are leased to one facilitator at a time: see src/facilitator/wallet/leases.ts. On SQLite one process has them all.

create table facilitators (
  id text not null primary key,
  wallets text not null,
  is_able integer not null check (is_able in (0, 1)),
  lease_until integer not null
) strict, without rowid;

create table facilitator_wallets (
  wallet text not null primary key,
  holder text not null,
  token integer not null
) strict, without rowid;

-- Whose holder is to send it, and as it was simulated.
alter table facilitator_payments add column wallet text;
alter table facilitator_payments add column gas_limit text;
alter table facilitator_payments add column may_share integer check (may_share in (0, 1));
