// The state tables: which states exist, and which event leads from which state to which. A transition in the database is a
// write that is guarded by the `from` states of its event, so these tables decide which transitions are refused.
export const AGENT_STATUSES = ["pending", "active", "inactive"] as const;
export type AgentStatus = (typeof AGENT_STATUSES)[number];

export const PROTOCOLS = ["http", "mcp"] as const;
export type Protocol = (typeof PROTOCOLS)[number];

export const POLICY_ACTIONS = ["allow", "warn", "deny"] as const;
export type PolicyAction = (typeof POLICY_ACTIONS)[number];

export const MODES = ["transactional", "streaming"] as const;
export type Mode = (typeof MODES)[number];

export const INVOCATION_STATUSES = ["pending", "running", "succeeded", "failed"] as const;
export type InvocationStatus = (typeof INVOCATION_STATUSES)[number];

export const ERROR_CLASSES = [
  ...["timeout", "upstream_5xx", "upstream_4xx", "ssrf_blocked", "credential_error", "cancelled", "internal"],
] as const;
export type ErrorClass = (typeof ERROR_CLASSES)[number];

/** Why the upstream gave no whole answer, in our own words: the caller may know no address and no text of the upstream. */
export const ERROR_DETAILS = [
  ...["connection_refused", "connection_reset", "connect_timeout", "name_not_found", "tls", "host_blocked"],
  ...["credential_unresolved", "credential_host", "response_too_large", "process_ended", "no_answer_in_stream"],
  "deadline",
] as const;
export type ErrorDetail = (typeof ERROR_DETAILS)[number];

/** The error class of a response by its status. Redirects are not followed, so a redirect is an ordinary response. */
export function errorClassOf(upstreamStatus: number): ErrorClass | null {
  if (upstreamStatus < 400) return null;
  return upstreamStatus < 500 ? "upstream_4xx" : "upstream_5xx";
}

export const SETTLEMENT_STATUSES = ["pending", "settled", "settlement_failed", "settled_upstream_failed"] as const;
export type SettlementStatus = (typeof SETTLEMENT_STATUSES)[number];

/** Events of a settlement, which the gateway keeps with the invocation. */
export const SETTLEMENT_EVENTS = {
  collect: { from: "pending", to: "settled" },
  /** It is certain that the payment can no longer land. */
  refuse: { from: "pending", to: "settlement_failed" },
  /** The caller has paid, and the call failed. */
  lose: { from: "settled", to: "settled_upstream_failed" },
  /** The call had ended before its payment turned out to have landed. */
  collectLate: { from: "pending", to: "settled_upstream_failed" },
} as const satisfies Record<string, { from: SettlementStatus; to: SettlementStatus }>;

/** The state of a payment at the facilitator; `failed` only when this facilitator can no longer collect it. */
export type CollectionStatus = "claimed" | "sent" | "settled" | "failed";

export const COLLECTION_EVENTS = {
  /** A signed transaction is stored and may be broadcast from now on. */
  send: { from: ["claimed"], to: "sent" },
  /** One of our transactions moved the money. */
  settle: { from: ["sent"], to: "settled" },
  fail: { from: ["claimed", "sent"], to: "failed" },
  /** The block with the transaction is no longer part of the chain. */
  reorganise: { from: ["settled"], to: "sent" },
} as const satisfies Record<string, { from: readonly CollectionStatus[]; to: CollectionStatus }>;

export const INVOCATION_EVENTS = {
  /** A replica took a slot for the call; the upstream may see the call from now on. */
  claim: { from: "pending", to: "running" },
  /** The holder of the claim gives the call back, certain that nothing was sent upstream. */
  release: { from: "running", to: "pending" },
  succeed: { from: "running", to: "succeeded" },
  /** The upstream call failed, the replica died, or the caller cancelled the call. */
  fail: { from: "running", to: "failed" },
  /** The caller cancelled the call before it ran. */
  withdraw: { from: "pending", to: "failed" },
} as const satisfies Record<string, { from: InvocationStatus; to: InvocationStatus }>;

export const isEnded = (status: InvocationStatus): boolean => status === "succeeded" || status === "failed";

/** An agent's status, derived from its deletion and from whether it has an upstream. */
export function agentStatus(agent: { deleted_at: number | null; upstream_url: string | null }): AgentStatus {
  if (agent.deleted_at !== null) return "inactive";
  return agent.upstream_url === null ? "pending" : "active";
}
