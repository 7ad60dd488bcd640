-- The policy of each tenant, and its decisions: found by their key, newest first.

create table policies (
  tenant text not null primary key,
  version integer not null check (version >= 1),
  default_action text not null check (default_action in ('allow', 'warn', 'deny')),
  on_error text not null check (on_error in ('allow', 'warn', 'deny')),
  rules text not null,
  updated_at integer not null
) strict, without rowid;

create table policy_decisions (
  tenant text not null,
  id text not null,
  agent_id text not null,
  protocol text not null check (protocol in ('http', 'mcp')),
  mcp_tool text,
  action text not null check (action in ('allow', 'warn', 'deny')),
  matched_rule integer check (matched_rule >= 1),
  reason text not null,
  primary key (tenant, id)
) strict, without rowid;
