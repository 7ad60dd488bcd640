// From accepted to ended: claims a call durably, hands it to a worker, records what came back. The database is
// the queue; what is in memory may vanish at any moment without losing or repeating a call.

import type { Tracer } from "../../core/tracing.ts";
import { MAX } from "../../kernel/limits.ts";
import { endsWithin } from "../../kernel/wait.ts";
import { untilStored } from "../../storage/failures.ts";
import type { CallBody } from "../../wire/body.ts";
import {
  type AcceptedCall,
  type Claims,
  type InvocationKey,
  type PendingCall,
  SMALL_BODY_BYTES,
  waitingAgents,
} from "../invocations/service.ts";
import { beginCallSpan, endCallSpan, spanned } from "../upstream/call-span.ts";
import { recordEnd } from "../upstream/record-end.ts";
import { failed, type Job, newTrace, type Outcome } from "./job.ts";
import {
  type Claiming,
  type ClaimingOptions,
  createClaiming,
  createReplicaLease,
  createRunningCalls,
  type ReplicaLeaseOptions,
  type RunningCall,
  type ScheduledCall,
} from "./ownership.ts";
import { CallQueues, type RunSlots } from "./queue.ts";
import type { WorkerPool } from "./workers/pool.ts";

/** Agents with pending calls that one query finds. */
const AGENTS_AT_ONCE = 128;

export interface SchedulerOptions extends ReplicaLeaseOptions, ClaimingOptions {
  readonly pool: WorkerPool;
  resolveCredential(tenant: string, ref: string, url: string): Promise<JobCredential>;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
  readonly claims: Pick<Claims, "begin" | "took" | "over">;
  readonly refusals: ReplicaLeaseOptions["refusals"] & ClaimingOptions["refusals"];
}

export class Scheduler {
  readonly #options: SchedulerOptions;
  readonly #queues: CallQueues<ScheduledCall>;
  readonly #running = createRunningCalls();
  readonly #claiming: Claiming;
  readonly #dispatch: ReturnType<typeof createDispatch>;
  readonly #lease: ReturnType<typeof createReplicaLease>;
  #draining = false;
  #givenUp = false;

  constructor(options: SchedulerOptions) {
    this.#options = options;
    const isDraining = () => this.#draining;
    this.#claiming = createClaiming(options, this.#running, isDraining);
    this.#dispatch = createDispatch(options, this.#claiming, isDraining);
    this.#lease = createReplicaLease(options);
    this.#queues = new CallQueues<ScheduledCall>({
      slots: MAX.runningCalls,
      agentSlots: this.#lease.agentMax,
      bodyBytes: MAX.runningBodyBytes,
      blockBodyBytes: SMALL_BODY_BYTES,
      takeBlock: this.#claiming.takeBlock,
      readOwn: this.#claiming.readOwn,
      run: (...call) => this.#run(...call),
    });
  }

  /** Ends calls that a dead process left running. Calls may be offered after this. */
  recover(): Promise<void> {
    return this.#lease.recover();
  }

  /** Takes up what is pending, and from now on what other replicas leave. */
  async start(): Promise<void> {
    await this.#takeUpPending();
    this.#lease.startSweeping(async () => {
      if (!this.#draining) await this.#takeUpPending();
    });
  }

  /**
   * A slot for a call that can start as soon as it is stored: claimed in the same write, it costs one write less. Null
   * when it has to wait; then it is stored pending, and offered.
   */
  reserve({ row, body }: AcceptedCall) {
    const { tenant, id } = row;
    const item = { tenant, id, body_bytes: body.byteLength };
    const slot = this.#queues.reserve(row.agent_id, item);
    if (slot === null) return null;
    const { claims, replica: owner } = this.#options;
    // The call is known from here on, since it can be cancelled from its commit on, and the answer of the commit may come late.
    const reserved = this.#claiming.begin(row.agent_id, item);
    return {
      claim: { owner, token: reserved.token },
      run: ({ call, body: stored }: AcceptedCall) =>
        slot.run({ ...item, inHand: { call, body: stored }, claimed: reserved }),
      giveBack: () => {
        claims.over(reserved.token);
        this.#running.remove(id);
        slot.giveBack();
      },
    };
  }

  offer({ row, call, body }: AcceptedCall): void {
    const item = { tenant: row.tenant, id: row.id, body_bytes: body.byteLength };
    this.#queues.offer(row.agent_id, item, { ...item, inHand: { call, body } });
  }

  /** A call of this agent has been paid for, and is now pending like any other. */
  checkPending(tenant: string, agentId: string): void {
    this.#queues.checkPending(tenant, agentId);
  }

  /** Another replica has left: takes up what it left pending, sooner than the next sweep would. */
  sweepNow(): void {
    const { log } = this.#options;
    if (!this.#draining) void this.#takeUpPending().catch((error) => log.warn("sweep_failed", { error }));
  }

  /** Calls of one agent that may run here at once, on each path. */
  get agentMax(): () => number {
    return this.#lease.agentMax;
  }

  /** How many calls hold a slot here. */
  inUse(): ReturnType<RunSlots["inUse"]> {
    return this.#queues.inUse();
  }

  running(): number {
    return this.#running.size;
  }

  /** Stops the upstream call of an invocation, if it runs here. */
  stop(id: string): void {
    this.#running.stop(id);
    this.#options.pool.cancel(id);
  }

  /** Starts nothing more, lets what runs end for `ms`, then ends it. Pending calls stay pending. */
  async drain(ms: number): Promise<void> {
    const { pool } = this.#options;
    this.#draining = true;
    this.#lease.stopSweeping();
    const idle = this.#queues.pause();
    await endsWithin(ms, idle);
    await pool.close();
    await endsWithin(5_000, idle);
    this.#givenUp = true;
  }

  /** Drops this replica's lease: no call runs on it any more, on either path. */
  leave(): Promise<void> {
    return this.#lease.leave();
  }

  async #run(agentId: string, item: ScheduledCall, made: () => void): Promise<void> {
    const { claims, log, pool, refusals } = this.#options;
    if (item.claimed === undefined && refusals.unnoted.has(item.id)) return;
    const running = item.claimed ?? this.#claiming.begin(agentId, item);
    const { key, token } = running;
    let isTaken = false;
    try {
      const inHand = item.inHand ?? null;
      const claimed =
        item.claimed === undefined
          ? await this.#claiming.claim(running, inHand, item.body_bytes)
          : await this.#claiming.confirm(running, inHand);
      isTaken = claimed !== null;
      if (claimed !== null) {
        claims.took(token, item.id);
        const outcome = await this.#dispatch(running, claimed);
        const own = { key, token, request_id: claimed.call.request_id };
        const recorded = recordEnd(this.#options, own, outcome, () => this.#givenUp);
        made();
        await recorded;
      } else claims.over(token);
    } catch (error) {
      claims.over(token, isTaken);
      log.error("invocation_left_open", { ...key, agent_id: agentId, error });
    }
    pool.recorded(item.id);
    this.#running.remove(item.id);
  }

  async #takeUpPending(): Promise<void> {
    const { store, replica, clock } = this.#options;
    const next = (after: string) =>
      store.execute(waitingAgents, { replica, now: clock.now(), after, limit: AGENTS_AT_ONCE });
    for (let agents = await next(""), last = agents.at(-1); last !== undefined; last = agents.at(-1)) {
      for (const { tenant, agent_id } of agents) this.#queues.checkPending(tenant, agent_id);
      if (agents.length < AGENTS_AT_ONCE) return;
      agents = await next(last.agent_id);
    }
  }
}

interface JobCredential {
  readonly header: Job["credential"];
  /** Changes when the secret changes. */
  readonly version: string;
}

const NO_CREDENTIAL: JobCredential = { header: null, version: "" };

/**
 * Hands a claimed call to a worker, with its credential, for as long as the claim is sure to hold: a process that was paused
 * may have been taken for dead by other replicas, and they have ended its calls then.
 *
 * @param isDraining whether this process is about to stop: then it waits no more for a store that is away
 */
function createDispatch(options: SchedulerOptions, claiming: Claiming, isDraining: () => boolean) {
  const { log, pool, resolveCredential, tracer = null } = options;

  /** Null when the credential can't be resolved. */
  async function resolve({ tenant, id }: InvocationKey, credential_ref: string, url: string) {
    try {
      return await untilStored(() => resolveCredential(tenant, credential_ref, url), isDraining);
    } catch (error) {
      log.warn("credential_not_resolved", { tenant, id, credential_ref, error });
      return null;
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

  /** Right before the call is dialled, a claim that was not checked for a while is checked again. */
  return async function dispatch(running: RunningCall, { call, body }: PendingCall): Promise<Outcome> {
    const { agentId, key } = running;
    const { credential_ref, url } = call;
    const credential = credential_ref === null ? NO_CREDENTIAL : await resolve(key, credential_ref, url);
    if (credential === null) return failed(newTrace(), "credential_error", "credential not resolved", 0);
    const ended = () => failed(newTrace(), "cancelled", "ended before it was made", 0);
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
    if (running.stopped || !(await claiming.stillHolds(running)) || running.stopped) return ended();
    const outcome = await sendOnce(body, running.believedAt.wall);
    if (!outcome.is_stale) return outcome;
    // Check the claim once more, and then trust it even if the clocks of the threads differ. The body is read again,
    // since the pool has taken over the first one.
    const again = await claiming.claim(running, null);
    return again === null || running.stopped ? ended() : sendOnce(again.body, null);
  };
}
