-- Large bodies stand in parts, each written once and in order of arrival, so that no statement carries a whole one.

create table body_parts (
  invocation_id text collate "C" not null,
  tenant text collate "C" not null,
  kind text collate "C" not null check (kind in ('request', 'response')),
  n bigint not null,
  bytes bytea not null,
  primary key (invocation_id, kind, n)
) partition by range (invocation_id);
create table body_parts_0 partition of body_parts for values from (minvalue) to (maxvalue);

alter table body_parts alter column bytes set storage external;

-- Bodies of which parts are to be removed, from the part `first` on; none of them before `due_at`.
create table loose_parts (
  invocation_id text collate "C" not null,
  tenant text collate "C" not null,
  kind text collate "C" not null check (kind in ('request', 'response')),
  first bigint not null,
  due_at bigint not null,
  primary key (invocation_id, kind)
);

-- The large requests of open calls move; those of ended calls stay where they are, and are read there.
lock table open_invocations, invocation_bodies in access exclusive mode;
set local enable_seqscan = off;
set local enable_hashjoin = off;
set local enable_mergejoin = off;

insert into body_parts (invocation_id, tenant, kind, n, bytes)
select o.id, o.tenant, 'request', part.n, substr(b.request, part.n * 524288 + 1, 524288)
from open_invocations o
  join invocation_bodies b on b.tenant = o.tenant and b.invocation_id = o.id
  cross join lateral generate_series(0, greatest(length(b.request) - 1, 0) / 524288) as part (n)
where o.request is null and b.request is not null;

delete from invocation_bodies b using open_invocations o
where b.tenant = o.tenant and b.invocation_id = o.id and o.request is null;
set local enable_seqscan to default;
set local enable_hashjoin to default;
set local enable_mergejoin to default;
