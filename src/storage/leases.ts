// Leases: of processes and of jobs, the rule by which a lease holds, and when the leases of other processes can be believed.
//
// A process that works on a database has one row there, with a lease that it renews by the database's clock, and with what
// others are to know of it. When the lease has run out, others take over what the process held. So a process that could not
// renew in time begins nothing more, and what it still writes is guarded in that write: a lease alone protects nothing.
//
// A job is work that one of several processes does for all. Now and then, when the first that asks has the lease until
// the next time; or steadily, when one of them keeps the lease while it goes on with the work (a leader). Such a lease only
// saves work: a process that was held up while it had it goes on beside the next one, and the work must be right then too.
import { and, type Column, eq, ne, not, or, type SQL, sql } from "drizzle-orm";
import type { ProcessKind, Tables } from "../../db/schema.ts";
import type { Log } from "../core/log.ts";
import { HOUR_MS } from "../core/time.ts";
import { isOlder, type Moment, thisMoment } from "../kernel/time.ts";
import type { Store, Tx } from "./store.ts";

/** What the lease of each kind is like. */
export const PROCESS_LEASES = {
  gateway: {
    leaseMs: 15_000,
    renewMs: 5_000,
    // Much longer than only a gateway that is gone may make what it accepted last (YOUNG_MS in invocations/commands/queue.ts).
    keptMs: HOUR_MS,
    isOver: (renewedAt: Moment) => isOlder(renewedAt, 15_000),
  },
  facilitator: {
    leaseMs: 6_000,
    renewMs: 2_000,
    keptMs: 60_000,
    // A little before others may see it so, and by the monotonic clock alone: a step of the wall clock ends nothing.
    isOver: ({ monotonic }: Moment) => performance.now() - monotonic >= 5_000,
  },
} as const satisfies Record<ProcessKind, object>;

export type ProcessRow = Tables["processes"]["$inferSelect"];

/** What others are to know of a process. */
export type ProcessFacts = Partial<Omit<ProcessRow, "id" | "kind" | "lease_until">>;

type ProcessName = Pick<ProcessRow, "id" | "kind">;

/** Writes the row of a process. @returns the database's time */
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

/** What a process has learned by renewing its lease. */
export interface Renewal<Read = undefined> {
  /** Before it was asked for. */
  readonly askedAt: Moment;
  /** The database's time. */
  readonly now: number;
  /** All of its kind, itself among them, and some that are gone. */
  readonly processes: readonly ProcessRow[];
  readonly read: Read;
  /** Whether the lease could have run out before. */
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
  /** For what has to be of one moment with the rows of the processes. */
  readonly read?: (tx: Tx) => Promise<Read>;
}

export type Membership<Read = undefined> = ReturnType<typeof createMembership<Read>>;

/** The row of this process among those that work on the database. @param options `id` is new with each start */
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
    const [askedAt, carried] = [thisMoment(), facts];
    const seen = await store.write(
      async (tx) => {
        const now = await renewProcess(tx, { id, kind }, carried);
        const { processes: t } = tx.tables;
        const processes = await tx.db.select().from(t).where(eq(t.kind, kind));
        return { now, processes, read: (await read?.(tx)) as Read };
      },
      { urgent: true },
    );
    // Another one that was asked for later has been answered already.
    if (newest !== null && newest.askedAt.monotonic > askedAt.monotonic) return newest;
    trust.renewed(seen.now);
    written = carried;
    newest = { ...seen, askedAt, isRegained: !isFresh() };
    return newest;
  }

  /** Rows of the same kind whose lease was over long ago, on either side: the database's clock may have gone back. */
  async function removeGone({ now, processes }: Renewal<Read>): Promise<void> {
    if (!mayJudge(now) || !processes.some((row) => Math.abs(row.lease_until - now) > keptMs)) return;
    await store.write(async ({ db, tables: { processes: t }, now: later }) => {
      await db.delete(t).where(and(eq(t.kind, kind), sql`abs(${t.lease_until} - ${later}) > ${keptMs}`));
    });
  }

  async function round(): Promise<void> {
    const renewal = await renew();
    renewed(renewal);
    await removeGone(renewal);
  }

  /** Beside one that is held up, since a lease that runs out ends what lives. */
  function begin(): void {
    const warned = round().catch((error) => log.warn("lease_not_renewed", { error }));
    const running = warned.finally(() => inFlight.delete(running));
    inFlight.add(running);
  }

  /** The lease is renewed no more, and the listener called no more, once this has resolved. */
  async function stop(): Promise<void> {
    clearInterval(timer);
    timer = undefined;
    await Promise.all(inFlight);
  }

  return {
    id,
    /** Part of a work: from its commit on this process counts. Where it is alone, all others are gone. */
    async enter(tx: Tx, known: ProcessFacts = {}): Promise<void> {
      facts = known;
      const { processes: t } = tx.tables;
      if (!store.isShared) await tx.db.delete(t).where(ne(t.id, id));
      await renewProcess(tx, { id, kind }, known);
    },
    /** @throws Fault `unavailable` */
    renew,
    /** From now on the lease is renewed by itself. @param listener called after each time, instead of the one before */
    start(listener = renewed): void {
      renewed = listener;
      timer ??= setInterval(begin, renewMs);
    },
    /** What others are to know from now on, at once if it is news. */
    tell(known: ProcessFacts): void {
      facts = known;
      if (timer !== undefined && inFlight.size === 0 && !Bun.deepEquals(known, written)) begin();
    },
    /** Nothing is begun on a lease that may have run out, since others may have taken this process for gone. */
    isFresh,
    /** Whether all live processes have had time to renew. @param databaseNow in milliseconds */
    mayJudge,
    stop,
    /** Removes the row, and does `also` in the same write. Never rejects: a lease that can't be dropped runs out. */
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
