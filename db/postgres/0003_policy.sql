-- The policy of each tenant, and its decisions, as in ../sqlite.

create table policies (
  tenant text collate "C" not null primary key,
  version bigint not null check (version >= 1),
  default_action text collate "C" not null check (default_action in ('allow', 'warn', 'deny')),
  on_error text collate "C" not null check (on_error in ('allow', 'warn', 'deny')),
  rules text collate "C" not null,
  updated_at bigint not null
);

create table policy_decisions (
  tenant text collate "C" not null,
  id text collate "C" not null,
  agent_id text collate "C" not null,
  protocol text collate "C" not null check (protocol in ('http', 'mcp')),
  mcp_tool text collate "C",
  action text collate "C" not null check (action in ('allow', 'warn', 'deny')),
  matched_rule bigint check (matched_rule >= 1),
  reason text collate "C" not null,
  primary key (tenant, id)
);
