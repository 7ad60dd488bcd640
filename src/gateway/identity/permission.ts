// Which scope a request needs. If the operator has set a scope for managing, every request that writes needs it. Exempt
// routes are named here, so that a new route can't be forgotten.
import type { Caller } from "../../core/caller.ts";
import { Fault } from "../../core/fault.ts";
import { pathPattern } from "../../http/elysia.ts";

const READING: ReadonlySet<string> = new Set(["GET", "HEAD", "OPTIONS"]);

/** Exempt routes: calls of agents, and reads that have the form of a write. */
const CALLING = [
  ["POST", "/v1/proxy/:id"],
  ["POST", "/v1/proxy/:id/stream"],
  ["DELETE", "/v1/proxy/:id/stream"],
  ["POST", "/v1/proxy/:id/invocations/:inv_id/cancel"],
  ["POST", "/v1/policy/evaluate"],
].map(([method = "", path = ""]) => ({ method, pattern: pathPattern(path) }));

/**
 * Throws Fault `forbidden` where the caller lacks the scope.
 *
 * @param scope null when every token of a tenant may write
 */
export function managePermission(scope: string | null) {
  return (caller: Caller, method: string, path: string): void => {
    if (scope === null || READING.has(method) || caller.scopes.has(scope)) return;
    if (CALLING.some((route) => route.method === method && route.pattern.test(path))) return;
    const error = `the token lacks the scope ${scope}`;
    // RFC 6750, section 3.1.
    const challenge = `Bearer error="insufficient_scope", scope="${scope}"`;
    throw new Fault("forbidden", error, {
      answer: { body: { error }, headers: { "www-authenticate": challenge } },
    });
  };
}
