import { expect, setSystemTime, test } from "bun:test";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { eachStore } from "../../../test/support/stores/one-store.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import { findKey } from "../invocations/idempotency.ts";
import { createRefusals } from "../invocations/refusals.ts";
import { accept } from "../invocations/service.ts";
import { createReplicaLease, endOrphans, renewLease } from "./replica-lease.ts";

const clock = { now: () => Date.now() };

eachStore((makePlace) => {
  test.each([
    ["pending", null],
    ["claimed in the same write", { owner: "rep_dead", token: "t" }],
  ] as const)("a call that was refused and appeared %s leaves nothing when its replica dies", async (_, claim) => {
    const place = await makePlace();
    const store = await place.open();
    const refusals = () => createRefusals({ store, clock, log: silentLog });
    const { row, ...one } = accepted(clock.now(), { accepted_by: "rep_dead" });
    const idempotency = { key: "k", body_sha256: "b", asked_at: clock.now(), latest: clock.now() };
    const call = { ...one.call, headers: [["idempotency-key", "k"]] as const };
    expect(await refusals().wasStored({ tenant: row.tenant, id: row.id, claim: claim?.token ?? null })).toBe(false);
    await accept(store, { ...one, row, call, idempotency }, claim);
    await store.write((tx) => renewLease(tx, "rep_2"));
    await refusals().removeAppeared();
    await endOrphans(store, clock, "rep_2");
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
  const refusals = { removeAppeared: async () => {} };
  const raised: string[] = [];
  const begin = async (agentConcurrency: number, replica: string, previous: string | null = null) => {
    const agentMaxRaised = () => void raised.push(replica);
    const parts = { store, clock, log: silentLog, refusals, agentMaxRaised };
    const lease = createReplicaLease({ ...parts, replica, agentConcurrency, previous });
    await lease.recover();
    return lease;
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
  await place.execute("insert into replicas (id, lease_until) select 'rep_killed', lease_until from replicas");
  await counted([first], [32]);
  await place.execute("update replicas set lease_until = lease_until - 20000 where id = 'rep_killed'");
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
  await store.write((tx) => renewLease(tx, "rep_1"));
  const next = await begin(64, "rep_4", "rep_1");
  expect(next.agentMax()).toBe(64);
  await next.leave();
  await store.close();
}, 60_000);

eachStore((makePlace) => {
  test("the row of a replica that is gone stays for an hour after its lease, and no longer", async () => {
    const place = await makePlace();
    const store = await place.open();
    for (const id of ["rep_1", "rep_2", "rep_3"]) await store.write((tx) => renewLease(tx, id));
    const age = (id: string, ms: number) =>
      place.execute(`update replicas set lease_until = lease_until - ${ms} where id = '${id}'`);
    await age("rep_2", 3_500_000);
    await age("rep_3", 3_700_000);
    // Nobody is judged while not all have had time to renew.
    await endOrphans(store, clock, "rep_1", () => false);
    const { replicas: t } = store.read.tables;
    const ids = async () => (await store.read.db.select().from(t).orderBy(t.id)).map(({ id }) => id);
    expect(await ids()).toEqual(["rep_1", "rep_2", "rep_3"]);
    await endOrphans(store, clock, "rep_1");
    expect(await ids()).toEqual(["rep_1", "rep_2"]);
    await store.close();
    place.remove();
  });
});
