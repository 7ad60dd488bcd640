// The replicas that share a database: their leases, and which of them are gone.
import { and, eq, inArray, isNotNull, ne, not, notInArray, or, type SQL, sql } from "drizzle-orm";
import { HOUR_MS } from "../../core/time.ts";
import { whereLeaseHolds } from "../../storage/lease-end.ts";
import type { Store, Tx } from "../../storage/store.ts";

/** How long a replica counts as alive after it has renewed its lease. */
export const LEASE_MS = 15_000;
/** The row of a replica that is gone stays for so long: much longer than what it accepted last is only its own to make. */
const KEPT_MS = HOUR_MS;

/** Whoever changes what replicas have of the limits that they share holds this. */
const PLACES_LOCK = "agent-places:all";
/** So long a replica that stands still meanwhile keeps it from the others. */
const PLACES_PAUSE_MS_MAX = 2_000;

export const lockPlaces = (tx: Tx): Promise<void> => tx.lock(PLACES_LOCK, PLACES_PAUSE_MS_MAX);

export interface Lease {
  /** The database's time. */
  readonly now: number;
  /** Null when it has no share of the limits: it is new, or was taken for gone. */
  readonly agent_base: number | null;
}

/** Renews this replica's lease by the database's clock. */
export async function renewLease(tx: Tx, replica: string): Promise<Lease> {
  const { replicas } = tx.tables;
  const lease_until = sql<number>`${tx.now} + ${LEASE_MS}`;
  const [row] = await tx.db
    .insert(replicas)
    .values({ id: replica, lease_until })
    .onConflictDoUpdate({ target: replicas.id, set: { lease_until } })
    .returning({ lease_until: replicas.lease_until, agent_base: replicas.agent_base });
  return { now: (row?.lease_until ?? 0) - LEASE_MS, agent_base: row?.agent_base ?? null };
}

/** Ends leases, and what came with them: of one replica, or of all when this process is known to be the only one. */
export async function dropLeases(tx: Tx, replica: string | "all"): Promise<void> {
  const { replicas, agentPlaces } = tx.tables;
  await tx.db.delete(agentPlaces).where(replica === "all" ? undefined : eq(agentPlaces.replica, replica));
  await tx.db.delete(replicas).where(replica === "all" ? undefined : eq(replicas.id, replica));
}

/** Those whose lease holds. */
export const isAlive = ({ tables, now }: Tx): SQL => whereLeaseHolds(tables.replicas.lease_until, now, LEASE_MS);

/**
 * Takes from the replicas that are gone what they had of the limits, and removes their rows later. One of which a call
 * still counts as running keeps all until that has been ended.
 *
 * @param mayJudge whether all live replicas have had time to renew, by the database's time in the same write
 */
export async function removeGone(
  store: Store,
  replica: string,
  mayJudge: (databaseNow: number) => boolean,
): Promise<void> {
  if (!(await mayHaveGone(store, replica))) return;
  await store.write(async (tx) => {
    await lockPlaces(tx);
    if (!mayJudge((await renewLease(tx, replica)).now)) return;
    const { agentPlaces, replicas } = tx.tables;
    const ids = await goneIn(tx, replica);
    if (ids.length === 0) return;
    await tx.db.delete(agentPlaces).where(inArray(agentPlaces.replica, ids));
    await tx.db.update(replicas).set({ agent_base: null }).where(inArray(replicas.id, ids));
    await tx.db
      .delete(replicas)
      .where(and(inArray(replicas.id, ids), isFarther(KEPT_MS, replicas.lease_until, tx.now)));
  });
}

/** A look that costs less than the write. */
async function mayHaveGone({ read: { db, tables }, clock }: Store, replica: string): Promise<boolean> {
  const { replicas: t } = tables;
  const now = clock.now();
  const isOver = not(whereLeaseHolds(t.lease_until, now, LEASE_MS));
  const isOld = isFarther(KEPT_MS, t.lease_until, now);
  const rows = await db
    .select({ id: t.id })
    .from(t)
    .where(and(ne(t.id, replica), or(and(isNotNull(t.agent_base), isOver), isOld)))
    .limit(1);
  return rows.length > 0 || (await ownersOfLoose(db, tables)).length > 0;
}

/** Than that from now, on either side: the database's clock may have gone back. */
const isFarther = (ms: number, until: Tx["tables"]["replicas"]["lease_until"], now: SQL<number> | number) =>
  sql`abs(${until} - ${now}) > ${ms}`;

type Looking = Pick<Tx["db"], "select" | "selectDistinct">;

/** Places that belong to no replica any more, as after an operator has removed the row of one. */
export function areLoose(db: Pick<Looking, "select">, { agentPlaces, replicas }: Tx["tables"]) {
  return notInArray(agentPlaces.replica, db.select({ id: replicas.id }).from(replicas));
}

async function ownersOfLoose(db: Looking, tables: Tx["tables"]): Promise<string[]> {
  const { agentPlaces: t } = tables;
  const rows = await db.selectDistinct({ replica: t.replica }).from(t).where(areLoose(db, tables));
  return rows.map(({ replica }) => replica);
}

async function goneIn(tx: Tx, replica: string): Promise<string[]> {
  const { openInvocations: t, replicas } = tx.tables;
  const late = await tx.db
    .select({ id: replicas.id })
    .from(replicas)
    .where(and(ne(replicas.id, replica), not(isAlive(tx))));
  const ids = [...late.map(({ id }) => id), ...(await ownersOfLoose(tx.db, tx.tables))];
  if (ids.length === 0) return [];
  const owners = await tx.db
    .selectDistinct({ owner: t.owner })
    .from(t)
    .where(and(sql`${t.status} = 'running'`, inArray(t.owner, ids)));
  const busy = new Set(owners.map(({ owner }) => owner));
  return ids.filter((id) => !busy.has(id));
}
