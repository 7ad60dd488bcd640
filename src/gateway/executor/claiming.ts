// How this process comes to hold pending calls: a call alone by its ID, or an agent's oldest ones together in a block.
// Before a claim is written it is known here, since the answer of the write may come late or never.
import { CLAIM_BELIEVED_MS, isOlder, type Moment, thisMoment } from "../../core/age.ts";
import { untilStored } from "../../storage/retry-until-stored.ts";
import {
  type Claims,
  claim,
  holdsClaim,
  type InvocationKey,
  ownPending,
  type PendingCall,
  release,
  takePending,
} from "../invocations/service.ts";
import type { QueueEntry } from "./agent-queue.ts";
import type { CallBlock, OwnBlock } from "./call-queues.ts";
import type { ReplicaLeaseOptions } from "./replica-lease.ts";

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
  /** Of the claim. */
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

    /** Null: someone else has it, or it was cancelled. */
    claim(call: RunningCall, inHand: PendingCall | null, bodyBytes = 0): Promise<PendingCall | null> {
      const { key, token } = call;
      const stored = () => claim(store, { key, owner, token, now: clock.now(), inHand, bodyBytes });
      return running.whileClaiming(call, () => untilStored(stored, isDraining));
    },

    /**
     * A call that was stored claimed. If this process stops by now, it is left to the next one. If it has been refused to
     * its caller while it was taken with others, it is given back, so that its record can be removed.
     */
    async keep({ key, token }: RunningCall, inHand: PendingCall | null): Promise<PendingCall | null> {
      if (!isDraining() && !refusals.unnoted.has(key.id)) return inHand;
      await store.write((tx) => release(tx, key, token, clock.now()));
      return null;
    },

    /** Asks the database only when that has not been known for a while. */
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
      const look = { tenant, agent_id, replica: owner, now: clock.now(), after, limit };
      const { calls, isAll } = await store.lookUp(ownPending, look);
      return { own: calls.map((call) => ({ tenant, ...call })), isAll };
    },
  };
}
