// What tests of the scheduler need: one over a real store, new for each test, with a pool of workers that makes no calls.
import { afterEach, beforeEach, spyOn } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { silentLog } from "../../../src/core/log.ts";
import type { Job, Outcome } from "../../../src/gateway/executor/job.ts";
import { Scheduler, type SchedulerOptions } from "../../../src/gateway/executor/scheduler.ts";
import { findInvocation } from "../../../src/gateway/invocations/history.ts";
import { accept, endOpen } from "../../../src/gateway/invocations/service.ts";
import { createClaims, createReplicaLease } from "../../../src/gateway/upstream/ownership.ts";
import { createMembership, type Membership } from "../../../src/storage/leases.ts";
import { openStore } from "../../../src/storage/open.ts";
import type { Store } from "../../../src/storage/store.ts";
import { temporaryPlace } from "../temporary.ts";
import { accepted, SUCCESS } from "./invocations.ts";

export const clock = { now: () => 1_790_000_000_000 };

/** A pool that makes no calls but says how they went. */
export function makePool(outcome: (job: Job) => Promise<Outcome>) {
  const jobs: Job[] = [];
  const run = (job: Job) => {
    jobs.push(job);
    return outcome(job);
  };
  return { jobs, pool: { run, cancel() {}, recorded() {}, running: 0, close: async () => {} } };
}

export const well = async (): Promise<Outcome> => ({ ...SUCCESS, detail: null });

/** A credential that is asked for, and comes when it is told to. */
export function slowCredential() {
  const resolving = Promise.withResolvers<void>();
  const resolved = Promise.withResolvers<void>();
  async function resolveCredential() {
    resolving.resolve();
    await resolved.promise;
    return { header: null, version: "1" };
  }
  return { resolving, resolved, resolveCredential };
}

/** Opens a store before each test, and removes it afterwards. */
export function useScheduling() {
  let dir: string;
  let store: Store;
  const memberships: Membership[] = [];
  beforeEach(async () => {
    dir = mkdtempSync(join(temporaryPlace(), "tollgate-scheduling-"));
    store = await openStore({ databaseUrl: null, dataDir: dir, log: silentLog, clock });
  });
  afterEach(async () => {
    for (const membership of memberships.splice(0)) await membership.stop();
    await store.close();
    rmSync(dir, { recursive: true, force: true });
  });

  return {
    store: () => store,
    open(options: Partial<SchedulerOptions>) {
      const ended = new Map<string, PromiseWithResolvers<void>>();
      const endOf = (id: string) => {
        const known = ended.get(id) ?? Promise.withResolvers<void>();
        ended.set(id, known);
        return known;
      };
      store.onCallEnded(({ invocation_id }) => endOf(invocation_id).resolve());
      const scheduler = new Scheduler({
        store,
        clock,
        log: silentLog,
        pool: makePool(well).pool,
        replica: "rep_1",
        agentMax: () => 4,
        claims: createClaims(),
        refusals: { unnoted: new Set() },
        resolveCredential: async () => ({ header: null, version: "1" }),
        ...options,
      });
      return { scheduler, untilEnded: (id: string) => endOf(id).promise };
    },
    /** The lease of a process that comes next. */
    async lease(through = store) {
      const membership = createMembership({ store: through, log: silentLog, id: "rep_2", kind: "gateway" });
      memberships.push(membership);
      await store.write((tx) => membership.enter(tx));
      const refusals = { removeAppeared: async () => 0 };
      const options = { store: through, clock, log: silentLog, membership, agentConcurrency: 4, agentMaxRaised() {} };
      return createReplicaLease({ ...options, refusals });
    },
    async acceptOne(credential_ref: string | null = null) {
      const one = accepted(clock.now());
      const call = { ...one.call, credential_ref };
      await store.write((tx) => accept(tx, { ...one, call }));
      return { ...one, call };
    },
    async statusOf(id: string) {
      const { status, error_class } = await findInvocation(store.read, "acme", id);
      return [status, error_class];
    },
    /** A store that runs commands of this name, and gives their answers when it is told to. */
    slowAnswers(name: string) {
      const [stored, answered] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
      const slow: Store = {
        ...store,
        async execute(command, input) {
          const output = await store.execute(command, input);
          if (command.name !== name) return output;
          stored.resolve();
          await answered.promise;
          return output;
        },
      };
      return { stored, answered, store: slow };
    },
    /** Another replica takes this one for dead, and nobody tells it. Its own time has gone on meanwhile. */
    async takenForDead({ row }: ReturnType<typeof accepted>) {
      await store.write((tx) => endOpen(tx, row, "internal", clock.now()));
      const wall = Date.now();
      return spyOn(Date, "now").mockImplementation(() => wall + 20_000);
    },
  };
}
