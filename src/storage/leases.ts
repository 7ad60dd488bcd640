// Leases of processes and of jobs: how they are renewed, when a lease holds, and when other processes' leases can be believed.
//
// Each process on a database has one row there, with a lease that it renews by the database's clock, and with facts for the
// other processes. When the lease has expired, others take over what the process held. So a process that could not renew in
// time begins nothing more, and its remaining writes are guarded (fenced) in the write itself: a lease alone protects nothing.
//
// A job is work that one of several processes does for all. For periodic work the first process that asks has the lease until
// the next time; for steady work one process keeps renewing it (a leader). A job's lease only avoids double work: a process
// that was suspended while it held the lease goes on beside the next holder, and the work must be correct then too.
import { and, type Column, eq, ne, not, or, type SQL, sql } from "drizzle-orm";
import type { ProcessKind, Tables } from "../../db/schema.ts";
import type { Log } from "../core/log.ts";
import { HOUR_MS } from "../core/time.ts";
import { isOlder, type Moment, thisMoment } from "../kernel/time.ts";
import type { Store, Tx } from "./store.ts";

/** The durations of each kind's lease, and when a process must treat its own as expired. */
export const PROCESS_LEASES = {
  gateway: {
    leaseMs: 15_000,
    renewMs: 5_000,
    // Much longer than a call is reserved for the gateway that accepted it (YOUNG_MS in invocations/commands/queue.ts).
    keptMs: HOUR_MS,
    isOver: (renewedAt: Moment) => isOlder(renewedAt, 15_000),
  },
  facilitator: {
    leaseMs: 6_000,
    renewMs: 2_000,
    keptMs: 60_000,
    // A little before others see it as expired, and by the monotonic clock alone, so that a wall-clock step ends nothing.
    isOver: ({ monotonic }: Moment) => performance.now() - monotonic >= 5_000,
  },
} as const satisfies Record<ProcessKind, object>;

export type ProcessRow = Tables["processes"]["$inferSelect"];

/** What other processes are told about a process. */
export type ProcessFacts = Partial<Omit<ProcessRow, "id" | "kind" | "lease_until">>;

type ProcessName = Pick<ProcessRow, "id" | "kind">;

/** Writes the row of a process, with a renewed lease. @returns the database's time */
export async function renewProcess(tx: Tx, name: ProcessName, facts: ProcessFacts = {}): Promise<number> {
  const { processes: t } = tx.tables;
  const { leaseMs } = PROCESS_LEASES[name.kind];
  const set = { ...facts, lease_until: sql<number>`${tx.now} + ${leaseMs}` };
  const [row] = await tx.db
    .insert(t)
    .values({ ...name, ...set })
    .onConflictDoUpdate({ target: t.id, set })
    .returning({ lease_until: t.lease_until });
  return (row?.lease_until ?? 0) - leaseMs;
}

export async function removeProcess({ db, tables: { processes: t } }: Tx, id: string): Promise<void> {
  await db.delete(t).where(eq(t.id, id));
}

/** Matches the gateways whose lease holds. */
export const isLivingGateway = ({ tables, now }: Tx): SQL =>
  whereLeaseHolds(tables.processes.lease_until, now, PROCESS_LEASES.gateway.leaseMs);

export interface Renewal<Read = undefined> {
  /** When the renewal began, by this process. */
  readonly askedAt: Moment;
  /** The database's time. */
  readonly now: number;
  /** The rows of its kind: its own, those of live processes, and some of processes that are gone. */
  readonly processes: readonly ProcessRow[];
  readonly read: Read;
  /** Whether the lease may have expired before this renewal. */
  readonly isRegained: boolean;
}

/** @param mayJudge whether all live processes have had time to renew */
export function livingAmong({ now, processes }: Pick<Renewal, "now" | "processes">, mayJudge = true): ProcessRow[] {
  const holds = (row: ProcessRow) => leaseHolds(row.lease_until, now, PROCESS_LEASES[row.kind].leaseMs);
  return processes.filter((row) => !mayJudge || holds(row));
}

interface MembershipOptions<Read> extends ProcessName {
  readonly store: Pick<Store, "isShared" | "write">;
  readonly log: Pick<Log, "warn">;
  /** Reads further data in the renewal's transaction, consistent with the rows of the processes. */
  readonly read?: (tx: Tx) => Promise<Read>;
}

export type Membership<Read = undefined> = ReturnType<typeof createMembership<Read>>;

/** This process's row among those on the database, and the renewal of its lease. @param options `id` is new with each start */
export function createMembership<Read = undefined>({ store, log, id, kind, read }: MembershipOptions<Read>) {
  const { leaseMs, renewMs, keptMs, isOver } = PROCESS_LEASES[kind];
  const trust = createLeaseTrust(leaseMs);
  let facts: ProcessFacts = {};
  let written: ProcessFacts | null = null;
  let newest: Renewal<Read> | null = null;
  let renewed = (_: Renewal<Read>): void => {};
  let timer: ReturnType<typeof setInterval> | undefined;
  const inFlight = new Set<Promise<void>>();

  // Where this process is alone with its database, nobody else judges it, and it need not wait for anybody.
  const isFresh = () => !store.isShared || (newest !== null && !isOver(newest.askedAt));
  const mayJudge = (databaseNow: number) => !store.isShared || trust.holds(databaseNow);

  async function renew(): Promise<Renewal<Read>> {
    const askedAt = thisMoment();
    const carried = facts;
    const seen = await store.write(
      async (tx) => {
        const now = await renewProcess(tx, { id, kind }, carried);
        const { processes: t } = tx.tables;
        const processes = await tx.db.select().from(t).where(eq(t.kind, kind));
        return { now, processes, read: (await read?.(tx)) as Read };
      },
      { urgent: true },
    );
    // A renewal that began later has been answered already.
    if (newest !== null && newest.askedAt.monotonic > askedAt.monotonic) return newest;
    trust.renewed(seen.now);
    written = carried;
    newest = { ...seen, askedAt, isRegained: !isFresh() };
    return newest;
  }

  /** Deletes rows of this kind whose lease ended long ago, or ends far ahead because the database's clock went back. */
  async function deleteExpired({ now, processes }: Renewal<Read>): Promise<void> {
    if (!mayJudge(now) || !processes.some((row) => Math.abs(row.lease_until - now) > keptMs)) return;
    await store.write(async ({ db, tables: { processes: t }, now: later }) => {
      await db.delete(t).where(and(eq(t.kind, kind), sql`abs(${t.lease_until} - ${later}) > ${keptMs}`));
    });
  }

  async function round(): Promise<void> {
    const renewal = await renew();
    renewed(renewal);
    await deleteExpired(renewal);
  }

  /** Starts a round even beside one that hangs, since an expired lease would end this process's work. */
  function startRound(): void {
    const warned = round().catch((error) => log.warn("lease_not_renewed", { error }));
    const running = warned.finally(() => inFlight.delete(running));
    inFlight.add(running);
  }

  /** Stops renewing. Once this has resolved, the listener is not called any more. */
  async function stop(): Promise<void> {
    clearInterval(timer);
    timer = undefined;
    await Promise.all(inFlight);
  }

  return {
    id,
    /** Enters the row as part of the given write: the process counts from its commit. Where it is alone, other rows go. */
    async enter(tx: Tx, known: ProcessFacts = {}): Promise<void> {
      facts = known;
      const { processes: t } = tx.tables;
      if (!store.isShared) await tx.db.delete(t).where(ne(t.id, id));
      await renewProcess(tx, { id, kind }, known);
    },
    /** @throws Fault `unavailable` */
    renew,
    /** Starts the periodic renewal. @param listener called after each renewal, in place of the previous listener */
    start(listener = renewed): void {
      renewed = listener;
      timer ??= setInterval(startRound, renewMs);
    },
    /** Sets the facts for other processes, and publishes them at once if they have changed. */
    tell(known: ProcessFacts): void {
      facts = known;
      if (timer !== undefined && inFlight.size === 0 && !Bun.deepEquals(known, written)) startRound();
    },
    /** Whether the lease certainly holds. Begin nothing otherwise, since others may take this process for gone. */
    isFresh,
    /** Whether all live processes have had time to renew. @param databaseNow in milliseconds */
    mayJudge,
    stop,
    /** Removes the row, and runs `also` in the same write. Never rejects: a lease that can't be dropped expires. */
    async leave(also: (tx: Tx) => Promise<void> = async () => {}): Promise<void> {
      await stop();
      const leaving = store.write(async (tx) => {
        await also(tx);
        await removeProcess(tx, id);
      });
      await leaving.catch((error) => log.warn("lease_not_dropped", { error }));
    },
  };
}

/** A steady lease is renewed, or asked for again, this many times within its length. */
const RENEWALS = 3;

/**
 * Asks for a job's lease for `ms`. @returns whether this process has it now; no other gets it before it expires.
 * @param holder the process that may renew the lease; null for a periodic job
 */
export async function leaseJob(store: Store, job: string, ms: number, holder: string | null = null): Promise<boolean> {
  const now = store.clock.now();
  const lease = { next_at: now + ms, holder };
  const rows = await store.write(({ db, tables: { jobLeases: t } }) => {
    // Twice the length tolerates processes whose readings of the clock differ.
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

/** A leader's lease: no other process has it before `ms` after its last renewal. Always held by a process that is alone. */
export function steadyJobLease(store: Store, job: string, ms: number, holder: string) {
  let isHeld = false;
  let askedAt: Moment | null = null;
  return {
    /** Call this before each piece of the work. It renews or requests the lease when that is due. */
    async isMine(): Promise<boolean> {
      if (!store.isShared) return true;
      if (askedAt !== null && !isOlder(askedAt, ms / RENEWALS)) return isHeld;
      askedAt = thisMoment();
      isHeld = false;
      isHeld = await leaseJob(store, job, ms, holder);
      return isHeld;
    },
    /** Drops the lease, so that the next leader need not wait. */
    async end(): Promise<void> {
      if (!isHeld) return;
      await store.write(async ({ db, tables: { jobLeases: t } }) => {
        await db.delete(t).where(and(eq(t.job, job), eq(t.holder, holder)));
      });
    },
  };
}

/** Whether a lease of length `ms` holds. One that ends later than `now + ms` is from before the clock was set back: it does not. */
export const leaseHolds = (until: number, now: number, ms: number): boolean => until > now && until - ms <= now;

/** `leaseHolds` as a condition of a statement. */
export const whereLeaseHolds = (until: Column, now: SQL<number> | number, ms: number): SQL =>
  sql`(${until} > ${now} and ${until} - ${ms} <= ${now})`;

/** Between two renewals the two clocks may drift apart by one third of a lease, since answers can be late. */
const STEP_PART = 3;

/**
 * Decides whether other processes' leases can be believed. Each process renews every few seconds, so an expired lease usually
 * means a dead process. But after an outage of the database, a suspended machine, or a step of the database's clock, all
 * leases have expired. Then every live process gets the length of a lease to renew its own.
 */
export function createLeaseTrust(leaseMs: number, monotonic: () => number = () => performance.now()) {
  let since = Number.POSITIVE_INFINITY;
  let last: { readonly database: number; readonly monotonic: number } | null = null;

  function isGap(databaseNow: number): boolean {
    if (last === null) return true;
    const [there, here] = [databaseNow - last.database, monotonic() - last.monotonic];
    // Others renew at other times. Where this process has missed a renewal or two, another one's lease may have run out.
    return Math.max(there, here) > leaseMs - leaseMs / RENEWALS || Math.abs(there - here) > leaseMs / STEP_PART;
  }

  return {
    /** Call this when this process has renewed its lease. @param databaseNow the database's time, in milliseconds */
    renewed(databaseNow: number) {
      if (isGap(databaseNow)) since = monotonic();
      last = { database: databaseNow, monotonic: monotonic() };
    },
    /** Whether the database's clock has run evenly for the length of a lease, so that all live processes could renew. */
    holds: (databaseNow: number) => !isGap(databaseNow) && monotonic() - since >= leaseMs,
  };
}
