// Which calls wait for a replica to make them, and whose they are.
import { idFloor } from "../../../core/id.ts";
import type { Command } from "../../../storage/commands.ts";

/**
 * For so long only the replica that accepted a call may take it. Until then, if the commit got no answer, that replica
 * may still refuse the call to its caller.
 */
export const YOUNG_MS = 15_000;

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
  return [replica, idFloor("inv", now - YOUNG_MS), after, limit];
}

/** The agents with calls that this replica may take, by ID. */
export const waitingAgents: Command<LookForAgents, readonly WaitingAgent[]> = {
  name: "waiting_agents",
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
