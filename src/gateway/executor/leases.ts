// The queue of calls as the scheduler sees it: what is pending, which replicas are alive, and the running calls
// of those that are not.
import { and, asc, eq, gt, isNull, lt, lte, ne, notInArray, or, sql } from "drizzle-orm";
import { paidFor } from "../../../db/conditions.ts";
import type { Clock } from "../../core/clock.ts";
import { idFloor } from "../../core/id.ts";
import type { Reader, Store, Tx } from "../../storage/store.ts";
import { abandon, type InvocationKey } from "../invocations/service.ts";

/** Who looks for calls, and when. */
export interface Taker {
  readonly replica: string;
  /** By the database's clock. */
  readonly now: number;
}

/**
 * For so long only the replica that accepted a call may take it. Until then, if the commit got no answer, that replica
 * may still refuse the call to its caller.
 */
const YOUNG_MS = 15_000;

/** Streaming calls are left out: only their caller makes them. Same condition as the partial index on pending calls. */
function queued({ openInvocations: t, replicas }: Reader["tables"], { db }: Reader, { replica, now }: Taker) {
  const present = db.select({ id: replicas.id }).from(replicas);
  const isOurs = or(
    isNull(t.accepted_by),
    eq(t.accepted_by, replica),
    lt(t.id, idFloor("inv", now - YOUNG_MS)),
    notInArray(t.accepted_by, present),
  );
  return and(eq(t.status, "pending"), sql`${t.mode} = 'transactional'`, paidFor(t), isOurs);
}

export type QueuedCall = InvocationKey & { readonly body_bytes: number };

/** The oldest pending calls of an agent that this replica may take, oldest first. */
export async function pendingOf(reader: Reader, taker: Taker, agentId: string, limit: number): Promise<QueuedCall[]> {
  const { openInvocations: t } = reader.tables;
  return await reader.db
    .select({
      tenant: t.tenant,
      id: t.id,
      body_bytes: sql<number>`coalesce(${t.req_size}, 0)`.mapWith(Number),
    })
    .from(t)
    .where(and(queued(reader.tables, reader, taker), eq(t.agent_id, agentId)))
    .orderBy(asc(t.id))
    .limit(limit);
}

/** The next agent, by ID after `after`, with such a call. One index seek, however many calls there are. */
export async function nextAgentWithPending(reader: Reader, taker: Taker, after: string): Promise<string | null> {
  const { openInvocations: t } = reader.tables;
  const [row] = await reader.db
    .select({ agent_id: t.agent_id })
    .from(t)
    .where(and(queued(reader.tables, reader, taker), gt(t.agent_id, after)))
    .orderBy(asc(t.agent_id))
    .limit(1);
  return row?.agent_id ?? null;
}

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
