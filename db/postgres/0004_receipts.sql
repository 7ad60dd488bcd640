-- Trust receipts, as in ../sqlite.

alter table invocations add column req_sha256 text collate "C";
alter table invocations add column resp_sha256 text collate "C";

create table receipts_due (
  tenant text collate "C" not null,
  invocation_id text collate "C" not null,
  primary key (tenant, invocation_id)
);

create table receipt_chains (
  tenant text collate "C" not null primary key,
  sequence bigint not null check (sequence >= 1),
  sha256 text collate "C" not null
);

create table receipts (
  tenant text collate "C" not null,
  sequence bigint not null check (sequence >= 1),
  id text collate "C" not null,
  invocation_id text collate "C" not null,
  jws text collate "C" not null,
  primary key (tenant, sequence)
);

create unique index receipts_invocation on receipts (tenant, invocation_id);
