-- When the facilitator said that a payment was collected. Until the payment is final it is asked about once more, since a
-- reorganisation may collect it in another transaction.
alter table payments add column settled_at bigint;
