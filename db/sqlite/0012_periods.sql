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
