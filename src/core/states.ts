// The state tables: which states there are, and which events lead from where to where. A transition in the
// database is a write guarded by the sources of its event, so the tables here are what makes it refuse.

export const AGENT_STATUSES = ["pending", "active", "inactive"] as const;
export type AgentStatus = (typeof AGENT_STATUSES)[number];

export const PROTOCOLS = ["http", "mcp"] as const;
export type Protocol = (typeof PROTOCOLS)[number];

export const MODES = ["transactional", "streaming"] as const;
export type Mode = (typeof MODES)[number];

export const INVOCATION_STATUSES = ["pending", "running", "succeeded", "failed"] as const;
export type InvocationStatus = (typeof INVOCATION_STATUSES)[number];

export const ERROR_CLASSES = [
  "timeout",
  "upstream_5xx",
  "upstream_4xx",
  "ssrf_blocked",
  "credential_error",
  "cancelled",
  "internal",
] as const;
export type ErrorClass = (typeof ERROR_CLASSES)[number];

export const SETTLEMENT_STATUSES = [
  "pending",
  "settled",
  "settlement_failed",
  "settled_upstream_failed",
] as const;
export type SettlementStatus = (typeof SETTLEMENT_STATUSES)[number];

/** Events of an invocation, each with the state it starts from and the state it leads to. */
export const INVOCATION_EVENTS = {
  /** A replica took a place for the call; the upstream may see it from now on. */
  claim: { from: "pending", to: "running" },
  succeed: { from: "running", to: "succeeded" },
  /** The upstream failed it, its replica died, or the caller cancelled it. */
  fail: { from: "running", to: "failed" },
  /** The caller cancelled it before it ran. */
  withdraw: { from: "pending", to: "failed" },
} as const satisfies Record<string, { from: InvocationStatus; to: InvocationStatus }>;

export type InvocationEvent = keyof typeof INVOCATION_EVENTS;

export function isEnded(status: InvocationStatus): boolean {
  return status === "succeeded" || status === "failed";
}

/** An agent's status is derived: from its deletion, then from whether it has an upstream. */
export function agentStatus(agent: { deleted_at: number | null; upstream_url: string | null }): AgentStatus {
  if (agent.deleted_at !== null) return "inactive";
  return agent.upstream_url === null ? "pending" : "active";
}
