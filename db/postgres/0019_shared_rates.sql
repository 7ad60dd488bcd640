-- What the replicas count together: src/storage/shared-counts.ts. Nothing waits for the disk, and yet nothing of a call that
-- was accepted is lost: what is counted stands in the log before the call.

-- The token bucket of each agent that has a rate limit and was called: src/gateway/agents/shared-buckets.ts. Half of each
-- page stays free, so that a bucket that is taken from stays on its page.
create table agent_buckets (
  tenant text collate "C" not null,
  agent_id text collate "C" not null,
  revision bigint not null,
  -- Tokens in a second, and the most that the bucket holds.
  rate double precision not null,
  depth double precision not null,
  -- What it held at filled_at, in microseconds since the epoch.
  tokens double precision not null,
  filled_at bigint not null,
  -- What the last statement took.
  granted bigint not null,
  primary key (tenant, agent_id)
) with (fillfactor = 50);

-- Callers whose rate a policy asks for: src/gateway/policy/shared-calls.ts. Times are in microseconds since the epoch.
create table caller_rates (
  tenant text collate "C" not null,
  agent_id text collate "C" not null,
  user_name text collate "C" not null,
  -- The last call.
  at bigint not null,
  -- All calls, how many of those were over a minute old at the last one, and how many the last statement added.
  counted bigint not null,
  gone bigint not null,
  added bigint not null,
  primary key (tenant, agent_id, user_name)
) with (fillfactor = 50);

-- How many calls a caller had made when, for the last minutes.
create table caller_calls (
  tenant text collate "C" not null,
  agent_id text collate "C" not null,
  user_name text collate "C" not null,
  at bigint not null,
  counted bigint not null,
  primary key (tenant, agent_id, user_name, at)
);

create index caller_calls_in_order on caller_calls (at);
