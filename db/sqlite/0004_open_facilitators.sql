-- Leads from one facilitator of a credential's open payments to the next, however many payments each has. The first 300
-- characters of a URL hold its host; Postgres refuses the index whole URLs, which may have 6 KB.
drop index payments_credential;
create index payments_credential on payments (tenant, facilitator_credential_ref, substr(facilitator_url, 1, 300))
  where next_attempt_at is not null and final_at is null;
