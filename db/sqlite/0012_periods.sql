-- Totals by the hour in which their calls were accepted, so that calls and their part of the totals go together. What was
-- counted before stands under 0.

create table invocation_counts_by_period (
  tenant text not null,
  dimension text not null,
  value text not null,
  period integer not null default 0,
  shard integer not null,
  count integer not null,
  primary key (tenant, dimension, value, period, shard)
) strict, without rowid;

insert into invocation_counts_by_period (tenant, dimension, value, shard, count)
  select tenant, dimension, value, shard, count from invocation_counts;
drop table invocation_counts;
alter table invocation_counts_by_period rename to invocation_counts;

create index invocation_counts_period on invocation_counts (period);

-- When work that one process does for all is due again.
create table turns (
  job text not null primary key,
  next_at integer not null
) strict, without rowid;

-- Keys by slots of two days, each key in those that it lives in: from 24 hours before it expires until then.
create table idempotency_keys_in_slots (
  tenant text not null,
  caller text not null,
  agent_id text not null,
  key text not null,
  body_sha256 text not null,
  invocation_id text not null,
  expires_at integer not null,
  slot integer not null,
  primary key (tenant, caller, agent_id, key, slot)
) strict, without rowid;

insert into idempotency_keys_in_slots (tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at, slot)
  select tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at, (expires_at / 3600000 - 24) / 48 * 48
  from idempotency_keys
  union
  select tenant, caller, agent_id, key, body_sha256, invocation_id, expires_at, expires_at / 3600000 / 48 * 48
  from idempotency_keys;
drop table idempotency_keys;
alter table idempotency_keys_in_slots rename to idempotency_keys;

create index idempotency_keys_slot on idempotency_keys (slot);
