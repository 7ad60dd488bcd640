-- Leads from one facilitator of a credential's open payments to the next, however many payments each has. The first 300
-- characters of a URL hold its host. Postgres can't index a whole URL, which may have 6 KB.
drop index payments_credential;
create index payments_credential on payments (tenant, facilitator_credential_ref, substr(facilitator_url, 1, 300))
  where settle_request is not null and final_at is null;

-- Leads from one tenant with open payments to the next, and from one of its facilitators to the next, each with its earliest
-- payment first. So the payments that wait for one facilitator, however many, hold up none at another.
drop index payments_due;
create index payments_due on payments (tenant, substr(facilitator_url, 1, 300), next_attempt_at)
  where next_attempt_at is not null;

-- What a request for receipts looks at: collected payments that await their confirmation.
create index payments_confirming on payments (tenant, invocation_id) where next_attempt_at is not null and final_at is not null;

-- The uses of a credential are read page by page in the order of their IDs, so both indexes lead to a page and give the order.
drop index payments_call_credential;
create index payments_call_credential on payments (tenant, call_credential_ref, invocation_id)
  where call_credential_ref is not null;
drop index agents_live_credential;
create index agents_live_credential on agents (tenant, credential_ref, id)
  where credential_ref is not null and deleted_at is null;
-- A tenant may have many agents, so SQLite must not take the key's order for the shorter way.
insert into sqlite_stat1 (tbl, idx, stat) values
  ('agents', 'agents', '10000 1000 1'),
  ('agents', 'agents_live_credential', '10000 1000 10 1');
analyze sqlite_schema;
