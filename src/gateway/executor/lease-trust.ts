// Whether the leases of other replicas can be believed. Each renews its own every few seconds, so one that has run out
// tells of a replica that is gone; but after an outage of the database, a suspended machine, or a step of the
// database's clock, they have all run out, and whoever is alive gets the time of a lease to renew.
import { LEASE_MS } from "./leases.ts";

/** By how much the two clocks may differ over one gap: answers can be late. */
const STEP_MS_MAX = 5_000;

export interface LeaseTrust {
  /** This replica has renewed its own lease. @param databaseNow the time there, in milliseconds */
  renewed(databaseNow: number): void;
  /** Whether the database's time has gone on evenly, and all have had the chance to renew, for the time of a lease. */
  holds(databaseNow: number): boolean;
}

/** @param monotonic milliseconds of a clock that never goes back */
export function createLeaseTrust(monotonic: () => number = () => performance.now()): LeaseTrust {
  let since = Number.POSITIVE_INFINITY;
  let last: { readonly database: number; readonly monotonic: number } | null = null;

  function isGap(databaseNow: number): boolean {
    if (last === null) return true;
    const [there, here] = [databaseNow - last.database, monotonic() - last.monotonic];
    return Math.max(there, here) > LEASE_MS || Math.abs(there - here) > STEP_MS_MAX;
  }

  return {
    renewed(databaseNow) {
      if (isGap(databaseNow)) since = monotonic();
      last = { database: databaseNow, monotonic: monotonic() };
    },
    holds: (databaseNow) => !isGap(databaseNow) && monotonic() - since >= LEASE_MS,
  };
}
