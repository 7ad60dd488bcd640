// The owner of an MCP session. The upstream keeps the sessions, and it knows the gateway's credential but not the
// callers. So a caller gets the upstream's session ID with a seal behind it, which binds it to the tenant, the agent
// and the user. It sends both with each request. Nothing is stored: a seal is valid after a restart, on every replica,
// and after a change of the master key.
import { createHmac, timingSafeEqual } from "node:crypto";
import { boundedCache } from "../../concurrency/bounded-cache.ts";

/** An ID as the protocol allows it, of a length that fits a header. */
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

export type SessionIdsOf = (owner: SessionOwner) => Promise<SessionIds>;

/** @param deriveKey the tenant's key for sessions */
export function createSessionIds(deriveKey: (tenant: string) => Promise<Uint8Array>): SessionIdsOf {
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

function sessionIds(key: Uint8Array, { tenant, agentId, user }: SessionOwner) {
  const sealOf = (id: string) =>
    createHmac("sha256", key)
      .update(JSON.stringify([tenant, agentId, user, id]))
      .digest("base64url");
  return {
    /** The ID for the caller; null when the upstream's is not valid. */
    toCaller: (id: string) => (UPSTREAM_ID.test(id) ? `${id}${SEPARATOR}${sealOf(id)}` : null),
    /** The ID for the upstream; null when the caller's was not given to this owner. */
    toUpstream(sealed: string): string | null {
      const end = sealed.length - SEAL_CHARACTERS - SEPARATOR.length;
      const id = sealed.slice(0, Math.max(end, 0));
      if (!UPSTREAM_ID.test(id) || sealed[end] !== SEPARATOR) return null;
      const seal = Buffer.from(sealed.slice(end + SEPARATOR.length), "latin1");
      return timingSafeEqual(seal, Buffer.from(sealOf(id), "latin1")) ? id : null;
    },
  };
}

/** Translates the session IDs of one owner between caller and upstream. */
export type SessionIds = ReturnType<typeof sessionIds>;
