// Conditions with the exact text of a partial index; with another text no database would use it.
import { sql } from "drizzle-orm";
import type { Tables } from "./schema.ts";

/** A call waits while its payment may still land or fail. The index of pending calls has the same text. */
export function paidFor({ settlement_status }: Tables["openInvocations"]) {
  return sql`coalesce(${settlement_status}, '') <> 'pending'`;
}
