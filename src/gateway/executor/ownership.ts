// Which calls this process owns. A replica holds a lease, by which the others that share the database know that it is alive;
// when the lease has run out, its running calls are ended, and its part of the limit of an agent's calls goes to the others.
// Only the database's clock decides that.
//
// Pending calls come to a replica by claims: a call alone by its ID, or an agent's oldest ones together in a block. Before a
// claim is written it is known here, since the answer of the write may come late or never.
import { and, count, eq, ne, notInArray, type SQL, sql } from "drizzle-orm";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { HOUR_MS } from "../../core/time.ts";
import { every } from "../../kernel/loop.ts";
import { CLAIM_BELIEVED_MS, isOlder, type Moment, thisMoment } from "../../kernel/time.ts";
import { untilStored } from "../../storage/failures.ts";
import { createLeaseTrust, whereLeaseHolds } from "../../storage/leases.ts";
import type { Store, Tx } from "../../storage/store.ts";
import {
  type Claims,
  claim,
  giveUp,
  holdsClaim,
  type InvocationKey,
  ownPending,
  type PendingCall,
  release,
  takePending,
} from "../invocations/service.ts";
import type { CallBlock, OwnBlock, QueueEntry } from "./queue.ts";

/** How long a replica counts as alive after it has renewed its lease. */
const LEASE_MS = 15_000;
const ORPHANS_AT_ONCE = 256;

/** Renews this replica's lease. Gives the database's time. */
export async function renewReplicaLease(tx: Tx, replica: string): Promise<number> {
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

/** The replicas whose lease holds. */
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
      if (!mayJudge(await renewReplicaLease(tx, replica))) return [];
      const { openInvocations: t, replicas } = tx.tables;
      const alive = tx.db.select({ id: replicas.id }).from(replicas).where(isAlive(tx));
      const isGone = gone === null ? notInArray(t.owner, alive) : eq(t.owner, gone);
      const orphans = await tx.db
        .select({ tenant: t.tenant, id: t.id, claim: t.claim })
        .from(t)
        .where(and(sql`${t.status} = 'running'`, ne(t.owner, replica), isGone))
        .limit(ORPHANS_AT_ONCE);
      // On either side: the database's clock may have gone back.
      // The row of a replica that is gone stays for an hour, much longer than only it may make what it accepted last.
      await tx.db.delete(replicas).where(sql`abs(${replicas.lease_until} - ${tx.now}) > ${HOUR_MS}`);
      return orphans;
    });
    // Each by itself, so that the store writes many together: a process may leave thousands, and the start of the next one waits
    // for their end. A call that was given back since then, and is another's, has another claim.
    const ends = group.map(async ({ claim, ...key }) => {
      if (await giveUp(store, key, "internal", clock.now(), claim)) ended.push(key);
    });
    await Promise.all(ends);
    if (group.length < ORPHANS_AT_ONCE) return ended;
  }
}

export interface ReplicaLeaseOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** This replica's ID, new with each start. */
  readonly replica: string;
  /** Whether other replicas may use the database; otherwise this process holds the lock of its data directory. */
  readonly isShared: boolean;
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
  const { store, clock, log, replica, isShared, previous = null, agentConcurrency, agentMaxRaised, refusals } = options;
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
    const renewed = await store.write(
      async (tx) => {
        const now = await renewReplicaLease(tx, replica);
        const { replicas } = tx.tables;
        const others = await tx.db
          .select({ count: count() })
          .from(replicas)
          .where(and(ne(replicas.id, replica), isAlive(tx)));
        return { now, living: 1 + (others[0]?.count ?? 0) };
      },
      { urgent: true },
    );
    trust.renewed(renewed.now);
    renewedAt = askedAt;
    const isNews = renewed.living !== living;
    living = renewed.living;
    if (isNews) log.info("replicas_counted", { replicas: living, agent_concurrency: agentMax() });
    if (agentMax() > before) agentMaxRaised();
  }

  /** Ends the leases and the running calls of processes that certainly are gone, so nobody waits for a lease to run out. */
  async function bury(gone: string | null): Promise<void> {
    await store.write((tx) => dropLeases(tx, gone ?? "all"));
    const ended = await endOrphans(store, clock, replica, undefined, gone);
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
    /** Begins the lease, after the end of what a dead process left that held this one's data directory. */
    async recover(): Promise<void> {
      // Where the database is not shared, that directory's lock tells that no other process runs.
      if (!isShared) return bury(null);
      if (previous !== null) await bury(previous);
      await renew();
      const warn = (error: unknown) => log.warn("lease_not_renewed", { error });
      // On a timer of its own, so that slow work elsewhere can't delay it: a lease that runs out ends live calls.
      renewal = setInterval(() => void renew().catch(warn), 5_000);
    },
    startSweeping(takeUpPending: () => Promise<void>): void {
      if (isShared) stopSweeping = every(2_000, () => sweep(takeUpPending));
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

export interface ClaimingOptions extends Pick<ReplicaLeaseOptions, "store" | "clock" | "replica"> {
  readonly claims: Pick<Claims, "begin" | "over">;
  readonly refusals: {
    /** Calls that this process refused but could not note yet. Their records may still appear. */
    readonly unnoted: ReadonlySet<string>;
  };
}

/** A call that holds a slot, from its claim to its record. */
export interface RunningCall {
  readonly agentId: string;
  readonly key: InvocationKey;
  /** The claim's. */
  readonly token: string;
  /** When the claim was last known to hold. */
  believedAt: Moment;
  /** Ended elsewhere meanwhile: if it has not been sent yet, it is not sent. */
  stopped: boolean;
}

type RunningCalls = ReturnType<typeof createRunningCalls>;

/**
 * What this process knows of the calls that it runs: those that hold a slot, each from its claim to the record of its end,
 * and those that are just being claimed. It is in memory only, and asks nobody.
 */
export function createRunningCalls() {
  const running = new Map<string, RunningCall>();
  /** By agent, the calls that are just being claimed by their ID. */
  const claiming = new Map<string, Set<string>>();
  /** For each block that is being taken, the calls that were to be stopped meanwhile: it may bring them. */
  const taking = new Set<Set<string>>();

  return {
    get size() {
      return running.size;
    },
    add(call: Omit<RunningCall, "stopped">, stopped = false): RunningCall {
      const added = { ...call, stopped };
      running.set(call.key.id, added);
      return added;
    },
    remove(id: string): void {
      running.delete(id);
    },
    /** Marks the call as stopped, or each block that may be about to bring it. */
    stop(id: string): void {
      const call = running.get(id);
      if (call !== undefined) call.stopped = true;
      else for (const stopped of taking) stopped.add(id);
    },
    /** The calls of the agent that are being claimed by their ID. */
    claimingOf: (agentId: string): Iterable<string> => claiming.get(agentId) ?? [],
    async whileClaiming<T>({ agentId, key }: RunningCall, claim: () => Promise<T>): Promise<T> {
      const ids = claiming.get(agentId) ?? new Set();
      claiming.set(agentId, ids.add(key.id));
      try {
        return await claim();
      } finally {
        ids.delete(key.id);
        if (ids.size === 0) claiming.delete(agentId);
      }
    },
    /** @param take given the calls that are stopped while it goes on and hold no slot */
    async whileTaking<T>(take: (stopped: ReadonlySet<string>) => Promise<T>): Promise<T> {
      const stopped = new Set<string>();
      taking.add(stopped);
      try {
        return await take(stopped);
      } finally {
        taking.delete(stopped);
      }
    },
  };
}

/** A call that waits for a slot, or has one. */
export interface ScheduledCall extends QueueEntry {
  readonly inHand?: PendingCall;
  /** Of a call that was claimed before it came here: by the write that accepted it, or with others. */
  readonly claimed?: RunningCall;
}

export type Claiming = ReturnType<typeof createClaiming>;

/** @param isDraining whether this process is about to stop: then it waits no more for a store that is away */
export function createClaiming(options: ClaimingOptions, running: RunningCalls, isDraining: () => boolean) {
  const { store, clock, replica: owner, claims, refusals } = options;

  return {
    /** A call whose claim is about to be stored. */
    begin: (agentId: string, { tenant, id }: QueueEntry): RunningCall =>
      running.add({ agentId, key: { tenant, id }, token: claims.begin(), believedAt: thisMoment() }),

    /** Null when another process has the call, or it was cancelled. */
    claim(call: RunningCall, inHand: PendingCall | null, bodyBytes = 0): Promise<PendingCall | null> {
      const { key, token } = call;
      const stored = () => claim(store, { key, owner, token, now: clock.now(), inHand, bodyBytes });
      return running.whileClaiming(call, () => untilStored(stored, isDraining));
    },

    /**
     * A call that was stored claimed. If this process stops by now, it is left to the next one. If it has been refused to
     * its caller while it was taken with others, it is given back, so that its record can be removed.
     */
    async confirm({ key, token }: RunningCall, inHand: PendingCall | null): Promise<PendingCall | null> {
      if (!isDraining() && !refusals.unnoted.has(key.id)) return inHand;
      await store.write((tx) => release(tx, key, token, clock.now()));
      return null;
    },

    /** Whether the claim still holds. Asks the database only when that has not been known for a while. */
    async stillHolds(call: RunningCall): Promise<boolean> {
      if (!isOlder(call.believedAt, CLAIM_BELIEVED_MS)) return true;
      const askedAt = thisMoment();
      const isHeld = await untilStored(() => holdsClaim(store.read, call.key, call.token), isDraining);
      call.believedAt = askedAt;
      return isHeld;
    },

    /** The agent's oldest pending calls behind that of ID `after`, claimed in one write. */
    async takeBlock(tenant: string, agent_id: string, slots: number, after: string): Promise<CallBlock<ScheduledCall>> {
      const tokens = Array.from({ length: slots }, () => claims.begin());
      const leftOut = [...running.claimingOf(agent_id), ...refusals.unnoted];
      const used = new Set<string>();
      const askedAt = thisMoment();
      try {
        return await running.whileTaking(async (stopped) => {
          const block = { tenant, agent_id, owner, tokens, now: clock.now(), after, leftOut };
          const { taken, large } = await takePending(store, block);
          const calls = taken.map(({ id, token, inHand }) => {
            used.add(token);
            const call = { agentId: agent_id, key: { tenant, id }, token, believedAt: askedAt };
            const claimed = running.add(call, stopped.has(id));
            return { tenant, id, body_bytes: inHand.body.byteLength, inHand, claimed };
          });
          return { taken: calls, large: large === null ? null : { tenant, ...large } };
        });
      } finally {
        // What was taken by those of a lost answer is given back when the claims are compared.
        for (const token of tokens) if (!used.has(token)) claims.over(token);
      }
    },

    /** The agent's next pending calls, as far as only this process may take them. They stay pending. */
    async readOwn(tenant: string, agent_id: string, after: string, limit: number): Promise<OwnBlock<ScheduledCall>> {
      const asked = { tenant, agent_id, replica: owner, now: clock.now(), after, limit };
      const { calls, isAll } = await store.execute(ownPending, asked);
      return { own: calls.map((call) => ({ tenant, ...call })), isAll };
    },
  };
}
