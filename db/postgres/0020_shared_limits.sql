-- What replicas share: places to run an agent's calls, and work that one of them does for all.

-- The calls of any one agent and path that the replica may run without asking; null for one that is gone, or of a version
-- that shares no limits.
alter table replicas add column agent_base bigint;

-- What replicas have been granted beyond that: see src/gateway/replicas/places.ts.
create table agent_places (
  agent_id text collate "C" not null,
  mode text collate "C" not null,
  replica text collate "C" not null,
  tenant text collate "C" not null,
  granted bigint not null,
  wanted bigint not null,
  primary key (agent_id, mode, replica)
);

create index agent_places_replica on agent_places (replica);

-- Who does the work, where one goes on with it until it stops; null where it goes to whoever asks first.
alter table turns add column holder text collate "C";
