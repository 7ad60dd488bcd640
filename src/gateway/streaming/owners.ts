// Whose an MCP session is. Sessions are the upstream's, which knows the gateway's credential and not its callers: so
// the gateway remembers for whom each was opened, or who used it first, and nobody else gets at it. It is remembered
// here only: after a restart, or on another replica, the next one to use a session is taken for its owner.
import { boundedCache } from "../../core/bounded-cache.ts";

const SESSIONS_MAX = 200_000;

export interface SessionOwners {
  /** Whether nobody else is known to own the session. */
  mayUse(agentId: string, session: string, user: string): boolean;
  /** The upstream has accepted a request of this user with the session, or has opened it for it. */
  learn(agentId: string, session: string, user: string): void;
}

export function sessionOwners(): SessionOwners {
  const owners = boundedCache<string, string>(SESSIONS_MAX);
  /** An agent belongs to one tenant, so its ID names both. */
  const keyOf = (agentId: string, session: string) =>
    new Bun.CryptoHasher("sha256").update(`${agentId} ${session}`).digest("base64");
  return {
    mayUse(agentId, session, user) {
      const owner = owners.get(keyOf(agentId, session));
      return owner === undefined || owner === user;
    },
    learn(agentId, session, user) {
      const key = keyOf(agentId, session);
      if (owners.get(key) === undefined) owners.set(key, user);
    },
  };
}
