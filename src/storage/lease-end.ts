// Whether a lease holds, by its end. One that ends later than it can was written before the clock that gave it went back: it
// holds no more, or it would for as long as the clock was set back.
import { type Column, type SQL, sql } from "drizzle-orm";

/** @param ms the longest that one can have left */
export function leaseHolds(until: number, now: number, ms: number): boolean {
  return until > now && until - ms <= now;
}

/** The same in a statement. */
export function whereLeaseHolds(until: Column, now: SQL<number> | number, ms: number): SQL {
  return sql`(${until} > ${now} and ${until} - ${ms} <= ${now})`;
}
