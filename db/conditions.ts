// Conditions whose text matters: no database would use a partial index for another one.
import { sql } from "drizzle-orm";
import type { Tables } from "./schema.ts";

/** A call waits while its payment may still land or fail. The index of pending calls has the same text. */
export function paidFor({ settlement_status }: Tables["openInvocations"]) {
  return sql`coalesce(${settlement_status}, '') <> 'pending'`;
}

/**
 * The values of an `in (…)`, the last one again and again up to a power of two: each number of values is a statement of its
 * own, which Postgres keeps prepared on each connection.
 */
export function fewTexts<T>(values: readonly T[]): T[] {
  const length = values.length === 0 ? 0 : 2 ** Math.ceil(Math.log2(values.length));
  return Array.from({ length }, (_, at) => values[Math.min(at, values.length - 1)] as T);
}
