-- When this database was last restored to an older state, in one row at most: see src/storage/restoration.ts.
create table restoration (
  one integer not null primary key check (one = 1),
  restored_at integer not null,
  is_done integer not null check (is_done in (0, 1))
) strict;
