// The queue: which calls wait for a replica to make them, whose they are and how many, and how they are taken. From the moment
// that a call is taken only the one who has the token makes it.
//
// The pending calls of an agent are taken as many at a time as it has slots free: the oldest first, without looking at them
// before. Calls that another replica is just taking are passed over, so that replicas share a backlog instead of all wanting
// its beginning.

import { and, min, type SQL, sql } from "drizzle-orm";
import { idFloor, idTime } from "../../../core/id.ts";
import type { QueueSize } from "../../../core/meters.ts";
import { INVOCATION_EVENTS } from "../../../core/states.ts";
import {
  type Command,
  FOR_ALL,
  inputRows,
  type Reader,
  type SqliteStatement,
  type Store,
} from "../../../storage/store.ts";

/**
 * For so long only the replica that accepted a call may take it. Until then, if the commit got no answer, that replica
 * may still refuse the call to its caller.
 */
export const YOUNG_MS = 15_000;

/** The lowest ID of a call that only the replica which has accepted it may take. */
const youngFrom = (now: number): string => idFloor("inv", now - YOUNG_MS);

/**
 * Of a row `c` of the open calls. Streaming calls are left out: only their caller makes them. A call waits while its
 * payment may still land or fail. The index of pending calls has the same text.
 *
 * @param replica who looks
 * @param young the lowest ID of a call that only the replica which has accepted it may take
 */
const isQueued = (replica: string, young: string) =>
  `c.status = 'pending' and c.mode = 'transactional' and coalesce(c.settlement_status, '') <> 'pending'
   and (c.accepted_by is null or c.accepted_by = ${replica} or c.id < ${young}
     or c.accepted_by not in (select id from processes))`;

/** Who looks for calls, and when. */
interface Taker {
  readonly replica: string;
  /** By the database's clock. */
  readonly now: number;
}

interface WaitingAgent {
  readonly tenant: string;
  readonly agent_id: string;
}

interface LookForAgents extends Taker {
  /** By their IDs, those behind this one. */
  readonly after: string;
  readonly limit: number;
}

const QUEUED = isQueued("$1", "$2");
const nextBehind = (agent: string) =>
  `select c.agent_id from open_invocations c where ${QUEUED} and c.agent_id > ${agent} order by c.agent_id limit 1`;
/** One seek in the index for each agent, however many calls it has. */
const AGENTS = `
with recursive seen (agent_id, place) as (
  select (${nextBehind("$3")}), 1
  union all select (${nextBehind("seen.agent_id")}), place + 1 from seen where agent_id is not null and place < $4
)
select agent_id, (select c.tenant from open_invocations c where c.agent_id = seen.agent_id and ${QUEUED} order by c.id limit 1) as tenant
from seen where agent_id is not null`;

function valuesOf({ replica, now, after, limit }: LookForAgents) {
  return [replica, youngFrom(now), after, limit];
}

/** The agents with calls that this replica may take, by ID. */
export const waitingAgents: Command<LookForAgents, readonly WaitingAgent[]> = {
  name: "waiting_agents",
  kind: "look_up",
  tenantOf: () => FOR_ALL,
  bytesOf: () => 128,
  // The statement is for one look.
  keyOf: () => "all",
  sqlite(prepare) {
    const find = prepare(
      `select json_group_array(json_object('tenant', tenant, 'agent_id', agent_id)) as agents
       from (${AGENTS.replace(/\$(\d)/g, "?$1")})`,
    );
    return (look) => inOrder(JSON.parse(String(find.get(...valuesOf(look))?.["agents"])) as WaitingAgent[]);
  },
  postgres: {
    text: AGENTS,
    valuesOf: ([look]) => (look === undefined ? [] : valuesOf(look)),
    outputsOf: (_looks, rows) => [inOrder(rows as unknown as WaitingAgent[])],
  },
};

function inOrder(agents: readonly WaitingAgent[]): WaitingAgent[] {
  return agents.toSorted((a, b) => (a.agent_id < b.agent_id ? -1 : 1));
}

const RUNS_AS = INVOCATION_EVENTS.claim.to;

export interface Taking {
  readonly tenant: string;
  readonly agent_id: string;
  /** The replica that takes the calls. */
  readonly owner: string;
  /** One for each call that may be taken: each claim is an attempt of its own. */
  readonly tokens: readonly string[];
  readonly now: number;
  /**
   * Only calls behind this one, by ID. Where calls have been taken, the database keeps what is left of them for as long
   * as anybody's snapshot, and would pass over all of it each time (measured with one held back: 20 µs more for each call
   * after 4,000).
   */
  readonly after: string;
  /** Calls that are not to be taken. */
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
  /**
   * The one that is next, and was not taken: its body does not stand in its row, or those before it are a lot to read.
   * Those behind it wait for it.
   */
  readonly large: { readonly id: string; readonly body_bytes: number } | null;
}

/** About what a row brings with it; its body may have eight times as much. */
const ROW_BYTES = 1_024;

/**
 * A block ends behind so much: forty of 64 calls with 24 KB each held the event loop for 28 ms on SQLite (measured), and
 * on Postgres the answer of one statement has the blocks of many agents.
 */
const BLOCK_BYTES_MAX = 128 * 1024;

const TAKE_INPUT = inputRows<Taking>({
  tenant: ["text", ({ tenant }) => tenant],
  agent_id: ["text", ({ agent_id }) => agent_id],
  owner: ["text", ({ owner }) => owner],
  tokens: ["text", ({ tokens }) => tokens.join()],
  places: ["bigint", ({ tokens }) => tokens.length],
  at: ["bigint", ({ now }) => now],
  young: ["text", ({ now }) => youngFrom(now)],
  after: ["text", ({ after }) => after],
  left_out: ["text", ({ leftOut }) => leftOut.join()],
});

/**
 * A call that was refused to its caller is not made. The offset keeps Postgres from reading all refused calls at once instead,
 * as it does for good when there was none at first.
 */
const isRefused = "exists (select 1 from refused_calls r where r.tenant = c.tenant and r.id = c.id limit 1 offset 0)";

export const takeCommand: Command<Taking, TakenCalls> = {
  name: "take",
  tenantOf: ({ tenant }) => tenant,
  bytesOf: ({ tokens }) => tokens.length * ROW_BYTES,
  keyOf: ({ agent_id }) => agent_id,
  sqlite(prepare) {
    // The plus keeps SQLite to the index of the agent's pending calls: to walk all of the tenant's held the event loop for 28
    // to 195 ms with 60,000 open (measured).
    // It plans a statement again whenever one of its ranges has another value, which took 16 of its 25 µs (measured). Not of
    // an expression, whose value it does not know.
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
    order by c.id limit input.places
    for update skip locked
  ) o
),
placed as (
  select *, row_number() over arrived as place, count(*) filter (where is_large) over arrived as large,
    sum(bytes) over arrived - bytes as bytes_before from found
  window arrived as (partition by n order by id)
),
taken as (
  select n, id, tenant, owner, at, all_tokens[place] as token from placed
  where large = 0 and bytes_before <= ${BLOCK_BYTES_MAX}
),
claimed as (
  update open_invocations o set status = '${RUNS_AS}', owner = taken.owner, claim = taken.token, updated_at = taken.at
  from taken where o.id = any(array[taken.id])
  returning taken.n, o.id, o.claim, o.call, o.request
)
select n, id, claim as token, call, request as body, null::bigint as body_bytes from claimed
union all select n, id, null, null, null, body_bytes from placed where large > 0 or bytes_before > ${BLOCK_BYTES_MAX}
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

/** A millisecond on SQLite (measured). */
const CALLS_AT_ONCE = 2_048;

/** As `isQueued`, for any replica. The index has the same text. */
const WAITS = sql.raw("status = 'pending' and mode = 'transactional' and coalesce(settlement_status, '') <> 'pending'");

/**
 * How many calls wait to be made by any replica, and for how long. The index of pending calls is walked in steps, since a read on
 * SQLite holds the event loop.
 *
 * @param atOnce tests lower it
 */
export async function queueSize({ read, clock }: Store, atOnce: number = CALLS_AT_ONCE): Promise<QueueSize> {
  let calls = 0;
  let oldest: string | null = null;
  for (let behind: SQL | undefined; ; ) {
    const step = await stepBehind(read, behind, atOnce);
    calls += step.calls;
    if (step.oldest !== null && (oldest === null || step.oldest < oldest)) oldest = step.oldest;
    if (step.calls < atOnce || step.agent === null) break;
    behind = sql`(agent_id, id) > (${step.agent}, ${step.id})`;
    await Bun.sleep(0);
  }
  return { calls, oldestMs: oldest === null ? 0 : Math.max(clock.now() - idTime(oldest), 0) };
}

/** The last one is that with the highest agent, since the walk goes by agent and then by call; so its ID is the highest there. */
async function stepBehind({ db, tables: { openInvocations: t } }: Reader, behind: SQL | undefined, atOnce: number) {
  const step = db
    .select({ agent_id: t.agent_id, id: t.id })
    .from(t)
    .where(and(WAITS, behind))
    .orderBy(t.agent_id, t.id)
    .limit(atOnce)
    .as("step");
  const [found] = await db
    .select({
      calls: sql<number | string>`count(*)`,
      oldest: min(step.id),
      agent: sql<string | null>`max(agent_id)`,
      // All IDs are equally long, so the last of both together is the last.
      id: sql<string | null>`substr(max(agent_id || id), length(max(agent_id)) + 1)`,
    })
    .from(step);
  return { oldest: null, agent: null, id: null, ...found, calls: Number(found?.calls ?? 0) };
}
