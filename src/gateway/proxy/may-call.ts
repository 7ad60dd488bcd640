// Whether an agent may be called just now: whether it is there to be called, and has a token left.
import { andThen } from "../../concurrency/and-then.ts";
import { Fault } from "../../core/fault.ts";
import { agentStatus } from "../../core/states.ts";
import type { InvocableAgent } from "../agents/store.ts";

export interface TokenTaker {
  /** Takes a token of the agent's bucket: null, or the whole seconds until there is one. */
  takeToken(tenant: string, agent: InvocableAgent): Bun.MaybePromise<number | null>;
}

/**
 * Gives the URL of an agent that may be called just now: at once if nobody else counts its calls.
 *
 * @throws Fault `agent_not_invocable`, `rate_limited`; or `unavailable` when the replicas can't count together
 */
export function mayCall({ takeToken }: TokenTaker, tenant: string, agent: InvocableAgent): Bun.MaybePromise<string> {
  const url = invocableUrl(agent);
  return andThen(takeToken(tenant, agent), (retryAfterSeconds) => {
    if (retryAfterSeconds === null) return url;
    throw new Fault("rate_limited", "the agent's invocation rate limit is exceeded", { retryAfterSeconds });
  });
}

/** @throws Fault `agent_not_invocable` */
export function invocableUrl(agent: InvocableAgent): string {
  if (agentStatus(agent) === "inactive") throw notInvocable("is inactive");
  if (agent.suspended) throw notInvocable("is suspended");
  if (agent.upstream_url === null) throw notInvocable("has no upstream_url");
  return agent.upstream_url;
}

function notInvocable(why: string): Fault {
  return new Fault("agent_not_invocable", `the agent ${why}`);
}

/**
 * The Fault for which an agent may not be called just now, or null.
 *
 * @throws Fault `unavailable`: the time for an answer is over then
 */
export function refusalOf(...asked: Parameters<typeof mayCall>): Bun.MaybePromise<Fault | null> {
  try {
    const url = mayCall(...asked);
    return url instanceof Promise ? url.then(() => null, ifFault) : null;
  } catch (error) {
    return ifFault(error);
  }
}

function ifFault(error: unknown): Fault {
  if (error instanceof Fault && error.kind !== "unavailable") return error;
  throw error;
}
