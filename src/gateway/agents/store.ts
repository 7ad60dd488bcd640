// What a call needs of its agent, read for many calls at once and cached for a second. Without the cache a busy agent
// would be read for each of its calls; a query for each agent took more of the gateway and of Postgres than all else about
// an accept (measured, a thousand busy agents).
//
// A change made here is in force when it is acknowledged. A change on another replica is in force when the cached agent
// expires (decisions.md, section 4, allows 2 s).

import { isId } from "../../core/id.ts";
import type { Protocol } from "../../core/states.ts";
import { tenantCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { afterShared } from "../../kernel/turns.ts";
import { type Command, inputRows, type Store } from "../../storage/store.ts";

/** Everything but the catalog's texts. */
export interface InvocableAgent {
  readonly id: string;
  readonly upstream_url: string | null;
  readonly credential_ref: string | null;
  readonly suspended: boolean;
  readonly invocation_rate_limit: number | null;
  readonly invocation_burst: number | null;
  readonly rate_revision: number;
  readonly emit_receipts: boolean;
  readonly capture_body: boolean;
  readonly protocol: Protocol;
  readonly mcp_protocol_version: string | null;
  /** In its stored form. */
  readonly pricing: string | null;
  readonly deleted_at: number | null;
}

interface AgentKey {
  readonly tenant: string;
  readonly id: string;
}

const SELECTED = `a.id, a.upstream_url, a.credential_ref, a.suspended, a.invocation_rate_limit, a.invocation_burst,
  a.rate_revision, a.emit_receipts, a.capture_body, a.protocol, a.mcp_protocol_version, a.pricing, a.deleted_at`;

const INPUT = inputRows<AgentKey>({ tenant: ["text", ({ tenant }) => tenant], id: ["text", ({ id }) => id] });

/** The databases have different forms of numbers and flags. */
function agentOf(row: Readonly<Record<string, unknown>>): InvocableAgent {
  const { n: _number, ...fields } = row;
  const whole = (name: string) => (row[name] === null ? null : Number(row[name]));
  return {
    ...(fields as unknown as InvocableAgent),
    suspended: Boolean(row["suspended"]),
    invocation_rate_limit: whole("invocation_rate_limit"),
    invocation_burst: whole("invocation_burst"),
    rate_revision: Number(row["rate_revision"]),
    emit_receipts: Boolean(row["emit_receipts"]),
    capture_body: Boolean(row["capture_body"]),
    deleted_at: whole("deleted_at"),
  };
}

/** Null when the tenant has no agent with this ID. */
export const agentLookUp: Command<AgentKey, InvocableAgent | null> = {
  name: "agent",
  kind: "look_up",
  tenantOf: ({ tenant }) => tenant,
  bytesOf: () => 128,
  sqlite(prepare) {
    const find = prepare(`select ${SELECTED} from agents a where a.tenant = ? and a.id = ?`);
    return ({ tenant, id }) => {
      const row = find.get(tenant, id);
      return row === null ? null : agentOf(row);
    };
  },
  postgres: {
    text: `select input.n, ${SELECTED} from ${INPUT.source}, agents a where a.tenant = input.tenant and a.id = input.id`,
    valuesOf: INPUT.values,
    outputsOf(inputs, rows) {
      const found: (InvocableAgent | null)[] = inputs.map(() => null);
      for (const row of rows) found[Number(row["n"]) - 1] = agentOf(row);
      return found;
    },
  },
};

/** The agent, even an inactive one; null when the tenant has none with this ID. */
export async function findAgent(
  { execute }: Pick<Store, "execute">,
  tenant: string,
  id: string,
): Promise<InvocableAgent | null> {
  return isId("agt", id) ? execute(agentLookUp, { tenant, id }) : null;
}

const AGENT_CHARACTERS = 512;

interface CachedAgent {
  readonly tenant: string;
  readonly agent: InvocableAgent;
  readonly until: number;
}

interface SharedRead {
  readonly agent: Promise<InvocableAgent | null>;
  readonly until: number;
  /** The agent was changed meanwhile. */
  isForgotten: boolean;
}

/** No ID has a space in it. */
function keyOf(tenant: string, id: string): string {
  return `${id} ${tenant}`;
}

/** @param now milliseconds of a clock that never goes back */
export function createAgentCache(store: Pick<Store, "execute">, now: () => number = () => performance.now()) {
  /** Agents by ID. An ID belongs to one tenant. */
  const known = tenantCache<string, CachedAgent>(MAX.agentsCharacters);
  const reading = new Map<string, SharedRead>();

  /** Shares one read among all requests at the same time, unless the agent was changed since the read began. */
  function readOnce(key: string, tenant: string, id: string): Promise<InvocableAgent | null> {
    const inFlight = reading.get(key);
    if (inFlight !== undefined) return joined(inFlight, tenant, id);
    const agent = findAgent(store, tenant, id);
    const own: SharedRead = { agent, until: now() + 1_000, isForgotten: false };
    reading.set(key, own);
    return kept(own, key, tenant, id);
  }

  async function kept(own: SharedRead, key: string, tenant: string, id: string): Promise<InvocableAgent | null> {
    try {
      const agent = await own.agent;
      // An agent that changed during the read may have been read as it was before.
      if (agent !== null && !own.isForgotten) {
        const { until } = own;
        known.set(tenant, id, { tenant, agent, until }, AGENT_CHARACTERS + (agent.pricing?.length ?? 0));
      }
      return agent;
    } finally {
      if (reading.get(key) === own) reading.delete(key);
    }
  }

  /** Reads again if the wait was too long or the agent was changed. */
  async function joined(read: SharedRead, tenant: string, id: string): Promise<InvocableAgent | null> {
    const agent = await afterShared(read.agent, tenant);
    return read.isForgotten || now() >= read.until ? findAgent(store, tenant, id) : agent;
  }

  return {
    /** The agent as `findAgent` gives it, at once if it is cached. */
    find(tenant: string, id: string): Bun.MaybePromise<InvocableAgent | null> {
      const entry = known.get(id);
      if (entry?.tenant === tenant && now() < entry.until) return entry.agent;
      return isId("agt", id) ? readOnce(keyOf(tenant, id), tenant, id) : Promise.resolve(null);
    },
    /** To be called after a write that may have changed the agent, and before it is acknowledged. */
    forget(tenant: string, id: string) {
      const key = keyOf(tenant, id);
      const read = reading.get(key);
      if (read !== undefined) read.isForgotten = true;
      reading.delete(key);
      known.delete(id);
    },
  };
}

export type AgentCache = ReturnType<typeof createAgentCache>;
