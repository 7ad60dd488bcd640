// Many agents of a tenant, made inside the database in SQL that both databases understand, with all that stands in
// lists and searches of them.
/** As they are stored. */
const TAGS = JSON.stringify(["common"], null, "\t");
const ID =
  "'agt_019a' || substr(cast(100000000 + i as text), 2, 4) || '-' || substr(cast(100000000 + i as text), 6, 4)";

/** Each has about two KiB of text; a third is pending, one of a hundred speaks MCP, and all have the tag `common`. */
export function agentsIn(tenant: string, count: number): string[] {
  const numbers = `with recursive numbers (i) as (
      select cast(0 as bigint) union all select i + 1 from numbers where i + 1 < ${count}
    ), made as (
      select '${tenant}' as tenant, ${ID} || '-7000-8000-000000000000' as id, 'agent ' || i as name,
        'needle ' || i || ' ' || replace(cast(10000000 as text), '0', '${"hay ".repeat(72)}') as description,
        case when i % 3 = 0 then 'pending' else 'active' end as status,
        case when i % 100 in (1, 3) then 'mcp' else 'http' end as protocol
      from numbers
    )`;
  const listed = `${numbers}, lists (status, protocol, tag) as (
      select s.list, p.list, t.tag from (select 'own' as list union select 'live') as s
        cross join (select 'own' as list union select 'any') as p
        cross join (select '' as tag union select '/common') as t
    )`;
  return [
    `insert into agents (tenant, id, name, description, tags, metadata, upstream_url, suspended, rate_revision,
       emit_receipts, capture_body, protocol, mcp_transport, created_by, created_at, updated_at)
     ${numbers} select tenant, id, name, description, '${TAGS}', '{}',
       case when status = 'active' then 'https://example.com/' end, false, 0, false, true, protocol,
       case when protocol = 'mcp' then 'streamable_http' end, 'somebody', 1763700000000, 1763700000000 from made`,
    `insert into agent_search (tenant, inactive, id, status, protocol, size, tags, text)
     ${numbers} select tenant, false, id, status, protocol, length(description), '${TAGS}',
       upper(name || description) from made`,
    `insert into agent_lists (tenant, list, id)
     ${listed} select tenant, case when lists.status = 'own' then made.status else 'live' end || '/' ||
       case when lists.protocol = 'own' then made.protocol else 'any' end || tag, id
     from made cross join lists`,
    `insert into catalog_totals (tenant, list, count)
     select tenant, list, count(*) from agent_lists where tenant = '${tenant}' group by tenant, list`,
  ];
}
