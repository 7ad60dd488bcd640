-- Several certificates for one account, the gas that an account has burned on a day, the attempt that a claim belongs
-- to, and what a payer has under way.

create table facilitator_certificates (
  fingerprint text not null primary key,
  account text not null,
  created_at integer not null
) strict, without rowid;

create index facilitator_certificates_account on facilitator_certificates (account);

insert into facilitator_certificates (fingerprint, account, created_at)
  select fingerprint, name, created_at from facilitator_accounts;

-- SQLite drops no column that is unique.
alter table facilitator_accounts rename to facilitator_accounts_before;
create table facilitator_accounts (
  name text not null primary key,
  enabled integer not null check (enabled in (0, 1)),
  max_per_transaction text,
  daily_ceiling text,
  created_at integer not null,
  updated_at integer not null
) strict, without rowid;
insert into facilitator_accounts (name, enabled, max_per_transaction, daily_ceiling, created_at, updated_at)
  select name, enabled, max_per_transaction, daily_ceiling, created_at, updated_at from facilitator_accounts_before;
drop table facilitator_accounts_before;

alter table facilitator_days add column gas_burned text not null default '0';

alter table facilitator_payments add column claim text not null default '';
alter table facilitator_payments add column gas_reserved text not null default '0';

alter table facilitator_transactions add column gas_burned text;

create index facilitator_payments_account_open on facilitator_payments (account)
  where status in ('claimed', 'sent');
create index facilitator_payments_payer_open on facilitator_payments (payer) where status in ('claimed', 'sent');
create index facilitator_payments_payer_settled on facilitator_payments (payer, block_number)
  where status = 'settled';
