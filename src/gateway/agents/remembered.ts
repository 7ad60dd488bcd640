// Agents as the path of every call needs them, remembered for a moment so that a busy agent is not read for each
// of its calls. A change made here is in force with its acknowledgement; one made on another replica within the
// time that an agent is remembered (decisions.md, section 4, allows 2 s).
import { boundedCache } from "../../core/bounded-cache.ts";
import type { Reader } from "../../storage/store.ts";
import { findAgent, type InvocableAgent } from "./service.ts";

const REMEMBERED_MS = 1_000;
const CHARACTERS_MAX = 8 * 1024 * 1024;
const AGENT_CHARACTERS = 512;

interface Entry {
  readonly tenant: string;
  readonly agent: InvocableAgent;
  readonly until: number;
}

export interface RememberedAgents {
  /** As findAgent. */
  find(tenant: string, id: string): Promise<InvocableAgent | null>;
  /** To be called after a write that may have changed an agent, and before it is acknowledged. */
  forget(): void;
}

/** @param now milliseconds of a clock that never goes back */
export function rememberedAgents(
  reader: Reader,
  now: () => number = () => performance.now(),
): RememberedAgents {
  const known = boundedCache<string, Entry>(CHARACTERS_MAX);
  let changes = 0;
  return {
    async find(tenant, id) {
      const entry = known.get(id);
      if (entry !== undefined && entry.tenant === tenant && now() < entry.until) return entry.agent;
      const seenChanges = changes;
      const until = now() + REMEMBERED_MS;
      const agent = await findAgent(reader, tenant, id);
      // What was read while something changed may be what was there before.
      if (agent !== null && seenChanges === changes) {
        known.set(id, { tenant, agent, until }, AGENT_CHARACTERS + (agent.pricing?.length ?? 0));
      }
      return agent;
    },
    forget() {
      changes++;
      known.clear();
    },
  };
}
