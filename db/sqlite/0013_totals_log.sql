-- Totals of many tenants, written by groups.

-- Additions to the totals of the history, one row for each group of writes: src/storage/sqlite-totals.ts.
create table count_additions (
  id integer not null primary key,
  -- Whether it takes back what has been moved into invocation_counts from the rows before it.
  is_moved integer not null check (is_moved in (0, 1)),
  -- JSON: for each tenant and period [tenant, period, dimension, value, delta, dimension, value, delta, …].
  additions text not null
) strict;
