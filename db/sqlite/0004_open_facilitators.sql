-- Leads from one facilitator of a credential's open payments to the next, however many payments each has.
drop index payments_credential;
create index payments_credential on payments (tenant, facilitator_credential_ref, facilitator_url)
  where next_attempt_at is not null and final_at is null;
