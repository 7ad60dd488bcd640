-- The payments of a transaction that makes several of them (TOLLGATE_BATCH). One that makes a single payment names it
-- in its own row.

create table facilitator_transaction_payments (
  hash text not null,
  payer text not null,
  nonce text not null,
  gas text not null,
  gas_burned text,
  primary key (hash, payer, nonce)
) strict, without rowid;

create index facilitator_transaction_payments_payment on facilitator_transaction_payments (payer, nonce);
