// Which replicas are alive, and the running calls of those that are not.
import { and, eq, gt, lte, ne, notInArray, sql } from "drizzle-orm";
import type { Clock } from "../../core/clock.ts";
import type { Store, Tx } from "../../storage/store.ts";
import { abandon, type InvocationKey } from "../invocations/service.ts";

/** How long a replica counts as alive after it has renewed its lease. */
export const LEASE_MS = 15_000;
const ORPHANS_AT_ONCE = 200;

/**
 * Ends the running calls of other replicas that are gone: they may have reached the upstream, so they are not made
 * again. Only the database's clock decides which replicas are gone.
 *
 * @param mayJudge whether all live replicas have had time to renew, by the database's time in the same write
 * @returns the calls that ended
 */
export async function endOrphans(
  store: Store,
  clock: Clock,
  replica: string,
  mayJudge: (databaseNow: number) => boolean = () => true,
): Promise<InvocationKey[]> {
  const ended: InvocationKey[] = [];
  for (;;) {
    const group = await store.write(async (tx) => {
      // Renew first, so that this replica's own lease is the newest even after a clock step.
      if (!mayJudge(await renewLease(tx, replica))) return [];
      const { openInvocations: t, replicas } = tx.tables;
      const alive = tx.db
        .select({ id: replicas.id })
        .from(replicas)
        .where(and(gt(replicas.lease_until, tx.now), lte(replicas.lease_until, sql`${tx.now} + ${LEASE_MS}`)));
      const orphans = await tx.db
        .select({ tenant: t.tenant, id: t.id })
        .from(t)
        .where(and(eq(t.status, "running"), ne(t.owner, replica), notInArray(t.owner, alive)))
        .limit(ORPHANS_AT_ONCE);
      for (const key of orphans) await abandon(tx, key, "internal", clock.now());
      return orphans;
    });
    ended.push(...group);
    if (group.length < ORPHANS_AT_ONCE) return ended;
  }
}

/**
 * Clears up after replicas that are gone. A call that was refused to its caller and appeared later goes first: it must not
 * end as one that was accepted.
 *
 * @returns the calls that ended
 */
export async function clearDead(
  removeAppeared: () => Promise<unknown>,
  ...orphans: Parameters<typeof endOrphans>
): Promise<InvocationKey[]> {
  await removeAppeared();
  return endOrphans(...orphans);
}

/** Renews this replica's lease by the database's clock, and gives the time there. */
export async function renewLease(tx: Tx, replica: string): Promise<number> {
  const { replicas } = tx.tables;
  const lease_until = sql<number>`${tx.now} + ${LEASE_MS}`;
  const [row] = await tx.db
    .insert(replicas)
    .values({ id: replica, lease_until })
    .onConflictDoUpdate({ target: replicas.id, set: { lease_until } })
    .returning({ lease_until: replicas.lease_until });
  return (row?.lease_until ?? 0) - LEASE_MS;
}

/** Ends leases: of one replica, or of all when this process is known to be the only one. */
export async function dropLeases(tx: Tx, replica: string | "all"): Promise<void> {
  const { replicas } = tx.tables;
  await tx.db.delete(replicas).where(replica === "all" ? undefined : eq(replicas.id, replica));
}
