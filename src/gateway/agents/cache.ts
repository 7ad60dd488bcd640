// Agents as the path of every call needs them, remembered for a moment so that a busy agent is not read for each
// of its calls. A change made here is in force with its acknowledgement; one made on another replica within the
// time that an agent is remembered (decisions.md, section 4, allows 2 s).

import { tenantCache } from "../../concurrency/tenant-cache.ts";
import { afterShared } from "../../concurrency/turns.ts";
import { isId } from "../../core/id.ts";
import type { Reader } from "../../storage/store.ts";
import { findAgent, type InvocableAgent } from "./service.ts";

const REMEMBERED_MS = 1_000;
const CHARACTERS_MAX = 8 * 1024 * 1024;
const AGENT_CHARACTERS = 512;

interface CachedAgent {
  readonly tenant: string;
  readonly agent: InvocableAgent;
  readonly until: number;
}

export interface AgentCache {
  /** As findAgent; at once what is remembered. */
  find(tenant: string, id: string): Bun.MaybePromise<InvocableAgent | null>;
  /** To be called after a write that may have changed the agent, and before it is acknowledged. */
  forget(tenant: string, id: string): void;
}

/** No ID has a space in it. */
function keyOf(tenant: string, id: string): string {
  return `${id} ${tenant}`;
}

/** @param now milliseconds of a clock that never goes back */
export function agentCache(reader: Reader, now: () => number = () => performance.now()): AgentCache {
  /** By its ID, which is of one tenant. */
  const known = tenantCache<string, CachedAgent>(CHARACTERS_MAX);
  const reading = new Map<string, Promise<InvocableAgent | null>>();

  /** One read at a time for all who ask meanwhile, unless the agent was changed since it began. */
  function readOnce(key: string, tenant: string, id: string): Promise<InvocableAgent | null> {
    const underWay = reading.get(key);
    if (underWay !== undefined) return afterShared(underWay, tenant);
    const until = now() + REMEMBERED_MS;
    const own = findAgent(reader, tenant, id)
      .then((agent) => {
        // What was read while it changed may be what was there before.
        if (agent !== null && reading.get(key) === own) {
          known.set(tenant, id, { tenant, agent, until }, AGENT_CHARACTERS + (agent.pricing?.length ?? 0));
        }
        return agent;
      })
      .finally(() => {
        if (reading.get(key) === own) reading.delete(key);
      });
    reading.set(key, own);
    return own;
  }

  return {
    find(tenant, id) {
      const entry = known.get(id);
      if (entry?.tenant === tenant && now() < entry.until) return entry.agent;
      return isId("agt", id) ? readOnce(keyOf(tenant, id), tenant, id) : Promise.resolve(null);
    },
    forget(tenant, id) {
      reading.delete(keyOf(tenant, id));
      known.delete(id);
    },
  };
}
