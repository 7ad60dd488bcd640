// In one file, since a call passes all of it, from its place to the record of its end.
// From accepted to ended: claims a call durably, hands it to a worker, records what came back. The database is
// the queue; what is in memory may vanish at any moment without losing or repeating a call.

import { endsWithin } from "../../concurrency/deadline.ts";
import { CLAIM_BELIEVED_MS, isOlder, type Moment, thisMoment } from "../../core/age.ts";
import type { Tracer } from "../../core/tracing.ts";
import { untilStored } from "../../storage/retry-until-stored.ts";
import type { CallBody } from "../../wire/body.ts";
import {
  type AcceptedCall,
  type Claims,
  claim,
  holdsClaim,
  type InvocationKey,
  ownPending,
  type PendingCall,
  release,
  SMALL_BODY_BYTES,
  takePending,
  waitingAgents,
} from "../invocations/service.ts";
import { beginCallSpan, endCallSpan, spanned } from "../upstream/call-span.ts";
import { recordEnd } from "../upstream/record-end.ts";
import type { QueueEntry } from "./agent-queue.ts";
import { type CallBlock, CallQueues, type OwnBlock } from "./call-queues.ts";
import type { Job, Outcome } from "./job.ts";
import { failed, newTrace } from "./outcome.ts";
import { createReplicaLease, type ReplicaLeaseOptions } from "./replica-lease.ts";
import type { WorkerPool } from "./workers/pool.ts";

const PLACES = 4096;
/** Agents that are found in one look for pending calls. */
const AGENTS_AT_ONCE = 128;
const RUNNING_BODY_BYTES_MAX = 96 * 1024 * 1024;
const LAST_RECORDS_MS = 5_000;

interface JobCredential {
  readonly header: Job["credential"];
  /** Changes when the secret changes. */
  readonly version: string;
}

export interface SchedulerOptions extends ReplicaLeaseOptions {
  readonly pool: WorkerPool;
  readonly agent_concurrency: number;
  readonly claims: Pick<Claims, "begin" | "took" | "over">;
  readonly refusals: ReplicaLeaseOptions["refusals"] & {
    /** Calls that this process refused but could not note yet. Their records may still appear. */
    readonly unnoted: ReadonlySet<string>;
  };
  resolveCredential(tenant: string, ref: string, url: string): Promise<JobCredential>;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
}

interface ScheduledCall extends QueueEntry {
  readonly inHand?: PendingCall;
  /** Of a call that was claimed before it came here: by the write that accepted it, or with others. */
  readonly claimed?: Running;
}

/** A call that holds a place, from its claim to its record. */
interface Running {
  readonly agentId: string;
  readonly key: InvocationKey;
  /** Of the claim. */
  readonly token: string;
  /** When the claim was last known to hold. */
  believedAt: Moment;
  /** Ended elsewhere meanwhile: if it has not been sent yet, it is not sent. */
  stopped: boolean;
}

export class Scheduler {
  readonly #options: SchedulerOptions;
  readonly #queues: CallQueues<ScheduledCall>;
  readonly #running = new Map<string, Running>();
  /** By agent, the calls that are just being claimed by their ID. */
  readonly #claiming = new Map<string, Set<string>>();
  /** For each block that is being taken, the calls that were to be stopped meanwhile: it may bring them. */
  readonly #taking = new Set<Set<string>>();
  #draining = false;
  #givenUp = false;
  readonly #lease: ReturnType<typeof createReplicaLease>;

  constructor(options: SchedulerOptions) {
    this.#options = options;
    this.#lease = createReplicaLease(options);
    this.#queues = new CallQueues<ScheduledCall>({
      places: PLACES,
      agentPlaces: options.agentPlaces?.limitOf("transactional") ?? options.agent_concurrency,
      bodyBytes: RUNNING_BODY_BYTES_MAX,
      blockBodyBytes: SMALL_BODY_BYTES,
      takeBlock: (...block) => this.#takeBlock(...block),
      readOwn: (...agent) => this.#readOwn(...agent),
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
   * A place for a call that can start as soon as it is stored: claimed in the same write, it costs one write less. Null
   * when it has to wait; then it is stored pending, and offered.
   */
  reserve({ row, body }: AcceptedCall) {
    const { tenant, id } = row;
    const item = { tenant, id, body_bytes: body.byteLength };
    const place = this.#queues.reserve(row.agent_id, item);
    if (place === null) return null;
    const { claims, replica: owner } = this.#options;
    // Known from here on, since it can be cancelled from the commit on, of which the answer may come late.
    const reserved = this.#begin(row.agent_id, item);
    return {
      claim: { owner, token: reserved.token },
      run: ({ call, body: stored }: AcceptedCall) =>
        place.run({ ...item, inHand: { call, body: stored }, claimed: reserved }),
      giveBack: () => {
        claims.over(reserved.token);
        this.#running.delete(id);
        place.giveBack();
      },
    };
  }

  offer({ row, call, body }: AcceptedCall): void {
    const item = { tenant: row.tenant, id: row.id, body_bytes: body.byteLength };
    this.#queues.offer(row.agent_id, item, { ...item, inHand: { call, body } });
  }

  /** A call of this agent has been paid for, and is now pending like any other. */
  take(tenant: string, agentId: string): void {
    this.#queues.look(tenant, agentId);
  }

  /** Another replica has left: takes up what it left pending, sooner than the next sweep would. */
  lookAround(): void {
    const { log } = this.#options;
    if (!this.#draining) void this.#takeUpPending().catch((error) => log.warn("sweep_failed", { error }));
  }

  /** How many calls hold a place here. */
  running(): number {
    return this.#running.size;
  }

  /** Stops the upstream call of an invocation, if it runs here. */
  stop(id: string): void {
    const running = this.#running.get(id);
    if (running !== undefined) running.stopped = true;
    else for (const stopped of this.#taking) stopped.add(id);
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
    await endsWithin(LAST_RECORDS_MS, idle);
    this.#givenUp = true;
  }

  /** Drops this replica's lease: no call runs on it any more, on either path. */
  leave(): Promise<void> {
    return this.#lease.leave();
  }

  async #readOwn(tenant: string, agent_id: string, after: string, limit: number): Promise<OwnBlock<ScheduledCall>> {
    const { store, clock, replica } = this.#options;
    const look = { tenant, agent_id, replica, now: clock.now(), after, limit };
    const { calls, isAll } = await store.lookUp(ownPending, look);
    return { own: calls.map((call) => ({ tenant, ...call })), isAll };
  }

  async #takeBlock(tenant: string, agent_id: string, places: number, after: string): Promise<CallBlock<ScheduledCall>> {
    const { store, clock, replica: owner, claims, refusals } = this.#options;
    const tokens = Array.from({ length: places }, () => claims.begin());
    const leftOut = [...(this.#claiming.get(agent_id) ?? []), ...refusals.unnoted];
    const used = new Set<string>();
    const stopped = new Set<string>();
    this.#taking.add(stopped);
    const askedAt = thisMoment();
    try {
      const block = { tenant, agent_id, owner, tokens, now: clock.now(), after, leftOut };
      const { taken, large } = await takePending(store, block);
      const calls = taken.map(({ id, token, inHand }) => {
        used.add(token);
        const claimed = this.#hold(agent_id, { tenant, id }, token, askedAt);
        claimed.stopped = stopped.has(id);
        return { tenant, id, body_bytes: inHand.body.byteLength, inHand, claimed };
      });
      return { taken: calls, large: large === null ? null : { tenant, ...large } };
    } finally {
      this.#taking.delete(stopped);
      // What was taken by those of a lost answer is given back when the claims are compared.
      for (const token of tokens) if (!used.has(token)) claims.over(token);
    }
  }

  async #run(agentId: string, item: ScheduledCall, made: () => void): Promise<void> {
    const { claims, log, refusals } = this.#options;
    if (item.claimed === undefined && refusals.unnoted.has(item.id)) return;
    const running = item.claimed ?? this.#begin(agentId, item);
    const { key, token } = running;
    let isTaken = false;
    try {
      const inHand = item.inHand ?? null;
      const claimed =
        item.claimed === undefined ? await this.#claim(running, inHand) : await this.#keep(running, inHand);
      isTaken = claimed !== null;
      // Null: someone else has it, or it was cancelled.
      if (claimed !== null) {
        claims.took(token, item.id);
        const outcome = await this.#perform(running, claimed);
        const own = { key, token, request_id: claimed.call.request_id };
        const recorded = recordEnd(this.#options, own, outcome, () => this.#givenUp);
        made();
        await recorded;
      } else claims.over(token);
    } catch (error) {
      claims.over(token, isTaken);
      log.error("invocation_left_open", { ...key, agent_id: agentId, error });
    }
    this.#options.pool.recorded(item.id);
    this.#running.delete(item.id);
  }

  #begin(agentId: string, { tenant, id }: QueueEntry): Running {
    return this.#hold(agentId, { tenant, id }, this.#options.claims.begin(), thisMoment());
  }

  /** @param believedAt before its claim was stored */
  #hold(agentId: string, key: InvocationKey, token: string, believedAt: Moment): Running {
    const running = { agentId, key, token, believedAt, stopped: false };
    this.#running.set(key.id, running);
    return running;
  }

  /**
   * A call that was stored claimed. If this process stops by now, it is left to the next one. If it has been refused to its
   * caller while it was taken with others, it is given back, so that its record can be removed.
   */
  async #keep({ key, token }: Running, inHand: PendingCall | null): Promise<PendingCall | null> {
    const { store, clock, refusals } = this.#options;
    if (!this.#draining && !refusals.unnoted.has(key.id)) return inHand;
    await store.write((tx) => release(tx, key, token, clock.now()));
    return null;
  }

  async #claim({ agentId, key, token }: Running, inHand: PendingCall | null): Promise<PendingCall | null> {
    const { store, clock, replica: owner } = this.#options;
    const others = this.#claiming.get(agentId) ?? new Set();
    this.#claiming.set(agentId, others.add(key.id));
    try {
      return await untilStored(
        () => claim(store, { key, owner, token, now: clock.now(), inHand }),
        () => this.#draining,
      );
    } finally {
      others.delete(key.id);
      if (others.size === 0) this.#claiming.delete(agentId);
    }
  }

  /**
   * Makes the call. Right before it is dialled, a claim that was not checked for a while is checked again: other
   * replicas may have taken a paused process for dead.
   */
  async #perform(running: Running, { call, body }: PendingCall): Promise<Outcome> {
    const { agentId, key } = running;
    const { credential_ref } = call;
    let credential: JobCredential = { header: null, version: "" };
    try {
      if (credential_ref !== null) {
        credential = await untilStored(
          () => this.#options.resolveCredential(key.tenant, credential_ref, call.url),
          () => this.#draining,
        );
      }
    } catch (error) {
      this.#options.log.warn("credential_not_resolved", { ...key, credential_ref, error });
      return failed(newTrace(), "credential_error", "credential not resolved", 0);
    }
    const ended = () => failed(newTrace(), "cancelled", "ended before it was made", 0);
    const send = (sent: CallBody, claim_seen_at: number | null) =>
      this.#send({
        id: key.id,
        tenant: key.tenant,
        agent_id: agentId,
        call,
        credential: credential.header,
        session_key:
          call.protocol === "mcp" ? JSON.stringify([agentId, call.url, credential_ref, credential.version]) : null,
        claim_seen_at,
        body: sent,
      });
    if (running.stopped || !(await this.#isStillClaimed(running))) return ended();
    const outcome = await send(body, running.believedAt.wall);
    if (!outcome.is_stale) return outcome;
    // Check the claim once more, and then trust it even if the clocks of the threads differ. The body is read again,
    // since the pool has taken over the first one.
    const again = await this.#claim(running, null);
    return again === null || running.stopped ? ended() : send(again.body, null);
  }

  #send(job: Job): Promise<Outcome> {
    const { pool, tracer = null } = this.#options;
    if (tracer === null) return pool.run(job);
    const { id: invocationId, tenant, agent_id: agentId, call } = job;
    const { url, headers } = call;
    const span = beginCallSpan(tracer, { tenant, agentId, invocationId, method: "POST", url, headers });
    return pool.run({ ...job, call: spanned(call, span) }).then((outcome) => {
      endCallSpan(span, outcome);
      return outcome;
    });
  }

  async #isStillClaimed(running: Running): Promise<boolean> {
    const { key, token, believedAt } = running;
    if (!isOlder(believedAt, CLAIM_BELIEVED_MS)) return true;
    const askedAt = thisMoment();
    const { read } = this.#options.store;
    const isHeld = await untilStored(
      () => holdsClaim(read, key, token),
      () => this.#draining,
    );
    running.believedAt = askedAt;
    return isHeld;
  }

  async #takeUpPending(): Promise<void> {
    const { store, replica, clock } = this.#options;
    const next = (after: string) =>
      store.lookUp(waitingAgents, { replica, now: clock.now(), after, limit: AGENTS_AT_ONCE });
    for (let agents = await next(""), last = agents.at(-1); last !== undefined; last = agents.at(-1)) {
      for (const { tenant, agent_id } of agents) this.#queues.look(tenant, agent_id);
      if (agents.length < AGENTS_AT_ONCE) return;
      agents = await next(last.agent_id);
    }
  }
}
