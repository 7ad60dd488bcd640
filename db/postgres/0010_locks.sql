-- What works lock until they end, a row for each (src/storage/row-locks.ts). Half of each page stays free, so that a lock
-- that is taken again stays on its page.
create table locks (
  key text collate "C" not null primary key,
  taken bigint not null
) with (fillfactor = 50);
