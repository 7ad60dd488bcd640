// The replicas that share a database: the lease by which others know that this one is alive, its part of the limit of an
// agent's calls, and what becomes of the calls of replicas whose lease has run out. Only the database's clock decides that.
import { and, count, eq, ne, notInArray, type SQL, sql } from "drizzle-orm";
import { every } from "../../concurrency/every.ts";
import { isOlder, type Moment, thisMoment } from "../../core/age.ts";
import type { Clock } from "../../core/clock.ts";
import type { Log } from "../../core/log.ts";
import { HOUR_MS } from "../../core/time.ts";
import { whereLeaseHolds } from "../../storage/lease-end.ts";
import { createLeaseTrust } from "../../storage/lease-trust.ts";
import type { Store, Tx } from "../../storage/store.ts";
import { abandon, type InvocationKey } from "../invocations/service.ts";

/** How long a replica counts as alive after it has renewed its lease. */
const LEASE_MS = 15_000;
const RENEW_MS = 5_000;
const SWEEP_MS = 2_000;
/** The row of a replica that is gone stays for so long: much longer than what it accepted last is only its own to make. */
const KEPT_MS = HOUR_MS;
const ORPHANS_AT_ONCE = 200;

/** Renews this replica's lease. Gives the database's time. */
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

/** Ends the lease of one replica, or of all when this process is known to be the only one. */
export async function dropLeases({ db, tables: { replicas } }: Tx, replica: string | "all"): Promise<void> {
  await db.delete(replicas).where(replica === "all" ? undefined : eq(replicas.id, replica));
}

/** Those whose lease holds. */
const isAlive = ({ tables, now }: Tx): SQL => whereLeaseHolds(tables.replicas.lease_until, now, LEASE_MS);

/**
 * Ends the running calls of other replicas that are gone: they may have reached the upstream, so they are not made
 * again.
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
      if (!mayJudge(await renewLease(tx, replica))) return [];
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
      // On either side: the database's clock may have gone back.
      await tx.db.delete(replicas).where(sql`abs(${replicas.lease_until} - ${tx.now}) > ${KEPT_MS}`);
      return orphans;
    });
    ended.push(...group);
    if (group.length < ORPHANS_AT_ONCE) return ended;
  }
}

export interface ReplicaLeaseOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** This replica's ID, new with each start. */
  readonly replica: string;
  /** The replica that is certainly gone, since this process holds what was its data directory; null when none is known. */
  readonly previous?: string | null;
  /** Calls of one agent on one path, of all replicas together. */
  readonly agentConcurrency: number;
  /** Called when this replica may run more calls of each agent than before. */
  agentMaxRaised(): void;
  readonly refusals: {
    /** Removes the records of refused calls that have appeared. */
    removeAppeared(): Promise<unknown>;
  };
}

export function createReplicaLease(options: ReplicaLeaseOptions) {
  const { store, clock, log, replica, previous = null, agentConcurrency, agentMaxRaised, refusals } = options;
  /** On SQLite this process is the only one; on Postgres there may be other replicas. */
  const isShared = store.dialect === "postgres";
  const trust = createLeaseTrust(LEASE_MS);
  let living = 1;
  /** Before the renewal was asked for. */
  let renewedAt: Moment | null = null;
  let renewal: ReturnType<typeof setInterval> | undefined;
  let stopSweeping = () => {};

  /** Nothing is begun on a lease that may have run out, since others may have taken this replica for gone. */
  function agentMax(): number {
    if (isShared && (renewedAt === null || isOlder(renewedAt, LEASE_MS))) return 0;
    return Math.max(1, Math.floor(agentConcurrency / living));
  }

  async function renew(): Promise<void> {
    const [askedAt, before] = [thisMoment(), agentMax()];
    const renewed = await store.writeFirst(async (tx) => {
      const now = await renewLease(tx, replica);
      const { replicas } = tx.tables;
      const others = await tx.db
        .select({ count: count() })
        .from(replicas)
        .where(and(ne(replicas.id, replica), isAlive(tx)));
      return { now, living: 1 + (others[0]?.count ?? 0) };
    });
    trust.renewed(renewed.now);
    renewedAt = askedAt;
    const isNews = renewed.living !== living;
    living = renewed.living;
    if (isNews) log.info("replicas_counted", { replicas: living, agent_concurrency: agentMax() });
    if (agentMax() > before) agentMaxRaised();
  }

  /** The process before this one on its data directory is gone, so nobody waits for its lease to run out. */
  async function bury(gone: string): Promise<void> {
    const ended = await endOrphans(store, clock, replica, undefined, gone);
    await store.write((tx) => dropLeases(tx, gone));
    if (ended.length > 0) log.warn("orphaned_calls_ended", { calls: ended.length });
  }

  /**
   * Ends the calls of replicas that are gone, and takes up those that are pending. A call that was refused to its caller and
   * appeared later goes first: it must not end as one that was accepted.
   */
  async function sweep(takeUpPending: () => Promise<void>): Promise<void> {
    try {
      await refusals.removeAppeared();
      await endOrphans(store, clock, replica, trust.holds);
      await takeUpPending();
    } catch (error) {
      log.warn("sweep_failed", { error });
    }
  }

  return {
    /** Calls of one agent that this replica may run on each path: its part of the limit. */
    agentMax,
    /** Begins it, and ends the calls that a dead process of a database that is not shared left running. */
    async recover(): Promise<void> {
      if (isShared) {
        if (previous !== null) await bury(previous);
        await renew();
        const warn = (error: unknown) => log.warn("lease_not_renewed", { error });
        // On a timer of its own, so that slow work elsewhere can't delay it: a lease that runs out ends live calls.
        renewal = setInterval(() => void renew().catch(warn), RENEW_MS);
        return;
      }
      // This process holds the lock of the data directory, so no other process runs.
      await store.write((tx) => dropLeases(tx, "all"));
      const orphans = await endOrphans(store, clock, replica);
      if (orphans.length > 0) log.warn("orphaned_calls_ended", { calls: orphans.length });
    },
    startSweeping(takeUpPending: () => Promise<void>): void {
      if (isShared) stopSweeping = every(SWEEP_MS, () => sweep(takeUpPending));
    },
    stopSweeping: () => stopSweeping(),
    /** Drops the lease: no call runs on it any more, on either path. */
    async leave(): Promise<void> {
      clearInterval(renewal);
      if (!isShared) return;
      // A lease that can't be dropped runs out.
      await store.write((tx) => dropLeases(tx, replica)).catch((error) => log.warn("lease_not_dropped", { error }));
    },
  };
}
