-- When this database was last restored to an older state, in one row at most: see src/storage/restoration.ts.
create table restoration (
  one integer not null primary key check (one = 1),
  restored_at bigint not null,
  is_done boolean not null
);
