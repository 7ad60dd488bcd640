// Every table, once, as a function of the column vocabulary. Keys, indexes and constraints stand in the
// migrations beside this file, since they differ between the databases. Times are milliseconds since the
// epoch; JSON is kept as text; every row of a tenant carries the tenant.
// In one file, since queries join what stands side by side here.
import { type Column, type GetColumnData, inArray, type SQL, sql } from "drizzle-orm";
import type { Hex } from "../src/core/bytes.ts";
import type {
  AgentStatus,
  CollectionStatus,
  ErrorClass,
  InvocationStatus,
  Mode,
  PolicyAction,
  Protocol,
  SettlementStatus,
} from "../src/core/states.ts";
import type { Columns } from "./columns.ts";

export type AuthType = "bearer" | "api_key" | "none";
export type CredentialSource = "managed" | "vault";
export type CountDimension = "all" | "agent" | "status" | "mode" | "settlement" | "error_class" | "model";

const writtenAt = (c: Columns) => ({ created_at: c.whole().notNull(), updated_at: c.whole().notNull() });

/** The body of a call. */
const bodyKey = (c: Columns) => ({
  invocation_id: c.text().notNull(),
  tenant: c.text().notNull(),
  kind: c.text().$type<BodyKind>().notNull(),
});

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
      ...writtenAt(c),
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
      /** JSON array of the hosts that the secret may go to, as core/host.ts spells them; null for any. */
      allowed_hosts: c.text(),
      ...writtenAt(c),
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
      /** The replica that goes on with it; null where it goes to the first that asks. */
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

    /** The gateways and facilitators that run. One that renews its lease is alive, and others take over from one that is not. */
    processes: c.table("processes", {
      id: c.text().notNull(),
      kind: c.text().$type<ProcessKind>().notNull(),
      /** By the database's own clock. */
      lease_until: c.whole().notNull(),
      /** Of a gateway: those it has, with spaces between them, and the version of the keyring that it goes by. */
      master_key_ids: c.text(),
      seen_version: c.whole(),
      /** Of a facilitator: those it can sign for, with spaces between them, and whether its nodes and its signer answer. */
      wallets: c.text(),
      is_able: c.flag(),
    }),
  };
}

function paymentTables(c: Columns) {
  return {
    settlementConfigs: c.table("settlement_configs", {
      tenant: c.text().notNull(),
      facilitator_url: c.text().notNull(),
      facilitator_credential_ref: c.text().notNull(),
      ...writtenAt(c),
    }),

    /**
     * The payments of calls. The key belongs to no tenant, for on chain an authorization is used once, by whom it
     * may be presented; every other look at a payment names the tenant.
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
      /** When the settlement is due to be tried (again), or to be confirmed; null when it is over. */
      next_attempt_at: c.whole(),
      /** Once it is collected: from when on no reorganisation changes by which transaction. */
      final_at: c.whole(),
      ...writtenAt(c),
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

export type BodyKind = "request" | "response";

/** Large bodies, which stand in parts. */
function bodyTables(c: Columns) {
  return {
    /** Large bodies: of a call that has not ended its whole request, then the first MiB of what is captured. */
    bodyParts: c.table("body_parts", {
      ...bodyKey(c),
      /** The place in the body: 0 for the first. All parts but the last are of one length. */
      n: c.whole().notNull(),
      bytes: c.bytes().notNull(),
    }),

    /** Bodies of which parts are to be removed: see gateway/invocations/bodies.ts. */
    orphanedParts: c.table("orphaned_parts", {
      ...bodyKey(c),
      /** This part goes, and all that follow. */
      first: c.whole().notNull(),
      /** When they may go, by the database's clock; 0: they are going. */
      due_at: c.whole().notNull(),
    }),
  };
}

/** Trust receipts. */
function receiptTables(c: Columns) {
  return {
    /** Calls whose end is final and whose receipt has not been made yet: written with the end itself. */
    receiptsDue: c.table("receipts_due", {
      tenant: c.text().notNull(),
      invocation_id: c.text().notNull(),
    }),

    /** The newest receipt of each tenant, which the next one names. It stays when old receipts are cleaned up. */
    receiptChains: c.table("receipt_chains", {
      tenant: c.text().notNull(),
      sequence: c.whole().notNull(),
      /** Of the compact JWS, in lower hex. */
      sha256: c.text().notNull(),
    }),

    receipts: c.table("receipts", {
      tenant: c.text().notNull(),
      /** The place in the tenant's chain: 1 for the first, then without a gap. */
      sequence: c.whole().notNull(),
      id: c.text().notNull(),
      invocation_id: c.text().notNull(),
      jws: c.text().notNull(),
    }),
  };
}

export type ProcessKind = "gateway" | "facilitator";

export type KeyPurpose = "issuer" | "receipts";

/** The keys, all of them wrapped, and what gateways must know of them: see src/keys. */
function keyTables(c: Columns) {
  return {
    /** The keys of each tenant under which its secrets' data keys are wrapped; themselves wrapped by a master key. */
    tenantKeys: c.table("tenant_keys", {
      tenant: c.text().notNull(),
      /** From 1: what else is derived comes from the first for good. The newest seals. */
      number: c.whole().notNull(),
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

    /** One row, about all keys. */
    keyring: c.table("keyring", {
      one: c.whole().notNull(),
      /** Rises with each change of the keys, so that gateways know when to read them again. */
      version: c.whole().notNull(),
      /** What new keys are wrapped with; null before the first key. */
      master_key_id: c.text(),
      /** What it is going to be, once every gateway has that key. */
      next_master_key_id: c.text(),
      /** From its change until no earlier master key wraps anything. */
      is_rotating: c.flag().notNull(),
      /** The newest of `tokenRevocations`, which a token carries that is made now. */
      revoked_at: c.whole().notNull(),
    }),

    /** Tokens of the local issuer that were made before a revocation are refused. */
    tokenRevocations: c.table("token_revocations", {
      tenant: c.text().notNull(),
      /** Empty for all users of the tenant. */
      user_name: c.text().notNull(),
      /** Later than that of each earlier revocation, also when the database's clock has gone back. */
      revoked_at: c.whole().notNull(),
    }),
  };
}

/** The key by which both services know a payment. Hex is lower case in all of its columns. */
function paymentKey(c: Columns) {
  return {
    chain_id: c.whole().notNull(),
    token: c.text().$type<Hex>().notNull(),
    payer: c.text().$type<Hex>().notNull(),
    nonce: c.text().$type<Hex>().notNull(),
  };
}

function facilitatorTables(c: Columns) {
  return {
    ...accountTables(c),

    /** How much of an account's daily ceiling is taken, by settled and open claims together. */
    facilitatorDays: c.table("facilitator_days", {
      account: c.text().notNull(),
      /** The UTC day, `2026-11-21`. */
      day: c.text().notNull(),
      reserved: c.text().notNull(),
      /** Wei that its reverted transactions have cost, on the day on which that was found. */
      gas_burned: c.text().notNull(),
      /** Wei that its transactions have cost, successful ones too, and that open payments hold; only where that has a bound. */
      gas_used: c.text().notNull(),
    }),

    /** Claimed payments: one row per authorization, stored before it can cost anything. */
    facilitatorPayments: c.table("facilitator_payments", {
      ...paymentKey(c),
      account: c.text().notNull(),
      status: c.text().$type<CollectionStatus>().notNull(),
      /** Names the attempt that made the claim: only that attempt, or a process that has read this, may send or undo it. */
      claim: c.text().notNull(),
      pay_to: c.text().$type<Hex>().notNull(),
      value: c.text().notNull(),
      valid_after: c.text().notNull(),
      valid_before: c.text().notNull(),
      signature: c.text().$type<Hex>().notNull(),
      /** JSON of the requirements, normalised: a retry must come with the same. */
      requirements: c.text().notNull(),
      /** The UTC day whose ceiling holds the reservation. */
      day: c.text().notNull(),
      /** Wei that a revert may cost, at the fees of the claim, if the payer's code can cause one; else 0. */
      gas_reserved: c.text().notNull(),
      /** Wei of its day's `gas_used` that it holds until its cost is known. */
      gas_held: c.text().notNull(),
      /** The UTC day on which a revert of it was found. */
      reverted_on: c.text(),
      /** Whose holder is to send it, and as it was simulated. Null in what an earlier version has claimed. */
      wallet: c.text().$type<Hex>(),
      gas_limit: c.text(),
      may_share: c.flag(),
      /** Requests for this payment. */
      attempts: c.whole().notNull(),
      /** The transaction that settled it, else the first one that was broadcast. */
      transaction_hash: c.text().$type<Hex>(),
      block_number: c.whole(),
      block_hash: c.text().$type<Hex>(),
      /** The exact reason of a failure, for the operator. */
      reason: c.text(),
      /** Who used the authorization instead of us. */
      foreign_transaction: c.text().$type<Hex>(),
      ...writtenAt(c),
      ended_at: c.whole(),
    }),

    /** Payments that were refused before a claim, for the operator: the last exact reason of each. */
    facilitatorRefusals: c.table("facilitator_refusals", {
      account: c.text().notNull(),
      payer: c.text().$type<Hex>().notNull(),
      nonce: c.text().$type<Hex>().notNull(),
      reason: c.text().notNull(),
      attempts: c.whole().notNull(),
      ...writtenAt(c),
    }),

    /** Every transaction ever signed, stored before it is broadcast. Several may share a wallet's nonce. */
    facilitatorTransactions: c.table("facilitator_transactions", {
      hash: c.text().$type<Hex>().notNull(),
      /** The sender's address, lower case. */
      wallet: c.text().$type<Hex>().notNull(),
      wallet_nonce: c.whole().notNull(),
      /** 0 for the first at its wallet nonce, then one more for each replacement. */
      replacement: c.whole().notNull(),
      /** The payment that it makes; both null for one that makes several, or only fills a gap. */
      payer: c.text().$type<Hex>(),
      nonce: c.text().$type<Hex>(),
      raw: c.text().$type<Hex>().notNull(),
      gas: c.text().notNull(),
      max_fee: c.text().notNull(),
      max_priority_fee: c.text().notNull(),
      /** Open until its wallet nonce is used in a block that is deep enough. */
      open: c.flag().notNull(),
      /** Wei that its revert cost, once that is counted; else null. */
      gas_burned: c.text(),
      /** The chain's newest block when it was stored. */
      stored_at_block: c.whole().notNull(),
      created_at: c.whole().notNull(),
    }),

    /** The payments of each transaction that makes several of them. */
    facilitatorTransactionPayments: c.table("facilitator_transaction_payments", {
      hash: c.text().$type<Hex>().notNull(),
      payer: c.text().$type<Hex>().notNull(),
      nonce: c.text().$type<Hex>().notNull(),
      /** What the transaction's gas limit holds for this payment. */
      gas: c.text().notNull(),
      /** Wei that its failure there cost, once that is counted; else null. */
      gas_burned: c.text(),
    }),

    /** Which facilitator works for a wallet. */
    facilitatorWallets: c.table("facilitator_wallets", {
      wallet: c.text().$type<Hex>().notNull(),
      /** Empty when it was given up. */
      holder: c.text().notNull(),
      /** Rises whenever the wallet changes hands, so that a holder of before can tell. */
      token: c.whole().notNull(),
    }),
  };
}

function accountTables(c: Columns) {
  return {
    facilitatorAccounts: c.table("facilitator_accounts", {
      name: c.text().notNull(),
      enabled: c.flag().notNull(),
      /** Smallest units as a decimal; null for the deployment's default. */
      max_per_transaction: c.text(),
      daily_ceiling: c.text(),
      ...writtenAt(c),
    }),

    /** The client certificates of the accounts; an account may have several, so that they rotate without a gap. */
    facilitatorCertificates: c.table("facilitator_certificates", {
      /** SHA-256 of the certificate, lower-case hex. */
      fingerprint: c.text().notNull(),
      account: c.text().notNull(),
      created_at: c.whole().notNull(),
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

/**
 * A call waits while its payment may still land or fail. The index of pending calls has this very text, since no database
 * would use a partial index for another one.
 */
export function paidFor({ settlement_status }: Tables["openInvocations"]) {
  return sql`coalesce(${settlement_status}, '') <> 'pending'`;
}

/**
 * `column in (…)`, with the last value again and again up to a power of two: each number of values is a statement, which
 * Postgres keeps prepared on every connection.
 */
export function oneOf<C extends Column>(column: C, values: readonly GetColumnData<C, "raw">[]): SQL {
  const length = values.length === 0 ? 0 : 2 ** Math.ceil(Math.log2(values.length));
  return inArray(
    column,
    Array.from({ length }, (_, at) => values[Math.min(at, values.length - 1)] as (typeof values)[number]),
  );
}
