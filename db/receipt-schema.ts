// The tables of trust receipts: a part of schema.ts.
import type { Columns } from "./columns.ts";

export function receiptTables(c: Columns) {
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
