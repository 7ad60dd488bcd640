// A long history made inside the database, in SQL that both databases understand: several agents and models, few
// failures, and settlements that are rarer still, so that every filter has values that are common and rare.

/** The columns that history filters by, and the totals that are kept of each. */
const DIMENSIONS = {
  agent: "agent_id",
  status: "status",
  mode: "mode",
  error_class: "error_class",
  model: "model",
  settlement: "settlement_status",
};

const agentId = (last: string) => `agt_019a0000-0000-7000-8000-0000000000${last}`;

/** Common, less common and rare values of each filter, as the parameters of a request name it. */
export const FILTERS = {
  agent_id: [agentId("00"), agentId("07"), agentId("99")],
  status: ["succeeded", "failed", "pending"],
  mode: ["transactional", "streaming"],
  error_class: ["upstream_4xx", "upstream_5xx", "timeout"],
  model: ["m-0", "m-7", "m-rare"],
  settlement: ["settled", "settled_upstream_failed", "settlement_failed", "pending"],
} as const satisfies Readonly<Record<string, readonly string[]>>;

/** Of so many calls one has the rare agent, model or failure. */
const RARE = 2_003;

// Digits only, and in the order of i: they are as good as hex. The numbers n and m look random beside i.
const ROWS = `
  with recursive numbers (i) as (select cast(1 as bigint) union all select i + 1 from numbers where i < :count),
    mixed as (select i, (i * 48271) % 65537 % 1000 as n, (i * 69621 + 7) % 99991 % 1000 as m from numbers),
    kinds as (select mixed.*,
      case when i % :open = 4 then 'pending' when m < 920 then 'succeeded' else 'failed' end as status
      from mixed)
  select ':tenant',
    'inv_019a' || substr(cast(100000000 + i as text), 2, 4) || '-' || substr(cast(100000000 + i as text), 6, 4)
      || '-7000-8000-:node',
    '${agentId("")}' || case when i % ${RARE} = 1 then '99' when n < 500 then '00'
      else substr(cast(100 + n % 20 as text), 2) end,
    'somebody',
    case when status <> 'pending' and m % 10 = 3 then 'streaming' else 'transactional' end,
    status,
    case when status <> 'failed' then null when i % 97 = 0 then 'timeout' when m < 970 then 'upstream_4xx'
      else 'upstream_5xx' end,
    case when i % ${RARE} = 2 then 'm-rare' when n < 300 then null when n < 700 then 'm-0'
      else 'm-' || cast(m % 30 as text) end,
    case when status = 'pending' then 'pending' when i % ${RARE} = 3 then 'settlement_failed'
      when n % 10 <> 1 then null when status = 'failed' then 'settled_upstream_failed' else 'settled' end,
    case when status = 'pending' then null else 200 end,
    case when status = 'pending' then null else 42 end,
    280, 1200, 'application/json', false, false, null, 1763700000000,
    case when status = 'pending' then null else 1763700000042 end
  from kinds`;

/** The last digits of the IDs of a tenant's calls: no two tenants have the same. */
const nodeOf = (tenant: string) => String(Bun.hash.crc32(tenant)).padStart(12, "0");

/** The statements that put `count` calls of `tenant`, who has none yet and of whom one of so many is open, into the history and its totals. */
export function longHistory(tenant: string, count: number, oneOpenOf = RARE): string[] {
  const rows = ROWS.replaceAll(":tenant", tenant)
    .replaceAll(":count", String(count))
    .replace(":node", nodeOf(tenant))
    .replace(":open", String(oneOpenOf));
  const columns = `tenant, id, agent_id, caller, mode, status, error_class, model, settlement_status,
    upstream_status, latency_ms, req_size, resp_size, response_content_type, response_truncated,
    body_captured, outbox, updated_at, completed_at`;
  const openColumns = `tenant, id, agent_id, caller, mode, status, model, settlement_status, req_size, body_captured,
    outbox, updated_at`;
  const calls = `with calls (${columns}) as (${rows})`;
  const totals = Object.entries({ all: "''", ...DIMENSIONS }).map(
    ([dimension, column]) =>
      `insert into invocation_counts (tenant, dimension, value, shard, count)
       select tenant, '${dimension}', ${column}, 0, count(*) from ended_invocations
       where tenant = '${tenant}' and ${column} is not null group by 1, 2, 3, 4`,
  );
  return [
    `insert into open_invocations (${openColumns}, call)
     ${calls} select ${openColumns}, '{}' from calls where status = 'pending'`,
    `insert into ended_invocations (${columns}) ${calls} select ${columns} from calls where status <> 'pending'`,
    ...totals,
  ];
}
