// Takes transactional calls from acceptance to their end: claims each call in the database, hands it to a worker, and records
// the outcome. The database is the queue; what is in memory may vanish at any moment without losing or repeating a call. A
// pending call runs only after this process has claimed it: in a block with the agent's other oldest calls, or, if its body is
// large, alone by its ID. A claim is noted in memory before it is written, since the write's answer may come late or never.
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import type { Tracer } from "../../core/tracing.ts";
import { MAX } from "../../kernel/limits.ts";
import { CLAIM_BELIEVED_MS, isOlder, type Moment, thisMoment } from "../../kernel/time.ts";
import { endsWithin, outlastRequest } from "../../kernel/wait.ts";
import { untilStored } from "../../storage/failures.ts";
import type { CallBody } from "../../wire/body.ts";
import type { AcceptedCall, InvocationKey, PendingCall } from "../invocations/service.ts";
import { claim, holdsClaim, release, SMALL_BODY_BYTES, takeCommand, waitingAgents } from "../invocations/service.ts";
import { beginCallSpan, endCallSpan, spanned } from "../upstream/call-span.ts";
import { CallError, credentialProblem } from "../upstream/failure.ts";
import { newTrace } from "../upstream/headers.ts";
import { type Claims, type RecordEndOptions, recordEnd } from "../upstream/ownership.ts";
import { cancelledCall, failed, type Job, type Outcome } from "./job.ts";
import { type CallBlock, CallQueues, type QueueEntry, type RunSlots } from "./queue.ts";
import type { WorkerPool } from "./workers/pool.ts";

const AGENTS_AT_ONCE = 128;

export interface SchedulerOptions extends RecordEndOptions {
  readonly replica: string;
  readonly slots?: number;
  agentMax(): number;
  readonly pool: WorkerPool;
  resolveCredential(tenant: string, ref: string, url: string): Promise<JobCredential>;
  /** Left out if tracing is off. */
  readonly tracer?: Tracer | null;
  readonly claims: Pick<Claims, "begin" | "took" | "over">;
  /** IDs of calls that this process refused but could not note in the database yet. Their records may still appear. */
  readonly refusals: { readonly unnoted: ReadonlySet<string> };
}

/** A call that holds a slot, from its claim to the record of its end. */
interface RunningCall {
  readonly agentId: string;
  readonly key: InvocationKey;
  readonly token: string;
  /** When the claim was last known to hold. */
  believedAt: Moment;
  /** Whether the call was ended by somebody else meanwhile: if it has not been sent yet, it is not sent. */
  stopped: boolean;
}

/** A call that waits for a slot, or has one. */
interface ScheduledCall extends QueueEntry {
  /** Set if the call was claimed before it is run: by the write that accepted it, or in a block. */
  readonly claimed?: { readonly running: RunningCall; readonly pending: PendingCall };
}

export class Scheduler {
  readonly #options: SchedulerOptions;
  readonly #queues: CallQueues<ScheduledCall>;
  readonly #running = new Map<string, RunningCall>();
  /** Calls that are being claimed by their ID. */
  readonly #claiming = new Set<RunningCall>();
  /** For each block that is being taken: the IDs of calls that were stopped meanwhile. The block may contain those calls. */
  readonly #stoppedWhileTaking = new Set<Set<string>>();
  readonly #dispatch: ReturnType<typeof createDispatch>;
  #draining = false;
  #givenUp = false;

  constructor(options: SchedulerOptions) {
    this.#options = options;
    const isDraining = () => this.#draining;
    this.#dispatch = createDispatch(options, (running) => this.#claim(running), isDraining);
    this.#queues = new CallQueues<ScheduledCall>({
      slots: options.slots ?? MAX.runningCalls,
      agentSlots: options.agentMax,
      bodyBytes: MAX.runningBodyBytes,
      blockBodyBytes: SMALL_BODY_BYTES,
      takeBlock: (...block) => outlastRequest(() => this.#takeBlock(...block)),
      run: (...call) => outlastRequest(() => this.#run(...call)),
    });
  }

  /**
   * Takes a slot for a call that can start once it is stored: the write that accepts it claims it too, which saves a write.
   * Then `run` or `giveBack` must follow. Null when the call has to wait: then it is to be stored as pending, and offered.
   */
  reserve({ row, body }: AcceptedCall) {
    const { tenant, id, agent_id } = row;
    const item = { tenant, id, body_bytes: body.byteLength };
    const slot = this.#queues.reserve(agent_id, item);
    if (slot === null) return null;
    const { claims, replica: owner } = this.#options;
    // The call is in memory from here on: its caller can cancel it once it is committed, and the commit's answer may be late.
    const running = this.#begin(agent_id, item);
    return {
      claim: { owner, token: running.token },
      run: ({ call, body: stored }: AcceptedCall) =>
        slot.run({ ...item, claimed: { running, pending: { call, body: stored } } }),
      giveBack: () => {
        claims.over(running.token);
        this.#running.delete(id);
        slot.giveBack();
      },
    };
  }

  /** Says that calls of this agent are pending. @param id of the call, if it is the only one that was never offered */
  offer(tenant: string, agentId: string, id?: string): void {
    this.#queues.offer(tenant, agentId, id);
  }

  /** Offers the calls of all agents that have pending ones, whichever process accepted them. */
  async offerPending(): Promise<void> {
    const { store, replica, clock } = this.#options;
    const agentsAfter = (after: string) =>
      store.execute(waitingAgents, { replica, now: clock.now(), after, limit: AGENTS_AT_ONCE });
    for (let after = ""; !this.#draining; ) {
      const agents = await agentsAfter(after);
      for (const { tenant, agent_id } of agents) this.#queues.offer(tenant, agent_id);
      const last = agents.at(-1);
      if (last === undefined || agents.length < AGENTS_AT_ONCE) return;
      after = last.agent_id;
    }
  }

  inUse(): ReturnType<RunSlots["inUse"]> {
    return this.#queues.inUse();
  }

  running(): number {
    return this.#running.size;
  }

  /** Stops the upstream call of an invocation, if the call runs here or is just being taken. */
  stop(id: string): void {
    const running = this.#running.get(id);
    if (running !== undefined) running.stopped = true;
    else for (const stopped of this.#stoppedWhileTaking) stopped.add(id);
    this.#options.pool.cancel(id);
  }

  /** Starts no more calls, waits up to `ms` for the running ones, then ends them. Pending calls stay pending. */
  async drain(ms: number): Promise<void> {
    const { pool } = this.#options;
    this.#draining = true;
    const idle = this.#queues.pause();
    await endsWithin(ms, idle);
    await pool.close();
    await endsWithin(5_000, idle);
    this.#givenUp = true;
  }

  /** Notes a call in memory whose claim is about to be written. */
  #begin(agentId: string, { tenant, id }: QueueEntry): RunningCall {
    const token = this.#options.claims.begin();
    const running = { agentId, key: { tenant, id }, token, believedAt: thisMoment(), stopped: false };
    this.#running.set(id, running);
    return running;
  }

  /** Claims a call by its ID. Null when another process has claimed it, or it was cancelled. */
  async #claim(running: RunningCall, bodyBytes = 0): Promise<PendingCall | null> {
    const { store, clock, replica: owner } = this.#options;
    const { key, token } = running;
    const write = () => claim(store, { key, owner, token, now: clock.now() }, bodyBytes);
    this.#claiming.add(running);
    try {
      return await untilStored(write, () => this.#draining);
    } finally {
      this.#claiming.delete(running);
    }
  }

  /** Claims the agent's oldest pending calls with IDs above `after`, in one write. */
  async #takeBlock(tenant: string, agent_id: string, slots: number, after: string): Promise<CallBlock<ScheduledCall>> {
    const { store, clock, replica: owner, claims, refusals } = this.#options;
    const tokens = Array.from({ length: slots }, () => claims.begin());
    const claiming = [...this.#claiming].filter(({ agentId }) => agentId === agent_id);
    const leftOut = [...claiming.map(({ key }) => key.id), ...refusals.unnoted];
    const [used, stopped] = [new Set<string>(), new Set<string>()];
    const believedAt = thisMoment();
    this.#stoppedWhileTaking.add(stopped);
    try {
      const block = { tenant, agent_id, owner, tokens, now: clock.now(), after, leftOut };
      const { taken, large } = await store.execute(takeCommand, block);
      const calls = taken.map(({ id, token, call, body }): ScheduledCall => {
        used.add(token);
        const pending = { call: JSON.parse(call) as Call, body };
        const running = { agentId: agent_id, key: { tenant, id }, token, believedAt, stopped: stopped.has(id) };
        this.#running.set(id, running);
        return { tenant, id, body_bytes: body.byteLength, claimed: { running, pending } };
      });
      return { taken: calls, large: large === null ? null : { tenant, ...large } };
    } finally {
      this.#stoppedWhileTaking.delete(stopped);
      // If the answer was lost, calls may be claimed by these tokens; comparing claims with the database gives them back.
      for (const token of tokens) if (!used.has(token)) claims.over(token);
    }
  }

  async #run(agentId: string, item: ScheduledCall, freeSlot: () => void): Promise<void> {
    const { claims, log, pool, refusals } = this.#options;
    if (item.claimed === undefined && refusals.unnoted.has(item.id)) return;
    const running = item.claimed?.running ?? this.#begin(agentId, item);
    const { key, token } = running;
    let isTaken = false;
    try {
      const pending = await (item.claimed === undefined
        ? this.#claim(running, item.body_bytes)
        : this.#confirmed(running, item.claimed.pending));
      isTaken = pending !== null;
      if (pending !== null) {
        claims.took(token, item.id);
        const outcome = await this.#dispatch(running, pending);
        const own = { key, token, request_id: pending.call.request_id };
        const isGivenUp = () => this.#givenUp;
        const ending =
          outcome === null
            ? untilStored(() => this.#giveBack(running), isGivenUp).then(() => claims.over(token))
            : recordEnd(this.#options, own, outcome, isGivenUp);
        freeSlot();
        await ending;
      } else claims.over(token);
    } catch (error) {
      claims.over(token, isTaken);
      log.error("invocation_left_open", { ...key, agent_id: agentId, error });
    }
    pool.recorded(item.id);
    this.#running.delete(item.id);
  }

  /**
   * The call, if it may still run here. If this process is stopping, the call is given back, for another process to run. If
   * the call was refused to its caller while a block took it, it is given back too, so that its record can be removed.
   */
  async #confirmed(running: RunningCall, pending: PendingCall): Promise<PendingCall | null> {
    if (!this.#draining && !this.#options.refusals.unnoted.has(running.key.id)) return pending;
    await this.#giveBack(running);
    return null;
  }

  /** Returns a claimed call to pending, and offers it here too, since there may be no other process. */
  async #giveBack({ agentId, key, token }: RunningCall): Promise<void> {
    const { store, clock } = this.#options;
    await store.write((tx) => release(tx, key, token, clock.now()));
    this.#queues.offer(key.tenant, agentId);
  }
}

interface JobCredential {
  readonly header: Job["credential"];
  /** Changes when the secret changes. */
  readonly version: string;
}

const NO_CREDENTIAL: JobCredential = { header: null, version: "" };

/**
 * Hands a claimed call to a worker, with its credential, but only while the claim is sure to hold: if this process was paused,
 * other replicas may have taken it for dead and ended its calls.
 * @param claimAgain reads a call that is claimed already; null when the claim is lost
 * @param isDraining whether this process is stopping, and so must not wait for a database that is away
 */
function createDispatch(
  { store, log, pool, resolveCredential, tracer = null }: SchedulerOptions,
  claimAgain: (running: RunningCall) => Promise<PendingCall | null>,
  isDraining: () => boolean,
) {
  /** The credential; a CallError when it can't be resolved; "unknown" when the database or the secret's key stays unavailable. */
  async function resolve(running: RunningCall, credential_ref: string, url: string) {
    const { tenant, id } = running.key;
    const until = performance.now() + 10_000;
    const isGivenUp = () => isDraining() || running.stopped || performance.now() > until;
    try {
      return await untilStored(() => resolveCredential(tenant, credential_ref, url), isGivenUp);
    } catch (error) {
      log.warn("credential_not_resolved", { tenant, id, credential_ref, error });
      const isUnknown = error instanceof Fault && error.kind === "unavailable" && !running.stopped;
      return isUnknown ? "unknown" : credentialProblem(error);
    }
  }

  function send(job: Job): Promise<Outcome> {
    if (tracer === null) return pool.run(job);
    const { id: invocationId, tenant, agent_id: agentId, call } = job;
    const { url, headers } = call;
    const span = beginCallSpan(tracer, { tenant, agentId, invocationId, method: "POST", url, headers });
    return pool.run({ ...job, call: spanned(call, span) }).then((outcome) => {
      endCallSpan(span, outcome);
      return outcome;
    });
  }

  /** Whether the claim still holds. Asks the database only if the last answer is too old to be believed. */
  async function stillHolds(running: RunningCall): Promise<boolean> {
    if (!isOlder(running.believedAt, CLAIM_BELIEVED_MS)) return true;
    const askedAt = thisMoment();
    const isHeld = await untilStored(() => holdsClaim(store.read, running.key, running.token), isDraining);
    running.believedAt = askedAt;
    return isHeld;
  }

  /** Null when the call is to be given back, since another process may be able to make it. */
  return async function dispatch(running: RunningCall, { call, body }: PendingCall): Promise<Outcome | null> {
    const { agentId, key } = running;
    const { credential_ref, url } = call;
    const credential = credential_ref === null ? NO_CREDENTIAL : await resolve(running, credential_ref, url);
    if (credential === "unknown") return null;
    if (credential instanceof CallError) return failed(newTrace(), credential.failure, 0);
    const ended = () => cancelledCall("ended before it was sent");
    const sendOnce = (sent: CallBody, claim_seen_at: number | null) =>
      send({
        id: key.id,
        tenant: key.tenant,
        agent_id: agentId,
        call,
        credential: credential.header,
        session_key:
          call.protocol === "mcp" ? JSON.stringify([agentId, url, credential_ref, credential.version]) : null,
        claim_seen_at,
        body: sent,
      });
    // `stopped` is read again for a cancel that came during the check.
    if (running.stopped || !(await stillHolds(running)) || running.stopped) return ended();
    const outcome = await sendOnce(body, running.believedAt.wall);
    if (!outcome.is_stale) return outcome;
    // The worker found the claim too old. Check the claim once more, and then trust it, even if the clocks of the threads
    // differ. The body is read again, since the pool owns the first one.
    const again = await claimAgain(running);
    return again === null || running.stopped ? ended() : sendOnce(again.body, null);
  };
}
