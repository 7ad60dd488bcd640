-- What `tollgate keys rotate` and `tollgate token revoke` need.

-- A tenant has several keys, numbered from 1. The newest seals; the first is what other keys are derived from, for good.
create table numbered_tenant_keys (
  tenant text not null,
  number integer not null,
  wrapped_key blob not null,
  master_key_id text not null,
  created_at integer not null,
  primary key (tenant, number)
) strict, without rowid;

insert into numbered_tenant_keys (tenant, number, wrapped_key, master_key_id, created_at)
select tenant, 1, wrapped_key, master_key_id, created_at from tenant_keys;

drop table tenant_keys;
alter table numbered_tenant_keys rename to tenant_keys;

-- Which of its tenant's keys wraps the data key of the secret.
alter table credentials add column key_number integer not null default 1;

-- One row: see src/keys/state.ts.
create table keyring (
  one integer not null primary key check (one = 1),
  version integer not null,
  master_key_id text,
  next_master_key_id text,
  is_rotating integer not null check (is_rotating in (0, 1)),
  revoked_at integer not null
) strict;

insert into keyring (one, version, master_key_id, next_master_key_id, is_rotating, revoked_at)
values (1, 1, (select min(master_key_id) from signing_keys), null, 0, 0);

-- Which master keys each gateway that runs has: see src/keys/holders.ts.
create table key_holders (
  replica text not null primary key,
  master_key_ids text not null,
  seen_version integer not null,
  lease_until integer not null
) strict, without rowid;

-- The tokens of a user that were made before this are refused; of all users of the tenant where the name is empty.
create table token_revocations (
  tenant text not null,
  user_name text not null,
  revoked_at integer not null,
  primary key (tenant, user_name)
) strict, without rowid;

create unique index token_revocations_in_order on token_revocations (revoked_at);

-- As in 0001_initial.sql: what large tables look like, read at open.
insert into sqlite_stat1 (tbl, idx, stat) values
  ('tenant_keys', 'tenant_keys', '10000 2 1'),
  ('token_revocations', 'token_revocations', '10000 10 1'),
  ('token_revocations', 'token_revocations_in_order', '10000 1');
