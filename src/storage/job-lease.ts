// Leases of jobs: work that one of several processes does for all. Now and then, when whoever asks first has the lease until
// the next time; or steadily, when one of them keeps the lease while it goes on with the work (a leader). Such a lease saves
// work and protects nothing: a process that was held up while it had it goes on beside the next one, so the work must be
// right then too.
import { and, eq, not, or } from "drizzle-orm";
import { isOlder, type Moment, thisMoment } from "../core/age.ts";
import { whereLeaseHolds } from "./lease-end.ts";
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
      if (store.dialect === "sqlite") return true;
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
