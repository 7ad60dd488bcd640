// Every table, once, as a function of the column vocabulary. Keys, indexes and constraints stand in the
// migrations beside this file, for they differ between the databases. Times are milliseconds since the
// epoch; JSON is kept as text; every row of a tenant carries the tenant.
import type { ErrorClass, InvocationStatus, Mode, Protocol, SettlementStatus } from "../src/core/states.ts";
import type { Columns } from "./columns.ts";

export type AuthType = "bearer" | "api_key" | "none";
export type CredentialSource = "managed" | "vault";
export type KeyPurpose = "issuer" | "receipts";
export type CountDimension = "all" | "agent" | "status" | "mode" | "settlement" | "error_class" | "model";

function keyTables(c: Columns) {
  return {
    /** The key of each tenant under which its secrets' data keys are wrapped; itself wrapped by the master key. */
    tenantKeys: c.table("tenant_keys", {
      tenant: c.text().notNull(),
      wrapped_key: c.bytes().notNull(),
      /** Which master key wrapped it: the first 16 hex digits of that key's SHA-256. */
      master_key_id: c.text().notNull(),
      created_at: c.whole().notNull(),
    }),

    /** Ed25519 keys of the local issuer and of the trust receipts, the private half wrapped by the master key. */
    signingKeys: c.table("signing_keys", {
      kid: c.text().notNull(),
      purpose: c.text().$type<KeyPurpose>().notNull(),
      public_jwk: c.text().notNull(),
      wrapped_private_key: c.bytes().notNull(),
      master_key_id: c.text().notNull(),
      created_at: c.whole().notNull(),
      retired_at: c.whole(),
    }),
  };
}

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
      /** Name and description, folded for the search that knows no case: see gateway/agents/search.ts. */
      search_text: c.text().notNull(),
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
      created_at: c.whole().notNull(),
      updated_at: c.whole().notNull(),
    }),
  };
}

function invocationTables(c: Columns) {
  return {
    /** `created_at` is not a column: it is the time inside the ID, so that history orders and filters by ID. */
    invocations: c.table("invocations", {
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
      /** JSON of the settlement sub-record. */
      settlement: c.text(),
      upstream_status: c.whole(),
      latency_ms: c.whole(),
      ttft_ms: c.whole(),
      req_size: c.whole(),
      resp_size: c.whole(),
      response_content_type: c.text(),
      response_truncated: c.flag().notNull(),
      body_captured: c.flag().notNull(),
      emit_receipt: c.flag().notNull(),
      /** The replica that runs the call; null while pending. */
      owner: c.text(),
      updated_at: c.whole().notNull(),
      completed_at: c.whole(),
    }),

    /** What is needed to make the call, until it has been made; then the captured bodies, if capture is on. */
    invocationBodies: c.table("invocation_bodies", {
      tenant: c.text().notNull(),
      invocation_id: c.text().notNull(),
      /** JSON of the call as accepted (agent snapshot and headers); null once the call has ended. */
      call: c.text(),
      /** The whole body until the call has ended, then its first MiB. */
      request: c.bytes(),
      response: c.bytes(),
    }),

    /** Exact totals of history pages. Rows are sharded so that replicas do not queue on one row. */
    invocationCounts: c.table("invocation_counts", {
      tenant: c.text().notNull(),
      dimension: c.text().$type<CountDimension>().notNull(),
      value: c.text().notNull(),
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
    }),

    /** A replica that renews its lease is alive; the running calls of one that is not have ended. */
    replicas: c.table("replicas", {
      id: c.text().notNull(),
      lease_until: c.whole().notNull(),
    }),
  };
}

export function defineSchema(c: Columns) {
  return { ...keyTables(c), ...catalogTables(c), ...invocationTables(c) };
}

export type Tables = ReturnType<typeof defineSchema>;
