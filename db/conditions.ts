// Conditions whose text matters: no database would use a partial index for another one.
import { type Column, type GetColumnData, inArray, type SQL, sql } from "drizzle-orm";
import type { Tables } from "./schema.ts";

/** A call waits while its payment may still land or fail. The index of pending calls has the same text. */
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
