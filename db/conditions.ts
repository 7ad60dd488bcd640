// Conditions in the very words of a partial index, without which no database would use it.
import { sql } from "drizzle-orm";
import type { Tables } from "./schema.ts";

/** A call waits aside while its payment may still land or fail. The index of pending calls has the same words. */
export function paidFor({ settlement_status }: Tables["invocations"]) {
  return sql`coalesce(${settlement_status}, '') <> 'pending'`;
}
