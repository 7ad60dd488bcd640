-- Pages and totals of the lists of agents that cost the same however many agents there are, what a search reads, and
-- how many agents and credentials a tenant has, so that their number has a bound.

-- What is counted of a tenant, exactly: 'credentials', and each list of agents.
create table catalog_totals (
  tenant text collate "C" not null,
  list text collate "C" not null,
  count bigint not null,
  primary key (tenant, list)
);

-- An agent stands in a list for each answer to "which status, protocol and tag": 'active/http', 'active/any' and, unless
-- it is inactive, 'live/http' and 'live/any', and in the same with each of its tags ('live/any/red').
create table agent_lists (
  tenant text collate "C" not null,
  list text collate "C" not null,
  id text collate "C" not null
);

-- All that a search looks at, apart from the rest of the agent, and the inactive ones apart from the others.
create table agent_search (
  tenant text collate "C" not null,
  inactive boolean not null,
  id text collate "C" not null,
  status text collate "C" not null check (status in ('pending', 'active', 'inactive')),
  protocol text collate "C" not null check (protocol in ('http', 'mcp')),
  size bigint not null,
  tags text collate "C",
  text text collate "C" not null,
  primary key (tenant, inactive, id)
);

insert into agent_search (tenant, inactive, id, status, protocol, size, tags, text)
  select tenant, deleted_at is not null, id,
    case when deleted_at is not null then 'inactive' when upstream_url is null then 'pending' else 'active' end,
    protocol, octet_length(search_text) + coalesce(octet_length(tags), 0), tags, search_text
  from agents;
alter table agents drop column search_text;

insert into agent_lists (tenant, list, id)
  with statuses (status, listed) as (
      values ('active', 'active'), ('active', 'live'), ('pending', 'pending'), ('pending', 'live'),
        ('inactive', 'inactive')
    ),
    protocols (protocol, listed) as (values ('http', 'http'), ('http', 'any'), ('mcp', 'mcp'), ('mcp', 'any'))
  select a.tenant, s.listed || '/' || p.listed || t.tag, a.id
  from agent_search as a
    join statuses as s on s.status = a.status
    join protocols as p on p.protocol = a.protocol
    cross join lateral (
      select '' union select '/' || value from jsonb_array_elements_text(a.tags::jsonb) as tags (value)
    ) as t (tag);
-- Made of all the rows at once: growing it row by row took most of the time that 20,000 agents of 32 tags take.
alter table agent_lists add primary key (tenant, list, id);

insert into catalog_totals (tenant, list, count) select tenant, list, count(*) from agent_lists group by tenant, list;
insert into catalog_totals (tenant, list, count) select tenant, 'credentials', count(*) from credentials group by tenant;
