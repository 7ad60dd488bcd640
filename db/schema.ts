// Every table, once, as a function of the column vocabulary. Keys, indexes and constraints stand in the
// migrations beside this file, since they differ between the databases. Times are milliseconds since the
// epoch; JSON is kept as text; every row of a tenant carries the tenant.
// In one file, since queries join what stands side by side here.
import type {
  AgentStatus,
  ErrorClass,
  InvocationStatus,
  Mode,
  PolicyAction,
  Protocol,
  SettlementStatus,
} from "../src/core/states.ts";
import { bodyTables } from "./body-schema.ts";
import type { Columns } from "./columns.ts";
import { facilitatorTables, paymentKey } from "./facilitator-schema.ts";
import { keyTables } from "./key-schema.ts";
import { receiptTables } from "./receipt-schema.ts";

export type AuthType = "bearer" | "api_key" | "none";
export type CredentialSource = "managed" | "vault";
export type CountDimension = "all" | "agent" | "status" | "mode" | "settlement" | "error_class" | "model";

function catalogTables(c: Columns) {
  return {
    agents: c.table("agents", {
      tenant: c.text().notNull(),
      id: c.text().notNull(),
      name: c.text().notNull(),
      description: c.text().notNull(),
      /** JSON array of strings. */
      tags: c.text(),
      /** JSON object. */
      metadata: c.text().notNull(),
      upstream_url: c.text(),
      credential_ref: c.text(),
      suspended: c.flag().notNull(),
      invocation_rate_limit: c.real(),
      invocation_burst: c.whole(),
      /** Rises with every PATCH of the two fields above, so that each replica starts a full bucket. */
      rate_revision: c.whole().notNull(),
      emit_receipts: c.flag().notNull(),
      capture_body: c.flag().notNull(),
      protocol: c.text().$type<Protocol>().notNull(),
      mcp_transport: c.text().$type<"streamable_http">(),
      mcp_protocol_version: c.text(),
      /** JSON of the Pricing object. */
      pricing: c.text(),
      created_by: c.text().notNull(),
      created_at: c.whole().notNull(),
      updated_at: c.whole().notNull(),
      /** Set by DELETE: the agent is inactive, and its name is free. */
      deleted_at: c.whole(),
    }),

    credentials: c.table("credentials", {
      tenant: c.text().notNull(),
      id: c.text().notNull(),
      name: c.text().notNull(),
      auth_type: c.text().$type<AuthType>().notNull(),
      source: c.text().$type<CredentialSource>().notNull(),
      masked_hint: c.text(),
      vault_ref: c.text(),
      version: c.whole().notNull(),
      /** The sealed secret of a managed credential: see keys/envelope.ts for its form. */
      sealed: c.bytes(),
      /** Which of its tenant's keys wraps its data key. */
      key_number: c.whole().notNull(),
      /** JSON array of the hosts that the secret may go to, as core/allowed-hosts.ts spells them; null for any. */
      allowed_hosts: c.text(),
      created_at: c.whole().notNull(),
      updated_at: c.whole().notNull(),
    }),
  };
}

function listTables(c: Columns) {
  return {
    /**
     * How many credentials a tenant has, and how many agents each of its lists. Read in the very write that changes
     * them, so there is one row each, unlike the totals of invocations.
     */
    catalogTotals: c.table("catalog_totals", {
      tenant: c.text().notNull(),
      list: c.text().notNull(),
      count: c.whole().notNull(),
    }),

    /** The agents of each answer to "which status, protocol and tag". */
    agentLists: c.table("agent_lists", {
      tenant: c.text().notNull(),
      /** See gateway/agents/lists.ts. */
      list: c.text().notNull(),
      id: c.text().notNull(),
    }),

    /** What a search reads of an agent: little, and the live ones in a row. */
    agentSearch: c.table("agent_search", {
      tenant: c.text().notNull(),
      inactive: c.flag().notNull(),
      id: c.text().notNull(),
      status: c.text().$type<AgentStatus>().notNull(),
      protocol: c.text().$type<Protocol>().notNull(),
      /** Of the two texts, in bytes. */
      size: c.whole().notNull(),
      tags: c.text(),
      /** Name and description, folded for the search that knows no case: see gateway/agents/lists.ts. */
      text: c.text().notNull(),
    }),
  };
}

/** `created_at` is not a column: it is the time inside the ID, so that history orders and filters by ID. */
function invocationColumns(c: Columns) {
  return {
    tenant: c.text().notNull(),
    id: c.text().notNull(),
    agent_id: c.text().notNull(),
    /** The user claim of the caller. */
    caller: c.text().notNull(),
    mode: c.text().$type<Mode>().notNull(),
    status: c.text().$type<InvocationStatus>().notNull(),
    error_class: c.text().$type<ErrorClass>(),
    model: c.text(),
    mcp_method: c.text(),
    mcp_tool: c.text(),
    payment_network: c.text(),
    payment_asset: c.text(),
    payment_amount: c.text(),
    payment_payer: c.text(),
    payment_nonce: c.text(),
    settlement_status: c.text().$type<SettlementStatus>(),
    /** JSON of the settlement sub-record without its status. */
    settlement: c.text(),
    upstream_status: c.whole(),
    latency_ms: c.whole(),
    ttft_ms: c.whole(),
    req_size: c.whole(),
    resp_size: c.whole(),
    /** Of the whole bodies, in lower hex, where a receipt will say them. */
    req_sha256: c.text(),
    resp_sha256: c.text(),
    response_content_type: c.text(),
    response_truncated: c.flag().notNull(),
    body_captured: c.flag().notNull(),
    emit_receipt: c.flag().notNull(),
    /** The replica that runs the call; null while pending. */
    owner: c.text(),
    /** The replica that accepted the call; null where there are no others. */
    accepted_by: c.text(),
    /** The token of the attempt that claimed the call, also after its end; null when nobody ever did. */
    claim: c.text(),
    updated_at: c.whole().notNull(),
    completed_at: c.whole(),
  };
}

/** What is known of a call before its end. */
function openColumns(c: Columns) {
  const { error_class, upstream_status, latency_ms, ttft_ms, resp_size, ...others } = invocationColumns(c);
  const { resp_sha256, response_content_type, response_truncated, completed_at, status, ...open } = others;
  return { ...open, status: c.text().$type<"pending" | "running">().notNull() };
}

function invocationTables(c: Columns) {
  return {
    /** Calls that have not ended, in the order of their arrival, with what is needed to make them. */
    openInvocations: c.table("open_invocations", {
      ...openColumns(c),
      /** JSON of the call as accepted: agent snapshot and headers. */
      call: c.text().notNull(),
      /** The whole body while it is small; null for a large one, which stands in `bodyParts`. */
      request: c.bytes(),
    }),

    /** Calls that have ended. A row is written once, with the end, and changes when its payment turns out later. */
    endedInvocations: c.table("ended_invocations", invocationColumns(c)),

    /** Both of them as one, each call once: a view, for readers only. */
    invocations: c.table("invocations", invocationColumns(c)),

    /** The captured bodies of ended calls, as far as they are small: large ones stand in `bodyParts`. */
    invocationBodies: c.table("invocation_bodies", {
      tenant: c.text().notNull(),
      invocation_id: c.text().notNull(),
      request: c.bytes(),
      response: c.bytes(),
    }),

    ...bodyTables(c),

    /** Exact totals of history pages. Rows are sharded so that replicas do not queue on one row. */
    invocationCounts: c.table("invocation_counts", {
      tenant: c.text().notNull(),
      dimension: c.text().$type<CountDimension>().notNull(),
      value: c.text().notNull(),
      /** The hour since the epoch in which its calls were accepted, or the first of several; 0 for all that are older. */
      period: c.whole().notNull(),
      shard: c.whole().notNull(),
      count: c.whole().notNull(),
    }),

    idempotencyKeys: c.table("idempotency_keys", {
      tenant: c.text().notNull(),
      caller: c.text().notNull(),
      agent_id: c.text().notNull(),
      key: c.text().notNull(),
      body_sha256: c.text().notNull(),
      invocation_id: c.text().notNull(),
      expires_at: c.whole().notNull(),
      /** See gateway/invocations/idempotency.ts. */
      slot: c.whole().notNull(),
    }),

    /**
     * Calls that were refused to their caller while nobody could say whether they had been stored. A row of such a call
     * that appears later is removed, and the call is never made.
     */
    refusedCalls: c.table("refused_calls", {
      tenant: c.text().notNull(),
      id: c.text().notNull(),
      /** The token of the claim in the same write; null for a call that was stored pending. */
      claim: c.text(),
      created_at: c.whole().notNull(),
    }),

    /** When work that one replica does for all is due again. */
    jobLeases: c.table("job_leases", {
      job: c.text().notNull(),
      /** By the database's own clock. */
      next_at: c.whole().notNull(),
      /** The replica that goes on with it; null where it goes to whoever asks first. */
      holder: c.text(),
    }),

    /** At most one row: the last time that this database was restored to an older state. */
    restoration: c.table("restoration", {
      one: c.whole().notNull(),
      /** By the database's own clock. Nothing of before that time may have come later. */
      restored_at: c.whole().notNull(),
      /** Whether what the copy had under way has been settled. */
      is_done: c.flag().notNull(),
    }),

    /** A replica that renews its lease is alive; the running calls of one that is not have ended. */
    replicas: c.table("replicas", {
      id: c.text().notNull(),
      /** By the database's own clock. */
      lease_until: c.whole().notNull(),
      /** The calls of any one agent and path that it may run without asking the others; null when it is gone. */
      agent_base: c.whole(),
    }),

    /** What replicas may run of an agent's calls beyond that, and what they would need. */
    agentPlaces: c.table("agent_places", {
      agent_id: c.text().notNull(),
      mode: c.text().$type<Mode>().notNull(),
      replica: c.text().notNull(),
      tenant: c.text().notNull(),
      granted: c.whole().notNull(),
      wanted: c.whole().notNull(),
    }),
  };
}

function paymentTables(c: Columns) {
  return {
    settlementConfigs: c.table("settlement_configs", {
      tenant: c.text().notNull(),
      facilitator_url: c.text().notNull(),
      facilitator_credential_ref: c.text().notNull(),
      created_at: c.whole().notNull(),
      updated_at: c.whole().notNull(),
    }),

    /**
     * The payments of calls. The key belongs to no tenant, for on chain an authorization is used once whoever
     * presents it; every other look at a payment names the tenant.
     */
    payments: c.table("payments", {
      ...paymentKey(c),
      tenant: c.text().notNull(),
      invocation_id: c.text().notNull(),
      agent_id: c.text().notNull(),
      caller: c.text().notNull(),
      body_sha256: c.text().notNull(),
      /** What the payer signed: the EIP-712 digest of the authorization, in hex. */
      authorization_digest: c.text().notNull(),
      /** The version of x402 that carried it. */
      x402_version: c.whole().notNull(),
      /** Unix seconds. */
      valid_before: c.whole().notNull(),
      /** The facilitator at the time of the call; null when the tenant had none. */
      facilitator_url: c.text(),
      facilitator_credential_ref: c.text(),
      /** JSON of the SettleRequest, until the outcome is certain. */
      settle_request: c.text(),
      /** Attempts that were begun; the number of the present one is the token of its lease. */
      attempts: c.whole().notNull(),
      /** How many of them ended and certainly sent nothing. */
      unsent_attempts: c.whole().notNull(),
      /** Written right before the first attempt that may have sent something; null: nothing has left the gateway. */
      sent_at: c.whole(),
      /** When the first attempt ended whose outcome nobody knows. */
      unknown_since: c.whole(),
      /** How long the facilitator has been asked since then, without times when the gateway was down. */
      asked_ms: c.whole().notNull(),
      /** The upstream's credential, until the call has ended: it can't be deleted before. */
      call_credential_ref: c.text(),
      /** When the settlement is due to be tried (again); null when it is over. */
      next_attempt_at: c.whole(),
      created_at: c.whole().notNull(),
      updated_at: c.whole().notNull(),
    }),
  };
}

function policyTables(c: Columns) {
  return {
    policies: c.table("policies", {
      tenant: c.text().notNull(),
      /** 1, and one more with each replacement. */
      version: c.whole().notNull(),
      default_action: c.text().$type<PolicyAction>().notNull(),
      /** A column of its own, so that it is known even when the rules cannot be read. */
      on_error: c.text().$type<PolicyAction>().notNull(),
      /** JSON array of the rules as they were put. */
      rules: c.text().notNull(),
      updated_at: c.whole().notNull(),
    }),

    /** `created_at` is not a column: it is the time inside the ID. */
    policyDecisions: c.table("policy_decisions", {
      tenant: c.text().notNull(),
      id: c.text().notNull(),
      agent_id: c.text().notNull(),
      protocol: c.text().$type<Protocol>().notNull(),
      mcp_tool: c.text(),
      action: c.text().$type<PolicyAction>().notNull(),
      /** Null when the action came from default or on_error. */
      matched_rule: c.whole(),
      reason: c.text().notNull(),
    }),
  };
}

export function defineSchema(c: Columns) {
  return {
    ...keyTables(c),
    ...catalogTables(c),
    ...listTables(c),
    ...invocationTables(c),
    ...paymentTables(c),
    ...policyTables(c),
    ...receiptTables(c),
    ...facilitatorTables(c),
  };
}

export type Tables = ReturnType<typeof defineSchema>;
