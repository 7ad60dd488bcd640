-- What all transactions of an account cost on a day, and which payments reverted on which day: their payers are refused
-- first. The other indexes find what is old enough to be removed.
alter table facilitator_days add column gas_used text not null default '0';
alter table facilitator_payments add column gas_held text not null default '0';
alter table facilitator_payments add column reverted_on text;

create index facilitator_payments_reverted on facilitator_payments (payer, reverted_on) where reverted_on is not null;
create index facilitator_payments_ended on facilitator_payments (ended_at) where ended_at is not null;
create index facilitator_transactions_created on facilitator_transactions (created_at);
