// A cache of agents for the path of every call, so that a busy agent is not read for each of its calls. A change made
// here is in force when it is acknowledged. A change on another replica is in force when the cached agent expires
// (decisions.md, section 4, allows 2 s).

import { afterShared } from "../../concurrency/request-turns.ts";
import { tenantCache } from "../../concurrency/tenant-cache.ts";
import { isId } from "../../core/id.ts";
import type { Store } from "../../storage/store.ts";
import type { InvocableAgent } from "./look-up.ts";
import { findAgent } from "./service.ts";

const REMEMBERED_MS = 1_000;
const CHARACTERS_MAX = 8 * 1024 * 1024;
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
  /** By ID. An ID belongs to one tenant. */
  const known = tenantCache<string, CachedAgent>(CHARACTERS_MAX);
  const reading = new Map<string, SharedRead>();

  /** One shared read for all requests at the same time, unless the agent was changed since the read began. */
  function readOnce(key: string, tenant: string, id: string): Promise<InvocableAgent | null> {
    const underWay = reading.get(key);
    if (underWay !== undefined) return joined(underWay, tenant, id);
    const agent = findAgent(store, tenant, id);
    const own: SharedRead = { agent, until: now() + REMEMBERED_MS, isForgotten: false };
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
    /** Like findAgent, and at once if the agent is cached. */
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
