-- Parts of bodies in a table with row IDs. Without them a part is an entry of the key's tree, and SQLite reads all of an
-- entry to compare its key with another: to find one of 1,200 parts took 1.8 ms, as it read some of the others for it, and
-- to store two took 3.1. With row IDs 0.01 and 0.4 (measured), and however many there are.

create table body_rows (
  invocation_id text not null,
  tenant text not null,
  kind text not null check (kind in ('request', 'response')),
  n integer not null,
  bytes blob not null,
  primary key (invocation_id, kind, n)
) strict;

insert into body_rows (invocation_id, tenant, kind, n, bytes)
select invocation_id, tenant, kind, n, bytes from body_parts order by invocation_id, kind, n;

drop table body_parts;
alter table body_rows rename to body_parts;

-- As in 0001_initial.sql: what a large table looks like, read at open.
delete from sqlite_stat1 where tbl in ('body_parts', 'body_rows');
insert into sqlite_stat1 (tbl, idx, stat) values
  ('body_parts', 'sqlite_autoindex_body_parts_1', '100000 4 2 1');
