-- Claims that belong to one attempt, what is known of each attempt to settle a payment, and calls whose caller was
-- told that they were not taken while nobody could say whether they had been stored.

-- The replica that accepted the call, which the others leave a young one to; null where there are no others.
alter table invocations add column accepted_by text;

-- A new token with each claim; it stays when the call has ended, and is null for a call that was never claimed.
alter table invocations add column claim text;

-- Attempts of which certainly nothing left the gateway.
alter table payments add column unsent_attempts integer not null default 0;
-- Written right before an attempt is dialled: null as long as certainly nothing of the payment has left the gateway.
alter table payments add column sent_at integer;
update payments set sent_at = created_at where next_attempt_at is not null;
-- For how long the facilitator has been asked since the outcome became unknown.
alter table payments add column asked_ms integer not null default 0;
-- The upstream's credential of a paid call that has not ended: it can't be deleted so long.
alter table payments add column call_credential_ref text;
create index payments_call_credential on payments (tenant, call_credential_ref)
  where call_credential_ref is not null;

create table refused_calls (
  tenant text not null,
  id text not null,
  claim text,
  created_at integer not null,
  primary key (tenant, id)
) strict, without rowid;
