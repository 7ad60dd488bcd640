// Every table, defined once for both databases by the column types of columns.ts, in one file because queries join tables. Keys,
// indexes and constraints are in the migrations, because the databases differ in them. Times are milliseconds since the epoch
// unless a comment says otherwise, JSON is stored as text, and every row of a tenant has a `tenant` column.
import { type Column, type GetColumnData, inArray, type SQL, sql } from "drizzle-orm";
import type { Hex } from "../src/core/bytes.ts";
import type * as states from "../src/core/states.ts";
import type { Columns } from "./columns.ts";

export type AuthType = "bearer" | "api_key" | "none";
/** The consumers of the outbox. */
export const OUTBOX_KINDS = ["receipt"] as const;
export type OutboxKind = (typeof OUTBOX_KINDS)[number];
export type CredentialSource = "managed" | "vault";
export type CountDimension = "all" | "agent" | "status" | "mode" | "settlement" | "error_class" | "model";

const writtenAt = (c: Columns) => ({ created_at: c.whole().notNull(), updated_at: c.whole().notNull() });

const rowKey = (c: Columns) => ({ tenant: c.text().notNull(), id: c.text().notNull() });

const bodyKey = (c: Columns) => ({
  invocation_id: c.text().notNull(),
  tenant: c.text().notNull(),
  kind: c.text().$type<BodyKind>().notNull(),
});

function catalogTables(c: Columns) {
  return {
    agents: c.table("agents", {
      ...rowKey(c),
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
      protocol: c.text().$type<states.Protocol>().notNull(),
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
      ...rowKey(c),
      name: c.text().notNull(),
      auth_type: c.text().$type<AuthType>().notNull(),
      source: c.text().$type<CredentialSource>().notNull(),
      masked_hint: c.text(),
      vault_ref: c.text(),
      version: c.whole().notNull(),
      /** The sealed secret of a managed credential: see keys/envelope.ts for its form. */
      sealed: c.bytes(),
      /** The number of the tenant key that wraps the secret's data key. */
      key_number: c.whole().notNull(),
      /** JSON array of the hosts that the secret may go to, as core/host.ts writes them; null for any. */
      allowed_hosts: c.text(),
      ...writtenAt(c),
    }),
  };
}

function listTables(c: Columns) {
  return {
    /**
     * How many credentials a tenant has, and how many agents are in each of its lists. They are read in the write that changes
     * them, so there is one row each, unlike the sharded totals of invocations.
     */
    catalogTotals: c.table("catalog_totals", {
      tenant: c.text().notNull(),
      list: c.text().notNull(),
      count: c.whole().notNull(),
    }),

    /** Which agents are in which list. There is a list for each status, protocol and tag. */
    agentLists: c.table("agent_lists", {
      tenant: c.text().notNull(),
      /** See gateway/agents/lists.ts. */
      list: c.text().notNull(),
      id: c.text().notNull(),
    }),

    /** What a search reads of an agent: short rows, with the active agents stored together. */
    agentSearch: c.table("agent_search", {
      tenant: c.text().notNull(),
      inactive: c.flag().notNull(),
      id: c.text().notNull(),
      status: c.text().$type<states.AgentStatus>().notNull(),
      protocol: c.text().$type<states.Protocol>().notNull(),
      /** Bytes of `tags` and `text` together. */
      size: c.whole().notNull(),
      tags: c.text(),
      /** Name and description, case-folded for the case-insensitive search: see gateway/agents/lists.ts. */
      text: c.text().notNull(),
    }),
  };
}

/** The columns of an invocation. `created_at` is the time inside the ID, so history orders and filters by ID. */
function invocationColumns(c: Columns) {
  return {
    ...rowKey(c),
    agent_id: c.text().notNull(),
    /** The user claim of the caller. */
    caller: c.text().notNull(),
    mode: c.text().$type<states.Mode>().notNull(),
    status: c.text().$type<states.InvocationStatus>().notNull(),
    error_class: c.text().$type<states.ErrorClass>(),
    /** Also null for calls that were ended by a program older than schema version 3. */
    error_detail: c.text().$type<states.ErrorDetail>(),
    model: c.text(),
    mcp_method: c.text(),
    mcp_tool: c.text(),
    payment_network: c.text(),
    payment_asset: c.text(),
    payment_amount: c.text(),
    payment_payer: c.text(),
    payment_nonce: c.text(),
    settlement_status: c.text().$type<states.SettlementStatus>(),
    /** JSON of the settlement sub-record, without its status. */
    settlement: c.text(),
    upstream_status: c.whole(),
    latency_ms: c.whole(),
    ttft_ms: c.whole(),
    req_size: c.whole(),
    resp_size: c.whole(),
    /** SHA-256 of the whole bodies, in lower-case hex, for calls that get a receipt. */
    req_sha256: c.text(),
    resp_sha256: c.text(),
    response_content_type: c.text(),
    response_truncated: c.flag().notNull(),
    body_captured: c.flag().notNull(),
    /** The kinds of outbox rows that are still to be written for the call, with spaces between; null for none. */
    outbox: c.text(),
    /** The replica that runs the call; null while pending. */
    owner: c.text(),
    /** The replica that accepted the call; null where there is only one. */
    accepted_by: c.text(),
    /** The token of the attempt that claimed the call, kept after its end; null when it was never claimed. */
    claim: c.text(),
    updated_at: c.whole().notNull(),
    completed_at: c.whole(),
  };
}

/** The columns that are known before a call's end. */
function openColumns(c: Columns) {
  const { error_class, error_detail, upstream_status, latency_ms, ttft_ms, resp_size, ...others } =
    invocationColumns(c);
  const { resp_sha256, response_content_type, response_truncated, completed_at, status, ...open } = others;
  return { ...open, status: c.text().$type<"pending" | "running">().notNull() };
}

function invocationTables(c: Columns) {
  return {
    /** Calls that have not ended, in order of arrival, with all that is needed to make them. */
    openInvocations: c.table("open_invocations", {
      ...openColumns(c),
      /** JSON of the call as accepted: a snapshot of the agent, and the headers. */
      call: c.text().notNull(),
      /** The whole body if it is small; null for a large one, which is in `bodyParts`. */
      request: c.bytes(),
    }),

    /** Calls that have ended. A row is written at the end, and updated when the outcome of its payment comes later. */
    endedInvocations: c.table("ended_invocations", invocationColumns(c)),

    /** Open and ended calls together, each call once: a view, for reading only. */
    invocations: c.table("invocations", invocationColumns(c)),

    /** The captured bodies of ended calls, if they are small: large ones are in `bodyParts`. */
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

    /** Calls refused while it was unknown whether they were stored. One that appears later is removed and never made. */
    refusedCalls: c.table("refused_calls", {
      ...rowKey(c),
      /** The token of the claim in the same write; null for a call that was stored pending. */
      claim: c.text(),
      created_at: c.whole().notNull(),
    }),

    /** Leases of the work that one replica does for all: see storage/leases.ts. */
    jobLeases: c.table("job_leases", {
      job: c.text().notNull(),
      /** When the work is due again, by the database's clock. */
      next_at: c.whole().notNull(),
      /** The replica that keeps the lease; null when the first that asks gets it. */
      holder: c.text(),
    }),

    /** At most one row: the last time that this database was restored to an older state. */
    restoration: c.table("restoration", {
      one: c.whole().notNull(),
      /** By the database's clock. Whatever was open at that time may have happened since. */
      restored_at: c.whole().notNull(),
      /** Whether the calls and payments that the copy had open have been settled. */
      is_done: c.flag().notNull(),
    }),

    /** The running gateways and facilitators. One whose lease holds is alive; others take over after its expiry. */
    processes: c.table("processes", {
      id: c.text().notNull(),
      kind: c.text().$type<ProcessKind>().notNull(),
      /** By the database's clock. */
      lease_until: c.whole().notNull(),
      /** Of a gateway: the master keys that it has, separated by spaces, and the keyring version that it has read. */
      master_key_ids: c.text(),
      seen_version: c.whole(),
      /** Of a facilitator: the wallets that it can sign for, separated by spaces, and whether its nodes and signer answer. */
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
     * The payments of calls. The key spans tenants, since an authorization can be used only once on
     * chain, for one tenant among all; every other query of payments names the tenant.
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
      /** The version of x402 in which the payment came. */
      x402_version: c.whole().notNull(),
      /** Unix seconds. */
      valid_before: c.whole().notNull(),
      /** The facilitator at the time of the call; null when the tenant had none. */
      facilitator_url: c.text(),
      facilitator_credential_ref: c.text(),
      /** JSON of the SettleRequest, until the outcome is certain. */
      settle_request: c.text(),
      /** Attempts begun so far; the number of the current one is the fencing token of its lease. */
      attempts: c.whole().notNull(),
      /** How many attempts ended and certainly sent nothing. */
      unsent_attempts: c.whole().notNull(),
      /** Set right before the payment may first be sent; null: nothing has left the gateway. */
      sent_at: c.whole(),
      /** When the first attempt with an unknown outcome ended. */
      unknown_since: c.whole(),
      /** How long the facilitator has been asked since then, not counting time in which the gateway was down. */
      asked_ms: c.whole().notNull(),
      /** The upstream's credential, which can't be deleted before the call has ended. */
      call_credential_ref: c.text(),
      /** When the next attempt or confirmation is due; null when the settlement is over. */
      next_attempt_at: c.whole(),
      /** Of a collected payment: when it is final, so that no reorganisation changes its transaction any more. */
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
      default_action: c.text().$type<states.PolicyAction>().notNull(),
      /** A column of its own, so that it can be used even when the rules can't be parsed. */
      on_error: c.text().$type<states.PolicyAction>().notNull(),
      /** JSON array of the rules as they were put. */
      rules: c.text().notNull(),
      updated_at: c.whole().notNull(),
    }),

    /** `created_at` is the time inside the ID. */
    policyDecisions: c.table("policy_decisions", {
      ...rowKey(c),
      agent_id: c.text().notNull(),
      protocol: c.text().$type<states.Protocol>().notNull(),
      mcp_tool: c.text(),
      action: c.text().$type<states.PolicyAction>().notNull(),
      /** Null when the action came from default or on_error. */
      matched_rule: c.whole(),
      reason: c.text().notNull(),
    }),
  };
}

export type BodyKind = "request" | "response";

function bodyTables(c: Columns) {
  return {
    /** Parts of large bodies: the whole request of an open call, and the first MiB of captured bodies of an ended one. */
    bodyParts: c.table("body_parts", {
      ...bodyKey(c),
      /** The part's position in the body, from 0. All parts but the last have the same length. */
      n: c.whole().notNull(),
      bytes: c.bytes().notNull(),
    }),

    /** Bodies of which parts are to be removed: see gateway/invocations/bodies.ts. */
    orphanedParts: c.table("orphaned_parts", {
      ...bodyKey(c),
      /** The first part to remove: all later ones go too. */
      first: c.whole().notNull(),
      /** When the parts may be removed, by the database's clock; 0: removal has begun. */
      due_at: c.whole().notNull(),
    }),
  };
}

function receiptTables(c: Columns) {
  return {
    /** What consumers are to be told of a call: written when its end and its settlement are final, deleted by the consumer. */
    outbox: c.table("outbox", {
      kind: c.text().$type<OutboxKind>().notNull(),
      tenant: c.text().notNull(),
      invocation_id: c.text().notNull(),
    }),

    /** The newest receipt of each tenant, to which the next one links. It stays when old receipts are cleaned up. */
    receiptChains: c.table("receipt_chains", {
      tenant: c.text().notNull(),
      sequence: c.whole().notNull(),
      /** SHA-256 of the compact JWS, in lower-case hex. */
      sha256: c.text().notNull(),
    }),

    receipts: c.table("receipts", {
      tenant: c.text().notNull(),
      /** The position in the tenant's chain, from 1 and without gaps. */
      sequence: c.whole().notNull(),
      id: c.text().notNull(),
      invocation_id: c.text().notNull(),
      jws: c.text().notNull(),
    }),
  };
}

export type ProcessKind = "gateway" | "facilitator";

export type KeyPurpose = "issuer" | "receipts";

/** The keys, all wrapped, and the state by which gateways share them: see src/keys. */
function keyTables(c: Columns) {
  return {
    /** The keys of each tenant, which wrap its secrets' data keys and are wrapped by a master key. */
    tenantKeys: c.table("tenant_keys", {
      tenant: c.text().notNull(),
      /** From 1. The newest key seals new secrets; other keys are always derived from the first one. */
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

    /** The state of all keys, in one row. */
    keyring: c.table("keyring", {
      one: c.whole().notNull(),
      /** Rises with each change of the keys, so that gateways know when to read them again. */
      version: c.whole().notNull(),
      /** The master key that wraps new keys; null before the first key. */
      master_key_id: c.text(),
      /** The master key of a rotation that begins once every gateway has it. */
      next_master_key_id: c.text(),
      /** True from the change of `master_key_id` until no earlier master key wraps anything. */
      is_rotating: c.flag().notNull(),
      /** The newest time in `tokenRevocations`, which new tokens carry. */
      revoked_at: c.whole().notNull(),
    }),

    /** Revocations: tokens of the local issuer from before one are refused. */
    tokenRevocations: c.table("token_revocations", {
      tenant: c.text().notNull(),
      /** Empty for all users of the tenant. */
      user_name: c.text().notNull(),
      /** Later than every earlier revocation's, even when the database's clock has gone back. */
      revoked_at: c.whole().notNull(),
    }),
  };
}

/** The primary key of a payment in both services. Hex is lower case in all of these columns. */
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

    /** How much of an account's daily ceiling is used, by settled and open payments together. */
    facilitatorDays: c.table("facilitator_days", {
      account: c.text().notNull(),
      /** The UTC day, `2026-11-21`. */
      day: c.text().notNull(),
      reserved: c.text().notNull(),
      /** Wei that the account's reverted transactions have cost, counted on the day on which the revert was found. */
      gas_burned: c.text().notNull(),
      /** Wei that all its transactions have cost and open payments reserve; counted only where there is a limit. */
      gas_used: c.text().notNull(),
    }),

    /** Claimed payments: one row per authorization, stored before it can cost anything. */
    facilitatorPayments: c.table("facilitator_payments", {
      ...paymentKey(c),
      account: c.text().notNull(),
      status: c.text().$type<states.CollectionStatus>().notNull(),
      /** Token of the attempt that claimed it: only that attempt, or a process that has read the token, may send or undo it. */
      claim: c.text().notNull(),
      pay_to: c.text().$type<Hex>().notNull(),
      value: c.text().notNull(),
      valid_after: c.text().notNull(),
      valid_before: c.text().notNull(),
      signature: c.text().$type<Hex>().notNull(),
      /** JSON of the requirements, normalised: a retry must have equal ones. */
      requirements: c.text().notNull(),
      /** The UTC day whose ceiling holds the reservation. */
      day: c.text().notNull(),
      /** Wei that a revert may cost, at the fees of the claim, if the payer's code can cause one; else 0. */
      gas_reserved: c.text().notNull(),
      /** Wei reserved in its day's `gas_used` until the payment's cost is known. */
      gas_held: c.text().notNull(),
      /** The UTC day on which its revert was found. */
      reverted_on: c.text(),
      /** The wallet whose holder sends the payment. It and the simulation's result below are null in claims of earlier versions. */
      wallet: c.text().$type<Hex>(),
      gas_limit: c.text(),
      may_share: c.flag(),
      /** Requests to settle this payment so far. */
      attempts: c.whole().notNull(),
      /** The transaction that settled it, else the first one that was broadcast. */
      transaction_hash: c.text().$type<Hex>(),
      block_number: c.whole(),
      block_hash: c.text().$type<Hex>(),
      /** The exact reason of a failure, for the operator. */
      reason: c.text(),
      /** The transaction of someone else that used the authorization. */
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
      /** 0 for the first transaction at its wallet nonce, then one more for each replacement. */
      replacement: c.whole().notNull(),
      /** The payment that it makes; both null for a transaction that makes several, or only fills a gap. */
      payer: c.text().$type<Hex>(),
      nonce: c.text().$type<Hex>(),
      raw: c.text().$type<Hex>().notNull(),
      gas: c.text().notNull(),
      max_fee: c.text().notNull(),
      max_priority_fee: c.text().notNull(),
      /** Open until its wallet nonce is used in a block that is deep enough. */
      open: c.flag().notNull(),
      /** Wei that the revert cost, once it has been counted; else null. */
      gas_burned: c.text(),
      /** The chain's newest block when it was stored. */
      stored_at_block: c.whole().notNull(),
      created_at: c.whole().notNull(),
    }),

    /** The payments of transactions that make several. */
    facilitatorTransactionPayments: c.table("facilitator_transaction_payments", {
      hash: c.text().$type<Hex>().notNull(),
      payer: c.text().$type<Hex>().notNull(),
      nonce: c.text().$type<Hex>().notNull(),
      /** This payment's part of the transaction's gas limit. */
      gas: c.text().notNull(),
      /** Wei that the payment's failure cost in this transaction, once it has been counted; else null. */
      gas_burned: c.text(),
    }),

    /** Which facilitator works for a wallet. */
    facilitatorWallets: c.table("facilitator_wallets", {
      wallet: c.text().$type<Hex>().notNull(),
      /** Empty when the holder has released the wallet. */
      holder: c.text().notNull(),
      /** Fencing token: rises whenever the wallet changes hands, so that a previous holder's writes are refused. */
      token: c.whole().notNull(),
    }),
  };
}

function accountTables(c: Columns) {
  return {
    facilitatorAccounts: c.table("facilitator_accounts", {
      name: c.text().notNull(),
      enabled: c.flag().notNull(),
      /** Smallest units, in decimal; null for the deployment's default. */
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

/** Matches calls that wait for no payment. The partial index of pending calls is used for exactly this text only. */
export const awaitsNoPayment = ({ settlement_status }: Tables["openInvocations"]) =>
  sql`coalesce(${settlement_status}, '') <> 'pending'`;

/** `column in (…)`, padded with the last value to a power of two: Postgres keeps a statement prepared for each number of values. */
export function oneOf<C extends Column>(column: C, values: readonly GetColumnData<C, "raw">[]): SQL {
  const length = values.length === 0 ? 0 : 2 ** Math.ceil(Math.log2(values.length));
  const padded = Array.from({ length }, (_, at) => values[Math.min(at, values.length - 1)] as (typeof values)[number]);
  return inArray(column, padded);
}
