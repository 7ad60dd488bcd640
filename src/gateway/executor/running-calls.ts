// What this process knows of the calls that it runs: those that hold a slot, each from its claim to the record of its
// end, and those that are just being claimed. It is in memory only, and asks nobody.
import type { Moment } from "../../core/age.ts";
import type { InvocationKey } from "../invocations/service.ts";

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

export type RunningCalls = ReturnType<typeof createRunningCalls>;

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
