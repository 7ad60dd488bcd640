-- Trust receipts: which ended calls are still owed one, the receipts in the order of each tenant's chain, and the
-- newest of each chain, which the next one refers to.

-- Of the whole bodies, in lower hex; only where a receipt will say them.
alter table invocations add column req_sha256 text;
alter table invocations add column resp_sha256 text;

create table receipts_due (
  tenant text not null,
  invocation_id text not null,
  primary key (tenant, invocation_id)
) strict, without rowid;

create table receipt_chains (
  tenant text not null primary key,
  sequence integer not null check (sequence >= 1),
  sha256 text not null
) strict, without rowid;

-- With a rowid: a row is too large to stand well in a tree of keys.
create table receipts (
  tenant text not null,
  sequence integer not null check (sequence >= 1),
  id text not null,
  invocation_id text not null,
  jws text not null,
  primary key (tenant, sequence)
) strict;

create unique index receipts_invocation on receipts (tenant, invocation_id);
