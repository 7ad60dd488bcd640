// The facilitator's tables, and the key by which both services know a payment. See schema.ts for the conventions.
import type { Hex } from "../src/core/hex.ts";
import type { CollectionStatus } from "../src/core/states.ts";
import type { Columns } from "./columns.ts";

/** Hex is lower case in all of them. */
export function paymentKey(c: Columns) {
  return {
    chain_id: c.whole().notNull(),
    token: c.text().$type<Hex>().notNull(),
    payer: c.text().$type<Hex>().notNull(),
    nonce: c.text().$type<Hex>().notNull(),
  };
}

export function facilitatorTables(c: Columns) {
  return {
    ...accountTables(c),
    ...leaseTables(c),

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
      created_at: c.whole().notNull(),
      updated_at: c.whole().notNull(),
      ended_at: c.whole(),
    }),

    /** Payments that were refused before a claim, for the operator: the last exact reason of each. */
    facilitatorRefusals: c.table("facilitator_refusals", {
      account: c.text().notNull(),
      payer: c.text().$type<Hex>().notNull(),
      nonce: c.text().$type<Hex>().notNull(),
      reason: c.text().notNull(),
      attempts: c.whole().notNull(),
      created_at: c.whole().notNull(),
      updated_at: c.whole().notNull(),
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
  };
}

function leaseTables(c: Columns) {
  return {
    /** The facilitators that run on this database: see src/facilitator/wallet/lease-rows.ts. */
    facilitators: c.table("facilitators", {
      id: c.text().notNull(),
      /** The addresses that it can sign for, with spaces between. */
      wallets: c.text().notNull(),
      /** Whether its nodes and its signer answer. */
      is_able: c.flag().notNull(),
      lease_until: c.whole().notNull(),
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
      created_at: c.whole().notNull(),
      updated_at: c.whole().notNull(),
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
