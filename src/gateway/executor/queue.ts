// The queue of calls as the dispatcher sees it: what is pending, which replicas are alive, and the running calls
// of those that are not.
import { and, asc, eq, gt, notInArray, sql } from "drizzle-orm";
import type { Clock } from "../../core/clock.ts";
import type { Reader, Store, Tx } from "../../storage/store.ts";
import { abandon, type InvocationKey, paidFor } from "../invocations/service.ts";

/** A call on the streaming path is made only by its caller. The index of pending calls has the same words. */
function queued(t: Reader["tables"]["invocations"]) {
  return and(eq(t.status, "pending"), sql`${t.mode} = 'transactional'`, paidFor(t));
}

export type QueuedCall = InvocationKey & { readonly body_bytes: number };

/** The oldest pending calls of an agent, oldest first. */
export async function pendingOf(reader: Reader, agentId: string, limit: number): Promise<QueuedCall[]> {
  const { invocations: t } = reader.tables;
  return await reader.db
    .select({
      tenant: t.tenant,
      id: t.id,
      body_bytes: sql<number>`coalesce(${t.req_size}, 0)`.mapWith(Number),
    })
    .from(t)
    .where(and(queued(t), eq(t.agent_id, agentId)))
    .orderBy(asc(t.id))
    .limit(limit);
}

/** The next agent, by ID after `after`, that has a pending call. One seek each, however many calls it has. */
export async function nextAgentWithPending(reader: Reader, after: string): Promise<string | null> {
  const { invocations: t } = reader.tables;
  const [row] = await reader.db
    .select({ agent_id: t.agent_id })
    .from(t)
    .where(and(queued(t), gt(t.agent_id, after)))
    .orderBy(asc(t.agent_id))
    .limit(1);
  return row?.agent_id ?? null;
}

const ORPHANS_AT_ONCE = 200;

/**
 * Ends the running calls whose replica is gone: they may have reached the upstream, so they are not made again.
 *
 * @returns the calls that ended
 */
export async function endOrphans(store: Store, clock: Clock): Promise<InvocationKey[]> {
  const ended: InvocationKey[] = [];
  for (;;) {
    const group = await store.write(async (tx) => {
      const { invocations: t, replicas } = tx.tables;
      const now = clock.now();
      const alive = tx.db.select({ id: replicas.id }).from(replicas).where(gt(replicas.lease_until, now));
      const orphans = await tx.db
        .select({ tenant: t.tenant, id: t.id })
        .from(t)
        .where(and(eq(t.status, "running"), notInArray(t.owner, alive)))
        .limit(ORPHANS_AT_ONCE);
      for (const key of orphans) await abandon(tx, key, "internal", now);
      return orphans;
    });
    ended.push(...group);
    if (group.length < ORPHANS_AT_ONCE) return ended;
  }
}

/** Renews this replica's lease. */
export async function renewLease(tx: Tx, replica: string, leaseUntil: number): Promise<void> {
  const { replicas } = tx.tables;
  await tx.db
    .insert(replicas)
    .values({ id: replica, lease_until: leaseUntil })
    .onConflictDoUpdate({ target: replicas.id, set: { lease_until: leaseUntil } });
}

/** Ends leases: of one replica, or of all when this process is known to be the only one. */
export async function dropLeases(tx: Tx, replica: string | "all"): Promise<void> {
  const { replicas } = tx.tables;
  await tx.db.delete(replicas).where(replica === "all" ? undefined : eq(replicas.id, replica));
}
