// Leases: of jobs, the rule by which a lease holds, and when the leases of other processes can be believed.
//
// A job is work that one of several processes does for all. Now and then, when the first that asks has the lease until
// the next time; or steadily, when one of them keeps the lease while it goes on with the work (a leader). Such a lease saves
// work and protects nothing: a process that was held up while it had it goes on beside the next one, so the work must be
// right then too.
import { and, type Column, eq, not, or, type SQL, sql } from "drizzle-orm";
import { isOlder, type Moment, thisMoment } from "../kernel/time.ts";
import type { Store } from "./store.ts";

/** Parts of the time that a lease is kept, after each of which it is renewed, or asked for again. */
const RENEWALS = 3;

/**
 * Whether this process has the lease now. Nobody has the next one before `ms` have passed, but for the holder.
 *
 * @param holder who goes on with it; null when nobody does
 */
export async function leaseJob(store: Store, job: string, ms: number, holder: string | null = null): Promise<boolean> {
  const now = store.clock.now();
  const lease = { next_at: now + ms, holder };
  const rows = await store.write(({ db, tables: { jobLeases: t } }) => {
    // Twice its length leaves room for processes whose readings of the clock differ.
    const isOver = not(whereLeaseHolds(t.next_at, now, 2 * ms));
    const setWhere = holder === null ? isOver : or(isOver, eq(t.holder, holder));
    return db
      .insert(t)
      .values({ job, ...lease })
      .onConflictDoUpdate({ target: t.job, set: lease, ...(setWhere && { setWhere }) })
      .returning({ job: t.job });
  });
  return rows.length > 0;
}

/** A lease that one process keeps: nobody else has it before `ms` after its last renewal. Where there are no others it is always held. */
export function steadyJobLease(store: Store, job: string, ms: number, holder: string) {
  let isHeld = false;
  let askedAt: Moment | null = null;
  return {
    /** To be asked before each piece of the work. It asks the database now and then. */
    async isMine(): Promise<boolean> {
      if (!store.isShared) return true;
      if (askedAt !== null && !isOlder(askedAt, ms / RENEWALS)) return isHeld;
      askedAt = thisMoment();
      isHeld = false;
      isHeld = await leaseJob(store, job, ms, holder);
      return isHeld;
    },
    /** The next one need not wait. */
    async end(): Promise<void> {
      if (!isHeld) return;
      await store.write(async ({ db, tables: { jobLeases: t } }) => {
        await db.delete(t).where(and(eq(t.job, job), eq(t.holder, holder)));
      });
    },
  };
}

/**
 * Whether a lease holds, by its end. A lease that ends later than it can was written before the clock that gave it went
 * back: it holds no more, or it would for as long as the clock was set back.
 *
 * @param ms the longest that a lease can have left
 */
export function leaseHolds(until: number, now: number, ms: number): boolean {
  return until > now && until - ms <= now;
}

/** `leaseHolds` as a condition of a statement. */
export function whereLeaseHolds(until: Column, now: SQL<number> | number, ms: number): SQL {
  return sql`(${until} > ${now} and ${until} - ${ms} <= ${now})`;
}

/** By this part of a lease the two clocks may differ between two renewals, since answers can be late. */
const STEP_PART = 3;

/**
 * Whether the leases of other processes can be believed. Each process renews its lease every few seconds, so an expired lease
 * usually means a dead process. But after an outage of the database, a suspended machine, or a step of the database's clock
 * all leases have expired. Then every live process gets the length of a lease to renew its own.
 *
 * @param monotonic milliseconds of a clock that never goes back
 */
export function createLeaseTrust(leaseMs: number, monotonic: () => number = () => performance.now()) {
  let since = Number.POSITIVE_INFINITY;
  let last: { readonly database: number; readonly monotonic: number } | null = null;

  function isGap(databaseNow: number): boolean {
    if (last === null) return true;
    const [there, here] = [databaseNow - last.database, monotonic() - last.monotonic];
    return Math.max(there, here) > leaseMs || Math.abs(there - here) > leaseMs / STEP_PART;
  }

  return {
    /** This process has renewed its own lease. @param databaseNow the time there, in milliseconds */
    renewed(databaseNow: number) {
      if (isGap(databaseNow)) since = monotonic();
      last = { database: databaseNow, monotonic: monotonic() };
    },
    /** Whether the database's clock has run evenly for the length of a lease, so that all could renew. */
    holds: (databaseNow: number) => !isGap(databaseNow) && monotonic() - since >= leaseMs,
  };
}
