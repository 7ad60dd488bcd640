// Whether the leases of other replicas can be believed. Each replica renews its lease every few seconds, so an expired
// one usually means a dead replica. But after an outage of the database, a suspended machine, or a step of the
// database's clock all leases have expired. Then every live replica gets the length of a lease to renew its own.
import { LEASE_MS } from "../replicas/store.ts";

/** How much the two clocks may differ between two renewals, since answers can be late. */
const STEP_MS_MAX = 5_000;

/** @param monotonic milliseconds of a clock that never goes back */
export function createLeaseTrust(monotonic: () => number = () => performance.now()) {
  let since = Number.POSITIVE_INFINITY;
  let last: { readonly database: number; readonly monotonic: number } | null = null;

  function isGap(databaseNow: number): boolean {
    if (last === null) return true;
    const [there, here] = [databaseNow - last.database, monotonic() - last.monotonic];
    return Math.max(there, here) > LEASE_MS || Math.abs(there - here) > STEP_MS_MAX;
  }

  return {
    /** This replica has renewed its own lease. @param databaseNow the time there, in milliseconds */
    renewed(databaseNow: number) {
      if (isGap(databaseNow)) since = monotonic();
      last = { database: databaseNow, monotonic: monotonic() };
    },
    /** Whether the database's clock has run evenly for the length of a lease, so that all could renew. */
    holds: (databaseNow: number) => !isGap(databaseNow) && monotonic() - since >= LEASE_MS,
  };
}
