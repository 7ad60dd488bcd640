-- Several certificates for one account, the gas that an account has burned on a day, the attempt that a claim belongs
-- to, and what a payer has under way.

create table facilitator_certificates (
  fingerprint text collate "C" not null primary key,
  account text collate "C" not null,
  created_at bigint not null
);

create index facilitator_certificates_account on facilitator_certificates (account);

insert into facilitator_certificates (fingerprint, account, created_at)
  select fingerprint, name, created_at from facilitator_accounts;

alter table facilitator_accounts drop column fingerprint;

alter table facilitator_days add column gas_burned text collate "C" not null default '0';

alter table facilitator_payments add column claim text collate "C" not null default '';
alter table facilitator_payments add column gas_reserved text collate "C" not null default '0';

alter table facilitator_transactions add column gas_burned text collate "C";

create index facilitator_payments_account_open on facilitator_payments (account)
  where status in ('claimed', 'sent');
create index facilitator_payments_payer_open on facilitator_payments (payer) where status in ('claimed', 'sent');
create index facilitator_payments_payer_settled on facilitator_payments (payer, block_number)
  where status = 'settled';
