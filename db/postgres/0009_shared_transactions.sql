-- The payments of a transaction that makes several of them (TOLLGATE_BATCH). One that makes a single payment names it
-- in its own row.

create table facilitator_transaction_payments (
  hash text collate "C" not null,
  payer text collate "C" not null,
  nonce text collate "C" not null,
  gas text collate "C" not null,
  gas_burned text collate "C",
  primary key (hash, payer, nonce)
);

create index facilitator_transaction_payments_payment on facilitator_transaction_payments (payer, nonce);
