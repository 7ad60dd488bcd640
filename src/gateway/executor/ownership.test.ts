import { expect, setSystemTime, test } from "bun:test";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { eachStore } from "../../../test/support/stores/one-store.ts";
import { clock, makePool, useScheduling, well } from "../../../test/support/stores/scheduling.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { Fault } from "../../core/fault.ts";
import { silentLog } from "../../core/log.ts";
import { createMembership, renewProcess } from "../../storage/leases.ts";
import type { Store } from "../../storage/store.ts";
import { PART_BYTES } from "../../wire/body.ts";
import { findKey } from "../invocations/idempotency.ts";
import { createLostCommits } from "../invocations/lost-commits.ts";
import { accept, endOpen } from "../invocations/service.ts";
import { compareOnce, createClaims, createReplicaLease, endOrphans } from "../upstream/ownership.ts";

const wallClock = { now: () => Date.now() };

eachStore((makePlace) => {
  test.each([
    ["pending", null],
    ["claimed in the same write", { owner: "rep_dead", token: "t" }],
  ] as const)("a call that was refused and appeared %s leaves nothing when its replica dies", async (_, claim) => {
    const place = await makePlace();
    const store = await place.open();
    const refusals = () => createLostCommits({ store, clock: wallClock, log: silentLog });
    const { row, ...one } = accepted(wallClock.now(), { accepted_by: "rep_dead" });
    const idempotency = { key: "k", body_sha256: "b", asked_at: wallClock.now(), latest: wallClock.now() };
    const call = { ...one.call, headers: [["idempotency-key", "k"]] as const };
    expect(await refusals().wasStored({ tenant: row.tenant, id: row.id, claim: claim?.token ?? null })).toBe(false);
    await accept(store, { ...one, row, call, idempotency }, claim);
    await store.write((tx) => renewProcess(tx, { id: "rep_2", kind: "gateway" }));
    await refusals().removeAppeared();
    await endOrphans(store, wallClock, "rep_2");
    expect(await store.read.db.select().from(store.read.tables.invocations)).toEqual([]);
    expect(await findKey(store, row, idempotency)).toBeNull();
    await store.close();
    place.remove();
  });
});

/** A replica that comes or goes is counted at the next renewal. */
const COUNTED_MS_MAX = 10_000;

test("replicas divide the limit of an agent by how many of them live, and each may run one call at least", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  const refusals = { removeAppeared: async () => 0 };
  const raised: string[] = [];
  const begin = async (agentConcurrency: number, replica: string, previous: string | null = null) => {
    const agentMaxRaised = () => void raised.push(replica);
    const membership = createMembership({ store, log: silentLog, id: replica, kind: "gateway" });
    const parts = { store, clock: wallClock, log: silentLog, refusals, agentMaxRaised };
    const lease = createReplicaLease({ ...parts, membership, agentConcurrency, previous });
    await store.write((tx) => membership.enter(tx));
    await lease.recover();
    return { ...lease, leave: membership.leave };
  };
  const counted = async (leases: (typeof first)[], maxima: number[]) => {
    const end = performance.now() + COUNTED_MS_MAX;
    const now = () => leases.map(({ agentMax }) => agentMax());
    while (performance.now() < end && !Bun.deepEquals(now(), maxima)) await Bun.sleep(20);
    expect(now()).toEqual(maxima);
  };
  const first = await begin(64, "rep_1");
  expect(first.agentMax()).toBe(64);
  const [second, few] = [await begin(64, "rep_2"), await begin(2, "rep_3")];
  expect(second.agentMax()).toBe(32);
  await counted([first, second, few], [21, 21, 1]);
  // One stops, and one was killed: it renews its lease no more.
  await few.leave();
  await second.leave();
  await place.execute(
    "insert into processes (id, kind, lease_until) select 'rep_killed', kind, lease_until from processes",
  );
  await counted([first], [32]);
  await place.execute("update processes set lease_until = lease_until - 20000 where id = 'rep_killed'");
  await counted([first], [64]);
  raised.splice(0);
  // It stands still for so long that others may have taken it for gone: nothing begins before it has renewed its lease.
  setSystemTime(Date.now() + 16_000);
  expect(first.agentMax()).toBe(0);
  await counted([first], [64]);
  expect(raised).toEqual(["rep_1"]);
  setSystemTime();
  // A process on the data directory of one that was killed does not count that one.
  await first.leave();
  await store.write((tx) => renewProcess(tx, { id: "rep_1", kind: "gateway" }));
  const next = await begin(64, "rep_4", "rep_1");
  expect(next.agentMax()).toBe(64);
  await next.leave();
  await store.close();
});

const scheduling = useScheduling();

/** A store on which something is done after the first command of this name, or the first `write`: a claim by its ID. */
function afterFirst(name: string, done: () => Promise<void>): Store {
  const real = scheduling.store();
  let isDone = false;
  async function after<T>(what: string, output: Promise<T>): Promise<T> {
    const value = await output;
    if (what !== name || isDone) return value;
    isDone = true;
    await done();
    return value;
  }
  return {
    ...real,
    execute: (command, input) => after(command.name, real.execute(command, input)),
    write: (work, options) => after("write", real.write(work, options)),
  };
}

const losingAnswer = (name: string) =>
  afterFirst(name, () => Promise.reject(new Fault("unavailable", "the answer was lost")));

test.each([
  ["claim", "write"],
  ["record", "end"],
])("a %s that was stored without an answer neither loses nor repeats the call", async (_, name) => {
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool, store: losingAnswer(name) });
  // Only a call with a large body is claimed by its ID.
  const one = accepted(clock.now(), {}, "x".repeat(PART_BYTES));
  await accept(scheduling.store(), one);
  scheduler.offer(one.row.tenant, one.row.agent_id, one.row.id);
  await untilEnded(one.row.id);
  await scheduler.drain(5_000);
  expect(jobs).toHaveLength(1);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["succeeded", null]);
});

test("a large body is read before its call is taken, so that a process which dies over it leaves a pending call", async () => {
  const { jobs, pool } = makePool(well);
  const real = scheduling.store();
  const isGone = Promise.withResolvers<void>();
  const store = afterFirst("write", async () => {
    await real.write(async ({ db, tables }) => void (await db.delete(tables.bodyParts)));
    isGone.resolve();
  });
  const { scheduler, untilEnded } = scheduling.open({ pool, store });
  const one = accepted(clock.now(), {}, "x".repeat(3 * PART_BYTES));
  await accept(real, one);
  await scheduler.offerPending();
  await untilEnded(one.row.id);
  await isGone.promise;
  expect(jobs.map(({ body }) => body.byteLength)).toEqual([3 * PART_BYTES]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["succeeded", null]);
});

test("calls that were taken without an answer are given back, and then made once", async () => {
  const { jobs, pool } = makePool(well);
  const claims = createClaims();
  const { scheduler, untilEnded } = scheduling.open({ pool, claims, store: losingAnswer("take") });
  const calls = [await scheduling.acceptOne(), await scheduling.acceptOne()];
  await scheduler.offerPending();
  await scheduling.store().write(async () => {});
  expect(await scheduling.statusOf(calls[0]?.row.id ?? "")).toEqual(["running", null]);
  const released = (tenant: string, agentId: string) => scheduler.offer(tenant, agentId);
  await compareOnce({
    store: scheduling.store(),
    clock,
    log: silentLog,
    replica: "rep_1",
    claims,
    stop: () => {},
    released,
  });
  for (const { row } of calls) await untilEnded(row.id);
  expect(jobs).toHaveLength(2);
});

test("a call that is cancelled before the answer of the write that took its block is not made", async () => {
  const { stored, answered, store } = scheduling.slowAnswers("take");
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool, store });
  const [one, other] = [await scheduling.acceptOne(), await scheduling.acceptOne()];
  await scheduler.offerPending();
  await stored.promise;
  expect(await endOpen(scheduling.store(), one.row, "cancelled", clock.now())).toBe(true);
  scheduler.stop(one.row.id);
  answered.resolve();
  await untilEnded(other.row.id);
  await scheduler.drain(5_000);
  expect(jobs.map(({ id }) => id)).toEqual([other.row.id]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "cancelled"]);
});

test("a call of a block that was ended while its process was paused is not made", async () => {
  const { stored, answered, store } = scheduling.slowAnswers("take");
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool, store });
  const [one, other] = [await scheduling.acceptOne(), await scheduling.acceptOne()];
  await scheduler.offerPending();
  await stored.promise;
  const later = await scheduling.takenForDead(one);
  answered.resolve();
  await untilEnded(other.row.id);
  later.mockRestore();
  expect(jobs.map(({ id }) => id)).toEqual([other.row.id]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "internal"]);
});

test("a call that is refused to its caller before the answer of the write that took its block is given back", async () => {
  const { stored, answered, store } = scheduling.slowAnswers("take");
  const { jobs, pool } = makePool(well);
  const unnoted = new Set<string>();
  const { scheduler, untilEnded } = scheduling.open({
    pool,
    store,
    refusals: { unnoted },
  });
  const [one, other] = [await scheduling.acceptOne(), await scheduling.acceptOne()];
  await scheduler.offerPending();
  await stored.promise;
  unnoted.add(one.row.id);
  answered.resolve();
  await untilEnded(other.row.id);
  await scheduler.drain(5_000);
  expect(jobs.map(({ id }) => id)).toEqual([other.row.id]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["pending", null]);
});

test("a call that is cancelled before the answer of the write that claimed it is not made", async () => {
  const { jobs, pool } = makePool(well);
  const { scheduler, untilEnded } = scheduling.open({ pool });
  const one = accepted(clock.now());
  const place = scheduler.reserve(one);
  await accept(scheduling.store(), one, place?.claim);
  expect(await endOpen(scheduling.store(), one.row, "cancelled", clock.now())).toBe(true);
  scheduler.stop(one.row.id);
  place?.run(one);
  await untilEnded(one.row.id);
  await scheduler.drain(5_000);
  expect(jobs).toEqual([]);
  expect(await scheduling.statusOf(one.row.id)).toEqual(["failed", "cancelled"]);
});
