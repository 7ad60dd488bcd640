-- What `tollgate keys rotate` and `tollgate token revoke` need.

-- A tenant has several keys, numbered from 1. The newest seals; the first is what other keys are derived from, for good.
-- An earlier gateway that still runs goes on making first keys.
alter table tenant_keys add column number bigint not null default 1;
alter table tenant_keys drop constraint tenant_keys_pkey;
alter table tenant_keys add primary key (tenant, number);

-- Which of its tenant's keys wraps the data key of the secret.
alter table credentials add column key_number bigint not null default 1;

-- One row: see src/keys/state.ts.
create table keyring (
  one integer not null primary key check (one = 1),
  version bigint not null,
  master_key_id text collate "C",
  next_master_key_id text collate "C",
  is_rotating boolean not null,
  revoked_at bigint not null
);

insert into keyring (one, version, master_key_id, next_master_key_id, is_rotating, revoked_at)
values (1, 1, (select min(master_key_id) from signing_keys), null, false, 0);

-- Which master keys each gateway that runs has: see src/keys/holders.ts.
create table key_holders (
  replica text collate "C" not null primary key,
  master_key_ids text collate "C" not null,
  seen_version bigint not null,
  lease_until bigint not null
);

-- The tokens of a user that were made before this are refused; of all users of the tenant where the name is empty.
create table token_revocations (
  tenant text collate "C" not null,
  user_name text collate "C" not null,
  revoked_at bigint not null,
  primary key (tenant, user_name)
);

create unique index token_revocations_in_order on token_revocations (revoked_at);
