// This replica's lease, by which others know that it is alive, and what it does about those whose lease has run out.
import { every } from "../../concurrency/every.ts";
import { thisMoment } from "../../core/age.ts";
import type { Clock } from "../../core/clock.ts";
import type { Log } from "../../core/log.ts";
import { createLeaseTrust } from "../../storage/lease-trust.ts";
import type { Store } from "../../storage/store.ts";
import type { AgentPlaces } from "../replicas/service.ts";
import { dropLeases, LEASE_MS, renewLease } from "../replicas/store.ts";
import { clearDead, endOrphans } from "./clear-dead.ts";

const RENEW_MS = 5_000;
const SWEEP_MS = 2_000;

export interface ReplicaLeaseOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** This replica's ID, new with each start. */
  readonly replica: string;
  /** The replica that is certainly gone, since this process holds what was its data directory; null when none is known. */
  readonly previous?: string | null;
  /** Where other replicas may be: what of that this one may run. */
  readonly agentPlaces: Pick<AgentPlaces, "limitOf" | "start" | "renewed" | "stop"> | null;
  readonly refusals: {
    /** Removes the records of refused calls that have appeared. */
    removeAppeared(): Promise<unknown>;
  };
}

export function createReplicaLease(options: ReplicaLeaseOptions) {
  const { store, clock, log, replica, previous = null, agentPlaces, refusals } = options;
  /** On SQLite this process is the only one; on Postgres there may be other replicas. */
  const isShared = store.dialect === "postgres";
  const trust = createLeaseTrust(LEASE_MS);
  let renewal: ReturnType<typeof setInterval> | undefined;
  let stopSweeping = () => {};

  async function renew(): Promise<void> {
    const askedAt = thisMoment();
    const { now, agent_base } = await store.writeFirst((tx) => renewLease(tx, replica));
    trust.renewed(now);
    agentPlaces?.renewed(askedAt, agent_base !== null);
  }

  /** The process before this one on its data directory is gone, so nobody waits for its lease to run out. */
  async function bury(gone: string): Promise<void> {
    const ended = await endOrphans(store, clock, replica, undefined, gone);
    await store.write((tx) => dropLeases(tx, gone));
    if (ended.length > 0) log.warn("orphaned_calls_ended", { calls: ended.length });
  }

  /** Ends the calls of replicas that are gone, and takes up those that are pending. */
  async function sweep(takeUpPending: () => Promise<void>): Promise<void> {
    try {
      await clearDead(() => refusals.removeAppeared(), store, clock, replica, trust.holds);
      await takeUpPending();
    } catch (error) {
      log.warn("sweep_failed", { error });
    }
  }

  return {
    /** Begins it, and ends the calls that a dead process of a database that is not shared left running. */
    async recover(): Promise<void> {
      if (isShared) {
        if (previous !== null) await bury(previous);
        await renew();
        await agentPlaces?.start();
        const warn = (error: unknown) => log.warn("lease_not_renewed", { error });
        // On a timer of its own, so that slow work elsewhere can't delay it: a lease that runs out ends live calls.
        renewal = setInterval(() => void renew().catch(warn), RENEW_MS);
        return;
      }
      // This process holds the lock of the data directory, so no other process runs.
      await store.write((tx) => dropLeases(tx, "all"));
      const orphans = await endOrphans(store, clock, replica);
      if (orphans.length > 0) log.warn("orphaned_calls_ended", { calls: orphans.length });
    },
    startSweeping(takeUpPending: () => Promise<void>): void {
      if (isShared) stopSweeping = every(SWEEP_MS, () => sweep(takeUpPending));
    },
    stopSweeping: () => stopSweeping(),
    /** Drops the lease: no call runs on it any more, on either path. */
    async leave(): Promise<void> {
      clearInterval(renewal);
      await agentPlaces?.stop();
      if (!isShared) return;
      // A lease that can't be dropped runs out.
      await store.write((tx) => dropLeases(tx, replica)).catch((error) => log.warn("lease_not_dropped", { error }));
    },
  };
}
