// Which calls this process owns. Each attempt to take a call has a token of its own, from before it is written until the call
// has ended. The tokens are compared with what the database says that this replica runs, both ways: a call that was ended
// elsewhere is broken off here within two seconds, and a call that nothing here works on does not stay running for ever.
//
// A replica has a row with a lease, by which the others that share the database know that it is alive. When the lease has run
// out, its running calls are ended, and its part of the limit of an agent's calls goes to the others. Only the database's clock
// decides that.

import { and, eq, isNotNull, ne, notInArray, sql } from "drizzle-orm";
import type { Clock } from "../../core/time.ts";
import { every } from "../../kernel/loop.ts";
import { untilStored } from "../../storage/failures.ts";
import { isLivingGateway, livingAmong, type Membership, type Renewal, removeProcess } from "../../storage/leases.ts";
import type { Store, StoreTools } from "../../storage/store.ts";
import {
  abandon,
  type ClaimedKey,
  type Ending,
  finish,
  giveUp,
  type InvocationKey,
  release,
} from "../invocations/service.ts";

export type Claims = ReturnType<typeof createClaims>;

export function createClaims() {
  /** By token, the call that has been taken with it; null until then. */
  const begun = new Map<string, string | null>();
  const unrecorded = new Set<string>();
  /** Claims that were over since the rows that are being judged were read; null while none are. */
  let overSince: Set<string> | null = null;
  return {
    /** Runs a comparison: a call that ends during it still counts as worked on, since its row was read before. */
    async during(work: () => Promise<void>): Promise<void> {
      overSince = new Set();
      await work().finally(() => {
        overSince = null;
      });
    },
    /** A new token for an attempt to take a call. */
    begin() {
      const token = crypto.randomUUID();
      begun.set(token, null);
      return token;
    },
    /** The claim is stored: the call is this process's to make. */
    took(token: string, id: string) {
      if (begun.has(token)) begun.set(token, id);
    },
    /**
     * The attempt is over.
     *
     * @param isUnrecorded the call may have been made, and its end could not be stored
     */
    over(token: string, isUnrecorded = false) {
      begun.delete(token);
      overSince?.add(token);
      if (isUnrecorded) unrecorded.add(token);
    },
    /** The calls that this process has taken and not ended. */
    taken: () => [...begun.values()].filter((id) => id !== null),
    /** What to do with a running call that has this claim. Null while it is being worked on here. */
    fateOf(token: string) {
      if (begun.has(token) || overSince?.has(token)) return null;
      return unrecorded.has(token) ? "abandon" : "release";
    },
  };
}

interface CompareOptions extends StoreTools {
  /** This replica's ID. */
  readonly replica: string;
  readonly claims: Pick<Claims, "taken" | "fateOf" | "during">;
  /** Breaks off a call that was ended elsewhere. */
  stop(id: string): void;
  /** Called with an agent whose call can be made again. */
  released(tenant: string, agentId: string): void;
}

/** Starts comparing. Returns a function that stops it. */
export function compareClaims(options: CompareOptions): () => void {
  const { store, log } = options;
  // Where this is the only process, the two can differ only after trouble with the disk.
  const pause = store.isShared ? 1_000 : 10_000;
  return every(pause, () => compareOnce(options).catch((error) => log.warn("running_calls_not_compared", { error })));
}

export const compareOnce = (options: CompareOptions): Promise<void> => options.claims.during(() => compare(options));

async function compare(options: CompareOptions): Promise<void> {
  const { store, replica, claims, stop } = options;
  // List the claims before the rows are read: each of them was already running in the database.
  const taken = claims.taken();
  const { openInvocations: t } = store.read.tables;
  const rows = await store.read.db
    .select({ tenant: t.tenant, id: t.id, agent_id: t.agent_id, claim: t.claim })
    .from(t)
    // The status in the text of the query, as in the partial index: a plan for any status could not use that.
    .where(and(sql`${t.status} = 'running'`, eq(t.owner, replica), isNotNull(t.claim)));
  const running = new Set(rows.map(({ id }) => id));
  for (const id of taken) if (!running.has(id)) stop(id);
  for (const { claim, ...row } of rows) if (claim !== null) await endLost(options, { ...row, claim });
}

interface RunningRow extends InvocationKey {
  readonly agent_id: string;
  readonly claim: string;
}

/** A claim whose commit lost its answer, or was stored after its attempt was over, has no work here. */
async function endLost(options: CompareOptions, { tenant, id, agent_id, claim }: RunningRow): Promise<void> {
  const { store, clock, log, claims, released } = options;
  const fate = claims.fateOf(claim);
  if (fate === null) return;
  const key = { tenant, id };
  if (fate === "release") {
    await store.write((tx) => release(tx, key, claim, clock.now()));
    released(tenant, agent_id);
  } else {
    await abandon(store, key, "internal", clock.now());
  }
  log.warn("orphaned_call_released", { tenant, invocation_id: id, fate });
}

export interface RecordEndOptions extends StoreTools {
  readonly claims: Pick<Claims, "over">;
}

/**
 * Stores how a call ended, and waits for a store that is away. Never rejects: if the end can't be stored, the
 * comparison of claims ends the call later.
 *
 * @param isGivenUp whether to stop waiting for a store that is away
 */
export async function recordEnd(
  { store, clock, log, claims }: RecordEndOptions,
  claimed: ClaimedKey,
  ending: Ending,
  isGivenUp: () => boolean,
): Promise<void> {
  const { key, token, request_id } = claimed;
  const named = { tenant: key.tenant, invocation_id: key.id, request_id };
  const write = (what: Ending) => untilStored(() => finish(store, claimed, what, clock.now()), isGivenUp);
  try {
    await write(ending).catch((error) => {
      if (isGivenUp()) throw error;
      log.error("outcome_not_recorded", { ...named, error });
      return write(onlyNumbersOf(ending));
    });
    claims.over(token);
  } catch (error) {
    log.error("invocation_left_open", { ...named, error });
    claims.over(token, true);
  }
}

/** For a database that refuses the upstream's answer but takes the rest of the end. */
function onlyNumbersOf(ending: Ending): Ending {
  return {
    ...ending,
    status: "failed",
    error_class: "internal",
    resp_sha256: null,
    response: null,
    response_truncated: false,
    response_content_type: null,
  };
}

const ORPHANS_AT_ONCE = 256;

/**
 * Ends the running calls of other replicas that are gone: they may have reached the upstream, so they are not made
 * again.
 *
 * @param replica the one that looks: without a row of its own it judges nobody
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
      const { openInvocations: t, processes } = tx.tables;
      const [own] = await tx.db.select({ now: tx.now }).from(processes).where(eq(processes.id, replica));
      if (own === undefined || !mayJudge(own.now)) return [];
      const living = tx.db.select({ id: processes.id }).from(processes).where(isLivingGateway(tx));
      const isGone = gone === null ? notInArray(t.owner, living) : eq(t.owner, gone);
      return tx.db
        .select({ tenant: t.tenant, id: t.id, claim: t.claim })
        .from(t)
        .where(and(sql`${t.status} = 'running'`, ne(t.owner, replica), isGone))
        .limit(ORPHANS_AT_ONCE);
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

export interface ReplicaLeaseOptions extends StoreTools {
  /** The row of this replica, new with each start. */
  readonly membership: Membership;
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
  const { store, clock, log, membership, previous = null, agentConcurrency, agentMaxRaised, refusals } = options;
  const { id: replica } = membership;
  let living = 1;

  const agentMax = () => (membership.isFresh() ? Math.max(1, Math.floor(agentConcurrency / living)) : 0);

  function count(renewal: Renewal): void {
    const before = renewal.isRegained ? 0 : agentMax();
    const counted = livingAmong(renewal).length;
    const isNews = counted !== living;
    living = counted;
    if (isNews) log.info("replicas_counted", { replicas: living, agent_concurrency: agentMax() });
    if (agentMax() > before) agentMaxRaised();
  }

  /** Ends the running calls of processes that certainly are gone, so nobody waits for a lease to run out. */
  async function bury(gone: string | null): Promise<void> {
    if (gone !== null) await store.write((tx) => removeProcess(tx, gone));
    const ended = await endOrphans(store, clock, replica, undefined, gone);
    if (ended.length > 0) log.warn("orphaned_calls_ended", { calls: ended.length });
  }

  return {
    /** Calls of one agent that this replica may run on each path: its part of the limit. */
    agentMax,
    /** Begins to count the replicas, after the end of what a dead process left that held this one's data directory. */
    async recover(): Promise<void> {
      // Where the database is not shared, that directory's lock tells that no other process runs.
      if (!store.isShared || previous !== null) await bury(previous);
      count(await membership.renew());
      membership.start(count);
    },
    /**
     * From now on ends the calls of replicas that are gone, and takes up those that are pending. A call that was refused to its
     * caller and appeared later goes first: it must not end as one that was accepted. Gives what stops it.
     */
    startSweeping(offerPending: () => Promise<void>): () => void {
      if (!store.isShared) return () => {};
      const sweep = async () => {
        await refusals.removeAppeared();
        await endOrphans(store, clock, replica, membership.mayJudge);
        await offerPending();
      };
      return every(2_000, () => sweep().catch((error) => log.warn("sweep_failed", { error })));
    },
  };
}
