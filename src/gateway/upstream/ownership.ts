// Which calls this process owns. Each attempt to claim a call has a token of its own, from before the write until the call has
// ended. The tokens are compared periodically with the calls that run here by the database. A call that was ended elsewhere
// is stopped here within two seconds, and a call that nothing here works on does not stay running for ever.
//
// Each replica has a lease, by which the others on the database know that it is alive. When the lease has expired, its running
// calls are ended, and its share of each agent's concurrency goes to the others. Only the database's clock decides that.
import { and, eq, isNotNull, ne, notInArray, sql } from "drizzle-orm";
import type { Clock } from "../../core/time.ts";
import { every } from "../../kernel/loop.ts";
import { outlastRequest } from "../../kernel/wait.ts";
import { untilStored } from "../../storage/failures.ts";
import { isLivingGateway, livingAmong, type Membership, type Renewal, removeProcess } from "../../storage/leases.ts";
import type { Store, StoreTools } from "../../storage/store.ts";
import type { ClaimedKey, Ending, InvocationKey } from "../invocations/service.ts";
import { endOpen, endRunning, finish, invocationByKey, release } from "../invocations/service.ts";

export type Claims = ReturnType<typeof createClaims>;

export function createClaims() {
  /** By token, the ID of the call that was claimed with it; null until the claim is stored. */
  const active = new Map<string, string | null>();
  const unrecorded = new Set<string>();
  /** Claims that ended since the current comparison began; null outside a comparison. */
  let endedMeanwhile: Set<string> | null = null;
  return {
    /** Runs a comparison. A call that ends during it still counts as active, since its row may have been read before. */
    async during(work: () => Promise<void>): Promise<void> {
      endedMeanwhile = new Set();
      await work().finally(() => {
        endedMeanwhile = null;
      });
    },
    begin() {
      const token = crypto.randomUUID();
      active.set(token, null);
      return token;
    },
    /** The claim is stored, so this process makes the call. */
    took(token: string, id: string) {
      if (active.has(token)) active.set(token, id);
    },
    /** The attempt has ended. @param isUnrecorded the call may have been made, and its end could not be stored */
    over(token: string, isUnrecorded = false) {
      active.delete(token);
      endedMeanwhile?.add(token);
      if (isUnrecorded) unrecorded.add(token);
    },
    /** The calls that this process has claimed and not ended. */
    taken: () => [...active.values()].filter((id) => id !== null),
    /** What to do with a running call that has this claim; null while this process works on it. */
    fateOf(token: string) {
      if (active.has(token) || endedMeanwhile?.has(token)) return null;
      return unrecorded.has(token) ? "abandon" : "release";
    },
  };
}

interface CompareOptions extends StoreTools {
  readonly replica: string;
  readonly claims: Pick<Claims, "taken" | "fateOf" | "during">;
  stop(id: string): void;
  /** Called with an agent whose call can be made again. */
  released(tenant: string, agentId: string): void;
}

/** Starts the periodic comparison. Returns a function that stops it. */
export function compareClaims(options: CompareOptions): () => void {
  const { store, log } = options;
  // Where this is the only process, claims and rows can differ only after trouble with the disk.
  const pause = store.isShared ? 1_000 : 10_000;
  return every(pause, () => compareOnce(options).catch((error) => log.warn("running_calls_not_compared", { error })));
}

export const compareOnce = (options: CompareOptions): Promise<void> => options.claims.during(() => compare(options));

async function compare(options: CompareOptions): Promise<void> {
  const { store, replica, claims, stop } = options;
  // The claims are listed before the rows are read, so that each of them was already running in the database.
  const taken = claims.taken();
  const { openInvocations: t } = store.read.tables;
  const rows = await store.read.db
    .select({ tenant: t.tenant, id: t.id, agent_id: t.agent_id, claim: t.claim })
    .from(t)
    // The status is literal, as in the partial index: a plan for a status parameter could not use that index.
    .where(and(sql`${t.status} = 'running'`, eq(t.owner, replica), isNotNull(t.claim)));
  const running = new Set(rows.map(({ id }) => id));
  for (const id of taken) if (!running.has(id)) stop(id);
  for (const { claim, ...row } of rows) if (claim !== null) await endLost(options, row, claim);
}

type RunningRow = InvocationKey & { readonly agent_id: string };

/** Ends a running call that nothing here works on: its commit's answer was lost, or came after the attempt had ended. */
async function endLost(options: CompareOptions, { tenant, id, agent_id }: RunningRow, claim: string) {
  const { store, clock, log, claims, released } = options;
  const fate = claims.fateOf(claim);
  if (fate === null) return;
  const key = { tenant, id };
  if (fate === "release") {
    await store.write((tx) => release(tx, key, claim, clock.now()));
    released(tenant, agent_id);
  } else {
    await endOpen(store, key, "internal", clock.now());
  }
  log.warn("orphaned_call_released", { tenant, invocation_id: id, fate });
}

export interface RecordEndOptions extends StoreTools {
  readonly claims: Pick<Claims, "over">;
}

/**
 * Stores how a call ended, and waits for a store that is away. Never rejects: an end that can't be stored is left to
 * the comparison of claims.
 * @param isGivenUp whether to stop waiting
 * @returns false when the record says otherwise: it had ended before, as by a cancel, or could not be stored so
 */
export async function recordEnd(
  { store, clock, log, claims }: RecordEndOptions,
  claimed: ClaimedKey,
  ending: Ending,
  isGivenUp: () => boolean,
): Promise<boolean> {
  const { key, token, request_id } = claimed;
  const named = { tenant: key.tenant, invocation_id: key.id, request_id };
  let tries = 0;
  async function tryOnce(what: Ending): Promise<boolean> {
    tries++;
    if (await finish(store, claimed, what, clock.now())) return true;
    // An earlier try may have been stored, though its answer was lost. Or another end came first, as by a cancel.
    const row = tries > 1 ? await invocationByKey(store.read, key) : null;
    return row?.status === what.status && row.error_class === what.error_class;
  }
  const write = (what: Ending) => outlastRequest(() => untilStored(() => tryOnce(what), isGivenUp));
  try {
    const isRecorded = await write(ending).catch(async (error) => {
      if (isGivenUp()) throw error;
      log.error("outcome_not_recorded", { ...named, error });
      await write(onlyNumbersOf(ending));
      return false;
    });
    claims.over(token);
    return isRecorded;
  } catch (error) {
    log.error("invocation_left_open", { ...named, error });
    claims.over(token, true);
    return false;
  }
}

/** The end without the upstream's answer, for a database that refuses the answer. */
function onlyNumbersOf(ending: Ending): Ending {
  return {
    ...ending,
    status: "failed",
    error_class: "internal",
    error_detail: null,
    resp_sha256: null,
    response: null,
    response_truncated: false,
    response_content_type: null,
  };
}

const ORPHANS_AT_ONCE = 256;

/**
 * Ends the running calls of other replicas that are gone. The calls may have reached the upstream, so they are not made again.
 * @param replica this replica: without a row of its own it judges no other
 * @param mayJudge whether all live replicas have had time to renew, by the database's time in the same write
 * @param gone a replica known to be gone, whatever its lease says; null for all whose lease has expired
 * @returns the calls that were ended
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
      const liveReplicas = tx.db.select({ id: processes.id }).from(processes).where(isLivingGateway(tx));
      const isGone = gone === null ? notInArray(t.owner, liveReplicas) : eq(t.owner, gone);
      return tx.db
        .select({ tenant: t.tenant, id: t.id, claim: t.claim })
        .from(t)
        .where(and(sql`${t.status} = 'running'`, ne(t.owner, replica), isGone))
        .limit(ORPHANS_AT_ONCE);
    });
    // Ended concurrently, so that the store commits many together: a process may leave thousands, and the start of the next one
    // waits for their end. A call that was released and claimed by another replica since then has another claim.
    const ends = group.map(async ({ claim, ...key }) => {
      if (await endRunning(store, key, "internal", clock.now(), claim, "process_ended")) ended.push(key);
    });
    await Promise.all(ends);
    if (group.length < ORPHANS_AT_ONCE) return ended;
  }
}

export interface ReplicaLeaseOptions extends StoreTools {
  /** This replica's row in `processes`, new with each start. */
  readonly membership: Membership;
  /** A replica that is certainly gone, since this process holds the lock of its data directory; null when none is known. */
  readonly previous?: string | null;
  /** The limit of one agent's running calls on one path, over all replicas. */
  readonly agentConcurrency: number;
  /** Called when this replica's share of each agent's limit has grown. */
  agentMaxRaised(): void;
  /** Removes the records of refused calls that have appeared. */
  readonly refusals: { removeAppeared(): Promise<unknown> };
}

export function createReplicaLease(options: ReplicaLeaseOptions) {
  const { store, clock, log, membership, previous = null, agentConcurrency, agentMaxRaised, refusals } = options;
  const { id: replica } = membership;
  let liveReplicas = 1;

  const agentMax = () => (membership.isFresh() ? Math.max(1, Math.floor(agentConcurrency / liveReplicas)) : 0);

  function count(renewal: Renewal): void {
    const before = renewal.isRegained ? 0 : agentMax();
    const counted = livingAmong(renewal).length;
    const isNews = counted !== liveReplicas;
    liveReplicas = counted;
    if (isNews) log.info("replicas_counted", { replicas: liveReplicas, agent_concurrency: agentMax() });
    if (agentMax() > before) agentMaxRaised();
  }

  /** Ends the running calls of a process that is certainly gone, without waiting for its lease to expire. */
  async function endCallsOf(gone: string | null): Promise<void> {
    if (gone !== null) await store.write((tx) => removeProcess(tx, gone));
    const ended = await endOrphans(store, clock, replica, undefined, gone);
    if (ended.length > 0) log.warn("orphaned_calls_ended", { calls: ended.length });
  }

  return {
    /** This replica's share of an agent's limit of running calls, on each path. */
    agentMax,
    /** Ends the calls of the previous process on this data directory, then begins to count the replicas. */
    async recover(): Promise<void> {
      // Where the database is not shared, the data directory's lock proves that no other process runs.
      if (!store.isShared || previous !== null) await endCallsOf(previous);
      count(await membership.renew());
      membership.start(count);
    },
    /**
     * Starts a periodic sweep, which ends the calls of gone replicas and takes up pending calls. It first removes calls
     * that were refused to their caller and appeared later, since they must not end as accepted ones. Returns what stops it.
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
