// The running calls of replicas that are gone.
import { and, eq, ne, notInArray, sql } from "drizzle-orm";
import type { Clock } from "../../core/clock.ts";
import type { Store } from "../../storage/store.ts";
import { abandon, type InvocationKey } from "../invocations/service.ts";
import { isAlive, removeGone, renewLease } from "../replicas/store.ts";

const ORPHANS_AT_ONCE = 200;

/**
 * Ends the running calls of other replicas that are gone: they may have reached the upstream, so they are not made
 * again. Only the database's clock decides which replicas are gone.
 *
 * @param mayJudge whether all live replicas have had time to renew, by the database's time in the same write
 * @param gone the one that is known to be gone, whatever its lease says; null for all whose lease has run out
 * @returns the calls that ended
 */
export async function endOrphans(
  store: Store,
  clock: Clock,
  replica: string,
  mayJudge: (databaseNow: number) => boolean = () => true,
  gone: string | null = null,
): Promise<InvocationKey[]> {
  const ended: InvocationKey[] = [];
  for (;;) {
    const group = await store.write(async (tx) => {
      // Renew first, so that this replica's own lease is the newest even after a clock step.
      if (!mayJudge((await renewLease(tx, replica)).now)) return [];
      const { openInvocations: t, replicas } = tx.tables;
      const alive = tx.db.select({ id: replicas.id }).from(replicas).where(isAlive(tx));
      const orphans = await tx.db
        .select({ tenant: t.tenant, id: t.id })
        .from(t)
        .where(
          and(
            sql`${t.status} = 'running'`,
            ne(t.owner, replica),
            gone === null ? notInArray(t.owner, alive) : eq(t.owner, gone),
          ),
        )
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
  store: Store,
  clock: Clock,
  replica: string,
  mayJudge: (databaseNow: number) => boolean = () => true,
): Promise<InvocationKey[]> {
  await removeAppeared();
  const ended = await endOrphans(store, clock, replica, mayJudge);
  await removeGone(store, replica, mayJudge);
  return ended;
}
