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

-- The large requests of open calls move; those of ended calls stay where they are, and are read there.
with recursive parts (tenant, invocation_id, n, length) as (
  select b.tenant, b.invocation_id, 0, length(b.request)
  from open_invocations o
    cross join invocation_bodies b on b.tenant = o.tenant and b.invocation_id = o.id
  where o.request is null and b.request is not null
  union all
  select tenant, invocation_id, n + 1, length from parts where (n + 1) * 524288 < length
)
insert into body_parts (invocation_id, tenant, kind, n, bytes)
select p.invocation_id, p.tenant, 'request', p.n, substr(b.request, p.n * 524288 + 1, 524288)
from parts p
  cross join invocation_bodies b on b.tenant = p.tenant and b.invocation_id = p.invocation_id;

delete from invocation_bodies where (tenant, invocation_id) in
  (select tenant, id from open_invocations where request is null);

-- As in 0001_initial.sql: what a large table looks like, read at open.
insert into sqlite_stat1 (tbl, idx, stat) values
  ('body_parts', 'body_parts', '100000 4 2 1'),
  ('loose_parts', 'loose_parts', '1000 1 1');
