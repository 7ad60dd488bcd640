-- Rows that go by age are laid out by time (src/storage/partitions), so that what is too old is dropped in whole partitions.
-- The tables as they were become the first partitions, with the indexes that they have. Nothing is moved or read.

-- Totals by the hour in which their calls were accepted, so that calls and their part of the totals go together. What was
-- counted before stands under 0.
alter table invocation_counts add column period bigint not null default 0;
alter table invocation_counts drop constraint invocation_counts_pkey;
alter table invocation_counts add primary key (tenant, dimension, value, period, shard);
create index invocation_counts_period on invocation_counts (period);

-- When work that one replica does for all is due again.
create table turns (
  job text collate "C" not null primary key,
  next_at bigint not null
);

drop view invocations;

alter table ended_invocations rename to ended_invocations_0;
create table ended_invocations (like ended_invocations_0 including all) partition by range (id);
alter table ended_invocations
  alter column agent_id set statistics 0,
  alter column status set statistics 0,
  alter column mode set statistics 0,
  alter column settlement_status set statistics 0,
  alter column error_class set statistics 0,
  alter column model set statistics 0;
alter table ended_invocations attach partition ended_invocations_0 for values from (minvalue) to (maxvalue);

alter table invocation_bodies rename to invocation_bodies_0;
create table invocation_bodies (like invocation_bodies_0 including all) partition by range (invocation_id);
alter table invocation_bodies attach partition invocation_bodies_0 for values from (minvalue) to (maxvalue);

alter table policy_decisions rename to policy_decisions_0;
create table policy_decisions (like policy_decisions_0 including all) partition by range (id);
alter table policy_decisions attach partition policy_decisions_0 for values from (minvalue) to (maxvalue);

-- The place in the chain is unique in each partition, and in all of them by the chain's head, which each addition moves.
alter table receipts rename to receipts_0;
create table receipts (like receipts_0 including all excluding indexes) partition by range (invocation_id);
create unique index on receipts (tenant, invocation_id);
alter table receipts attach partition receipts_0 for values from (minvalue) to (maxvalue);

create view invocations as
select tenant, id, agent_id, caller, mode, status,
  null::text collate "C" as error_class, model, mcp_method, mcp_tool, payment_network, payment_asset, payment_amount, payment_payer,
  payment_nonce, settlement_status, settlement, null::bigint as upstream_status, null::bigint as latency_ms, null::bigint as ttft_ms, req_size,
  null::bigint as resp_size, req_sha256, null::text collate "C" as resp_sha256, null::text collate "C" as response_content_type,
  false as response_truncated, body_captured, emit_receipt, owner, accepted_by, claim, updated_at,
  null::bigint as completed_at
from open_invocations
union all
select tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, payment_network,
  payment_asset, payment_amount, payment_payer, payment_nonce, settlement_status, settlement, upstream_status, latency_ms,
  ttft_ms, req_size, resp_size, req_sha256, resp_sha256, response_content_type, response_truncated, body_captured,
  emit_receipt, owner, accepted_by, claim, updated_at, completed_at
from ended_invocations;

-- Keys by slots of two days, each key in those that it lives in: from 24 hours before it expires until then.
alter table idempotency_keys rename to idempotency_keys_without_slots;
create table idempotency_keys (
  tenant text collate "C" not null,
  caller text collate "C" not null,
  agent_id text collate "C" not null,
  key text collate "C" not null,
  body_sha256 text collate "C" not null,
  invocation_id text collate "C" not null,
  expires_at bigint not null,
  slot bigint not null,
  primary key (tenant, caller, agent_id, key, slot)
) partition by range (slot);
create table idempotency_keys_0 partition of idempotency_keys for values from (minvalue) to (maxvalue);

insert into idempotency_keys (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at, slot)
  select tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at, slot
  from idempotency_keys_without_slots, generate_series(
    (expires_at / 3600000 - 24) / 48 * 48, expires_at / 3600000 / 48 * 48, 48) as slot;
drop table idempotency_keys_without_slots;
