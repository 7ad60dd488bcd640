-- Large bodies stand in parts, each written once and in order of arrival, so that no statement carries a whole one.

create table body_parts (
  invocation_id text not null,
  tenant text not null,
  kind text not null check (kind in ('request', 'response')),
  n integer not null,
  bytes blob not null,
  primary key (invocation_id, kind, n)
) strict, without rowid;

-- Bodies of which parts are to be removed, from the part `first` on; none of them before `due_at`.
create table loose_parts (
  invocation_id text not null,
  tenant text not null,
  kind text not null check (kind in ('request', 'response')),
  first integer not null,
  due_at integer not null,
  primary key (invocation_id, kind)
) strict, without rowid;

-- The large requests of open calls move; those of ended calls stay where they are, and are read there. They go by way of a
-- table with row IDs, since SQLite reads a value once for all its parts there: 1.5 s instead of 10 for 32 MiB on a busy machine (measured).
create table moved_requests (invocation_id text not null, tenant text not null, request blob not null) strict;

insert into moved_requests (invocation_id, tenant, request)
select b.invocation_id, b.tenant, b.request
from open_invocations o
  cross join invocation_bodies b on b.tenant = o.tenant and b.invocation_id = o.id
where o.request is null and b.request is not null;

with recursive parts (n) as (select 0 union all select n + 1 from parts where n < 63)
insert into body_parts (invocation_id, tenant, kind, n, bytes)
select m.invocation_id, m.tenant, 'request', p.n, substr(m.request, p.n * 524288 + 1, 524288)
from moved_requests m cross join parts p on p.n * 524288 < length(m.request);

drop table moved_requests;

delete from invocation_bodies where (tenant, invocation_id) in
  (select tenant, id from open_invocations where request is null);

-- As in 0001_initial.sql: what a large table looks like, read at open.
insert into sqlite_stat1 (tbl, idx, stat) values
  ('body_parts', 'body_parts', '100000 4 2 1'),
  ('loose_parts', 'loose_parts', '1000 1 1');
