// Which calls wait for a replica to make them, and whose they are.
import { idFloor } from "../../../core/id.ts";
import { type Command, FOR_ALL, inputRows } from "../../../storage/store.ts";

/**
 * For so long only the replica that accepted a call may take it. Until then, if the commit got no answer, that replica
 * may still refuse the call to its caller.
 */
export const YOUNG_MS = 15_000;

/** The lowest ID of a call that only the replica which has accepted it may take. */
export const youngFrom = (now: number): string => idFloor("inv", now - YOUNG_MS);

/**
 * Of a row `c` of the open calls. Streaming calls are left out: only their caller makes them. A call waits while its
 * payment may still land or fail. The index of pending calls has the same text.
 *
 * @param replica who looks
 * @param young the lowest ID of a call that only the replica which has accepted it may take
 */
export const isQueued = (replica: string, young: string) =>
  `c.status = 'pending' and c.mode = 'transactional' and coalesce(c.settlement_status, '') <> 'pending'
   and (c.accepted_by is null or c.accepted_by = ${replica} or c.id < ${young}
     or c.accepted_by not in (select id from replicas))`;

/** Who looks for calls, and when. */
export interface Taker {
  readonly replica: string;
  /** By the database's clock. */
  readonly now: number;
}

export interface WaitingAgent {
  readonly tenant: string;
  readonly agent_id: string;
}

export interface LookForAgents extends Taker {
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

interface LookAhead extends Taker, WaitingAgent {
  /** Only calls behind this one, by ID. */
  readonly after: string;
  readonly limit: number;
}

export interface QueuedCall {
  readonly id: string;
  readonly body_bytes: number;
}

const INPUT = inputRows<LookAhead>({
  tenant: ["text", ({ tenant }) => tenant],
  agent_id: ["text", ({ agent_id }) => agent_id],
  replica: ["text", ({ replica }) => replica],
  young: ["text", ({ now }) => youngFrom(now)],
  after: ["text", ({ after }) => after],
  most: ["bigint", ({ limit }) => limit],
});

export interface OwnCalls {
  /** The oldest first, up to the first one that others may take too. */
  readonly calls: readonly QueuedCall[];
  /** Whether these are all that are pending. */
  readonly isAll: boolean;
}

/** An agent's next pending calls, as far as nobody else may take them. */
export const ownPending: Command<LookAhead, OwnCalls> = {
  name: "own_pending",
  tenantOf: ({ tenant }) => tenant,
  bytesOf: () => 256,
  sqlite(prepare) {
    // The process that has the database has all calls. For the plus: see take.ts.
    const find = prepare(
      `select json_group_array(json_object('id', id, 'body_bytes', body_bytes)) as calls from (
         select c.id, coalesce(c.req_size, 0) as body_bytes from open_invocations c
         where c.agent_id = ?1 and +c.tenant = ?2 and ${isQueued("?3", "?4")} and c.id > ?5 order by c.id limit ?6)`,
    );
    return ({ tenant, agent_id, replica, after, limit }) => {
      const calls = JSON.parse(
        String(find.get(agent_id, tenant, replica, "", after, limit)?.["calls"]),
      ) as QueuedCall[];
      return { calls: calls.toSorted((a, b) => (a.id < b.id ? -1 : 1)), isAll: calls.length < limit };
    };
  },
  postgres: {
    text: `
select n, o.id, o.body_bytes, o.is_own from ${INPUT.source}, lateral (
  select c.id, coalesce(c.req_size, 0) as body_bytes,
    coalesce(c.accepted_by, '') = input.replica and c.id >= input.young as is_own from open_invocations c
  where c.agent_id = input.agent_id and c.tenant = input.tenant and ${isQueued("input.replica", "input.young")}
    and c.id > input.after
  order by c.id limit input.most
) o order by n, id`,
    valuesOf: INPUT.values,
    outputsOf(inputs, rows) {
      const found = inputs.map(() => ({ calls: [] as QueuedCall[], isAll: true }));
      for (const { n, id, body_bytes, is_own } of rows) {
        const one = found[Number(n) - 1];
        if (one === undefined) continue;
        one.isAll &&= is_own === true;
        if (one.isAll) one.calls.push({ id: String(id), body_bytes: Number(body_bytes) });
      }
      return found.map(({ calls, isAll }, at) => ({ calls, isAll: isAll && calls.length < (inputs[at]?.limit ?? 0) }));
    },
  },
};
