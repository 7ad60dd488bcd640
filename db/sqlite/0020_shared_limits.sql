-- What replicas on Postgres share. Here there is one process, which asks nobody: nothing is written to these.

alter table replicas add column agent_base integer;

create table agent_places (
  agent_id text not null,
  mode text not null,
  replica text not null,
  tenant text not null,
  granted integer not null,
  wanted integer not null,
  primary key (agent_id, mode, replica)
) strict, without rowid;

create index agent_places_replica on agent_places (replica);

-- Who does the work, where one goes on with it until it stops; null where it goes to whoever asks first.
alter table turns add column holder text;
