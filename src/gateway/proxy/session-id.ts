// Whose an MCP session is. Sessions are the upstream's, which knows the gateway's credential and not its callers. So a
// caller is given the upstream's session ID with a seal behind it, which binds it to the tenant, the agent and the user
// it was given to, and shows both with each request. Nothing is remembered: it holds after a restart and on every
// replica, and when the master key is another.
import { createHmac, timingSafeEqual } from "node:crypto";
import { boundedCache } from "../../concurrency/bounded-cache.ts";

/** What the protocol lets an ID be, in a length that fits a header. */
const UPSTREAM_ID = /^[\x21-\x7e]{1,1024}$/;
const SEPARATOR = ".";
/** SHA-256 in base64url. */
const SEAL_CHARACTERS = 43;

const KEYS_CACHED_MAX = 10_000;

export interface SessionOwner {
  readonly tenant: string;
  readonly agentId: string;
  readonly user: string;
}

/** What the sessions of one owner are called at both ends. */
export interface SessionIds {
  /** For the caller; null when the upstream's is none. */
  toCaller(id: string): string | null;
  /** For the upstream; null when the caller's is not one that this owner was given. */
  toUpstream(sealed: string): string | null;
}

export type SessionIdsOf = (owner: SessionOwner) => Promise<SessionIds>;

/** @param deriveKey the tenant's key for sessions */
export function sealedSessions(deriveKey: (tenant: string) => Promise<Uint8Array>): SessionIdsOf {
  const keys = boundedCache<string, Uint8Array>(KEYS_CACHED_MAX);
  return async (owner) => {
    let key = keys.get(owner.tenant);
    if (key === undefined) {
      key = await deriveKey(owner.tenant);
      keys.set(owner.tenant, key);
    }
    return sessionIds(key, owner);
  };
}

function sessionIds(key: Uint8Array, { tenant, agentId, user }: SessionOwner): SessionIds {
  const sealOf = (id: string) =>
    createHmac("sha256", key)
      .update(JSON.stringify([tenant, agentId, user, id]))
      .digest("base64url");
  return {
    toCaller: (id) => (UPSTREAM_ID.test(id) ? `${id}${SEPARATOR}${sealOf(id)}` : null),
    toUpstream(sealed) {
      const end = sealed.length - SEAL_CHARACTERS - SEPARATOR.length;
      const id = sealed.slice(0, Math.max(end, 0));
      if (!UPSTREAM_ID.test(id) || sealed[end] !== SEPARATOR) return null;
      const seal = Buffer.from(sealed.slice(end + SEPARATOR.length), "latin1");
      return timingSafeEqual(seal, Buffer.from(sealOf(id), "latin1")) ? id : null;
    },
  };
}
