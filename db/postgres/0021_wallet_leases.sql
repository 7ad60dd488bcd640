-- Wallets are leased to one facilitator at a time: see src/facilitator/wallet/leases.ts. An earlier version that still runs
-- knows of no lease. It claims without a wallet, and signs with any: the unique nonces keep both from harm.

create table facilitators (
  id text collate "C" not null primary key,
  wallets text collate "C" not null,
  is_able boolean not null,
  lease_until bigint not null
);

create table facilitator_wallets (
  wallet text collate "C" not null primary key,
  holder text collate "C" not null,
  token bigint not null
);

-- Whose holder is to send it, and as it was simulated.
alter table facilitator_payments add column wallet text collate "C";
alter table facilitator_payments add column gas_limit text collate "C";
alter table facilitator_payments add column may_share boolean;
