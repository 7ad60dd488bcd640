// The queue of pending calls: which agents have calls waiting, how the calls are taken, and how many wait. Taking a call claims
// it with a token, and only the holder of the token makes the call.
//
// One command takes as many calls of an agent as the agent has free slots, the oldest first. It skips calls that another replica
// is taking at the same moment, so that replicas share a backlog instead of all competing for its oldest calls.
import { and, min, type SQL, sql } from "drizzle-orm";
import { idFloor, idTime } from "../../../core/id.ts";
import type { QueueSize } from "../../../core/meters.ts";
import { INVOCATION_EVENTS } from "../../../core/states.ts";
import type { Command, Reader, SqliteStatement, Store } from "../../../storage/store.ts";
import { FOR_ALL, inputRows } from "../../../storage/store.ts";

/** For so long only the replica that accepted a call may take it: that replica may refuse a call if its commit got no answer. */
export const YOUNG_MS = 15_000;

/** The lowest ID of the young calls: those that only the replica which accepted them may take. */
const youngFrom = (now: number): string => idFloor("inv", now - YOUNG_MS);

/**
 * SQL: whether a row `c` of the open calls may be taken. Streaming calls are left out, since only their caller starts them. A
 * call waits until its payment's outcome is known. The first line must match the condition of the partial index.
 * @param replica SQL of the replica that takes
 * @param young SQL of the lowest ID of the young calls
 */
const isQueued = (replica: string, young: string) =>
  `c.status = 'pending' and c.mode = 'transactional' and coalesce(c.settlement_status, '') <> 'pending'
   and (c.accepted_by is null or c.accepted_by = ${replica} or c.id < ${young}
     or c.accepted_by not in (select id from processes))`;

interface WaitingAgent {
  readonly tenant: string;
  readonly agent_id: string;
}

interface AgentsQuery {
  readonly replica: string;
  /** By the database's clock. */
  readonly now: number;
  /** Only agents with IDs above this one. */
  readonly after: string;
  readonly limit: number;
}

const QUEUED = isQueued("$1", "$2");
const nextAfter = (agent: string) =>
  `select c.agent_id from open_invocations c where ${QUEUED} and c.agent_id > ${agent} order by c.agent_id limit 1`;
/** Takes one index seek for each agent, however many calls the agent has. */
const AGENTS = `
with recursive seen (agent_id, depth) as (
  select (${nextAfter("$3")}), 1
  union all select (${nextAfter("seen.agent_id")}), depth + 1 from seen where agent_id is not null and depth < $4
)
select agent_id, (select c.tenant from open_invocations c where c.agent_id = seen.agent_id and ${QUEUED} order by c.id limit 1) as tenant
from seen where agent_id is not null`;

const valuesOf = ({ replica, now, after, limit }: AgentsQuery) => [replica, youngFrom(now), after, limit];

/** The agents with calls that this replica may take, by ID. */
export const waitingAgents: Command<AgentsQuery, readonly WaitingAgent[]> = {
  name: "waiting_agents",
  kind: "look_up",
  tenantOf: () => FOR_ALL,
  bytesOf: () => 128,
  // The statement answers one query at a time.
  keyOf: () => "all",
  sqlite(prepare) {
    const find = prepare(
      `select json_group_array(json_object('tenant', tenant, 'agent_id', agent_id)) as agents
       from (${AGENTS.replace(/\$(\d)/g, "?$1")})`,
    );
    return (query) => byId(JSON.parse(String(find.get(...valuesOf(query))?.["agents"])) as WaitingAgent[]);
  },
  postgres: {
    text: AGENTS,
    valuesOf: ([query]) => (query === undefined ? [] : valuesOf(query)),
    outputsOf: (_queries, rows) => [byId(rows as unknown as WaitingAgent[])],
  },
};

const byId = (agents: readonly WaitingAgent[]) => agents.toSorted((a, b) => (a.agent_id < b.agent_id ? -1 : 1));

const RUNS_AS = INVOCATION_EVENTS.claim.to;

export interface Taking {
  readonly tenant: string;
  readonly agent_id: string;
  readonly owner: string;
  /** One token for each call that may be taken: each claim is an attempt of its own. */
  readonly tokens: readonly string[];
  readonly now: number;
  /**
   * Only calls with IDs above this one. Postgres keeps dead rows of taken calls as long as the oldest snapshot, and would scan
   * all of them each time (measured with a snapshot held open: 20 µs more for each call after 4,000).
   */
  readonly after: string;
  readonly leftOut: readonly string[];
}

export interface TakenCall {
  readonly id: string;
  readonly token: string;
  /** JSON of the call. */
  readonly call: string;
  readonly body: Uint8Array;
}

export interface TakenCalls {
  /** The oldest first. */
  readonly taken: readonly TakenCall[];
  /** The next call, not taken since it is in parts or `taken` is large enough. Later calls wait until it is taken. */
  readonly large: { readonly id: string; readonly body_bytes: number } | null;
}

/** The approximate size of a row without its body, which may have eight times as much. */
const ROW_BYTES = 1_024;

/**
 * No more calls are taken after this many bytes: forty blocks of 64 calls with 24 KB each held the event loop for 28 ms on
 * SQLite (measured), and on Postgres one statement returns the blocks of many agents.
 */
const BLOCK_BYTES_MAX = 128 * 1024;

const TAKE_INPUT = inputRows<Taking>({
  tenant: ["text", ({ tenant }) => tenant],
  agent_id: ["text", ({ agent_id }) => agent_id],
  owner: ["text", ({ owner }) => owner],
  tokens: ["text", ({ tokens }) => tokens.join()],
  slots: ["bigint", ({ tokens }) => tokens.length],
  at: ["bigint", ({ now }) => now],
  young: ["text", ({ now }) => youngFrom(now)],
  after: ["text", ({ after }) => after],
  left_out: ["text", ({ leftOut }) => leftOut.join()],
});

/**
 * Whether the call was refused to its caller (lost-commits.ts). The offset keeps Postgres to a look-up by key: a plan made while
 * the table was empty would read all refused calls, and stay in use.
 */
const isRefused = "exists (select 1 from refused_calls r where r.tenant = c.tenant and r.id = c.id limit 1 offset 0)";

export const takeCommand: Command<Taking, TakenCalls> = {
  name: "take",
  tenantOf: ({ tenant }) => tenant,
  bytesOf: ({ tokens }) => tokens.length * ROW_BYTES,
  keyOf: ({ agent_id }) => agent_id,
  sqlite(prepare) {
    // The plus keeps SQLite to the index of the agent's pending calls: scanning all calls of the tenant held the event loop for
    // 28 to 195 ms with 60,000 open calls (measured). The `|| ''` spares replanning: SQLite plans a statement again whenever the
    // value of a range changes, which took 16 of its 25 µs (measured), but not when the value is an expression.
    const next = prepare(
      `select c.id, c.call, c.request, coalesce(c.req_size, 0) as body_bytes from open_invocations c
       where c.agent_id = (?1 || '') and +c.tenant = ?2 and ${isQueued("?3", "?4")} and c.id > (?5 || '')
         and not ${isRefused}
       order by c.id limit 1`,
    );
    const take = prepare(
      `update open_invocations set status = '${RUNS_AS}', owner = ?, claim = ?, updated_at = ? where id = ?`,
    );
    return (taking) => takeOneByOne({ next, take }, taking);
  },
  postgres: {
    text: `
with input as (
  select *, string_to_array(tokens, ',') as all_tokens, string_to_array(left_out, ',') as all_left_out from ${TAKE_INPUT.source}
),
found as (
  select n, owner, all_tokens, at, o.* from input, lateral (
    select c.id, c.tenant, c.request is null as is_large, coalesce(c.req_size, 0) as body_bytes,
      octet_length(c.call) + coalesce(octet_length(c.request), 0) as bytes from open_invocations c
    where c.agent_id = input.agent_id and c.tenant = input.tenant and ${isQueued("input.owner", "input.young")}
      and c.id > input.after and not ${isRefused} and c.id <> all(input.all_left_out)
    order by c.id limit input.slots
    for update skip locked
  ) o
),
numbered as (
  select *, row_number() over arrived as nth, count(*) filter (where is_large) over arrived as large,
    sum(bytes) over arrived - bytes as bytes_before from found
  window arrived as (partition by n order by id)
),
taken as (
  select n, id, tenant, owner, at, all_tokens[nth] as token from numbered
  where large = 0 and bytes_before <= ${BLOCK_BYTES_MAX}
),
claimed as (
  update open_invocations o set status = '${RUNS_AS}', owner = taken.owner, claim = taken.token, updated_at = taken.at
  from taken where o.id = any(array[taken.id])
  returning taken.n, o.id, o.claim, o.call, o.request
)
select n, id, claim as token, call, request as body, null::bigint as body_bytes from claimed
union all select n, id, null, null, null, body_bytes from numbered where large > 0 or bytes_before > ${BLOCK_BYTES_MAX}
order by n, id`,
    valuesOf: TAKE_INPUT.values,
    outputsOf(inputs, rows) {
      const outputs = inputs.map(() => ({ taken: [] as TakenCall[], large: null as TakenCalls["large"] }));
      for (const row of rows) {
        const output = outputs[Number(row["n"]) - 1];
        if (output === undefined) continue;
        if (row["token"] !== null) output.taken.push(row as unknown as TakenCall);
        else output.large ??= { id: String(row["id"]), body_bytes: Number(row["body_bytes"]) };
      }
      return outputs;
    },
  },
};

type NextRow = Pick<TakenCall, "id" | "call"> & { readonly request: Uint8Array | null; readonly body_bytes: number };

function takeOneByOne({ next, take }: Readonly<Record<"next" | "take", SqliteStatement>>, taking: Taking): TakenCalls {
  const { tenant, agent_id, owner, tokens, now, after, leftOut } = taking;
  const young = youngFrom(now);
  const taken: TakenCall[] = [];
  let bytes = 0;
  for (let last = after; taken.length < tokens.length; ) {
    const row = next.get(agent_id, tenant, owner, young, last) as NextRow | null;
    if (row === null) break;
    const { id, call, request, body_bytes } = row;
    last = id;
    if (leftOut.includes(id)) continue;
    if (request === null || bytes > BLOCK_BYTES_MAX) return { taken, large: { id, body_bytes } };
    bytes += call.length + request.byteLength;
    const token = tokens[taken.length] ?? "";
    take.run(owner, token, now, id);
    taken.push({ id, token, call, body: request });
  }
  return { taken, large: null };
}

/** Counting so many calls takes a millisecond on SQLite (measured). */
const CALLS_AT_ONCE = 2_048;

/** As `isQueued`, for any replica. The partial index must have the same text. */
const WAITS = sql.raw("status = 'pending' and mode = 'transactional' and coalesce(settlement_status, '') <> 'pending'");

/**
 * How many calls wait, and how long the oldest has waited. Read in steps, since SQLite reads on the event loop.
 * @param atOnce calls in a step; tests lower it
 */
export async function queueSize({ read, clock }: Store, atOnce: number = CALLS_AT_ONCE): Promise<QueueSize> {
  let calls = 0;
  let oldest: string | null = null;
  for (let after: SQL | undefined; ; ) {
    const step = await countStep(read, after, atOnce);
    calls += step.calls;
    if (step.oldest !== null && (oldest === null || step.oldest < oldest)) oldest = step.oldest;
    if (step.calls < atOnce || step.agent === null) break;
    after = sql`(agent_id, id) > (${step.agent}, ${step.id})`;
    await Bun.sleep(0);
  }
  return { calls, oldestMs: oldest === null ? 0 : Math.max(clock.now() - idTime(oldest), 0) };
}

/** Counts the next calls, in the order of agent and then ID. `agent` and `id` are those of the last call counted. */
async function countStep({ db, tables: { openInvocations: t } }: Reader, after: SQL | undefined, atOnce: number) {
  const step = db
    .select({ agent_id: t.agent_id, id: t.id })
    .from(t)
    .where(and(WAITS, after))
    .orderBy(t.agent_id, t.id)
    .limit(atOnce)
    .as("step");
  const [found] = await db
    .select({
      calls: sql<number | string>`count(*)`,
      oldest: min(step.id),
      agent: sql<string | null>`max(agent_id)`,
      // All agent IDs are equally long, so the greatest concatenation belongs to the last call.
      id: sql<string | null>`substr(max(agent_id || id), length(max(agent_id)) + 1)`,
    })
    .from(step);
  return { oldest: null, agent: null, id: null, ...found, calls: Number(found?.calls ?? 0) };
}
