-- The oldest program that may run on a database of this version, told by the newest version that it knows: see
-- src/storage/schema-versions.ts. Null where nobody said so: only those that know the version may.
alter table schema_migrations add column floor integer;
