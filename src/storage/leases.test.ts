import { afterEach, beforeEach, describe, expect, spyOn, test } from "bun:test";
import { not, sql } from "drizzle-orm";
import fc from "fast-check";
import { eachStore, useStore } from "../../test/support/stores/one-store.ts";
import { type Place, places } from "../../test/support/stores/stores.ts";
import { silentLog } from "../core/log.ts";
import { DAY_MS } from "../core/time.ts";
import {
  createLeaseTrust,
  createMembership,
  leaseHolds,
  livingAmong,
  type Membership,
  PROCESS_LEASES,
  type Renewal,
  renewProcess,
  whereLeaseHolds,
} from "./leases.ts";
import type { Store } from "./store.ts";

const [NOW, MS] = [1_790_000_000_000, 15_000];

eachStore((makePlace) => {
  let store: Store;
  useStore(makePlace, (opened) => {
    ({ store } = opened);
  });

  test("a lease holds until its end, and not when it ends later than it can, here as in a statement", async () => {
    const left = [-MS, -1, 0, 1, MS, MS + 1, 100 * MS];
    const holding = left.filter((ms) => leaseHolds(NOW + ms, NOW, MS));
    expect(holding).toEqual([1, MS]);
    const { jobLeases: t } = store.read.tables;
    await store.write(async ({ db }) => {
      await db.insert(t).values(left.map((ms) => ({ job: `${ms}`, next_at: NOW + ms })));
    });
    const holds = whereLeaseHolds(t.next_at, NOW, MS);
    for (const [where, expected] of [
      [holds, holding] as const,
      [not(holds), left.filter((ms) => !holding.includes(ms))] as const,
    ]) {
      const rows = await store.read.db.select({ job: t.job }).from(t).where(where);
      expect(rows.map(({ job }) => Number(job)).sort((a, b) => a - b)).toEqual(expected);
    }
  });
});

eachStore((makePlace) => {
  let store: Store;
  useStore(makePlace, (opened) => {
    ({ store } = opened);
  });
  const rows = async () => {
    const { processes: t } = store.read.tables;
    return store.read.db.select().from(t).orderBy(t.id);
  };

  test("a process has one row with what others are to know of it, from when it enters until it leaves", async () => {
    const gateway = createMembership({ store, log: silentLog, id: "rep_1", kind: "gateway" });
    const facts = { master_key_ids: "a b", seen_version: 1 };
    await store.write((tx) => gateway.enter(tx, facts));
    expect(await rows()).toMatchObject([{ id: "rep_1", kind: "gateway", ...facts }]);
    gateway.start();
    gateway.tell({ ...facts, seen_version: 2 });
    await gateway.stop();
    expect(await rows()).toMatchObject([{ ...facts, seen_version: 2, wallets: null, is_able: null }]);
    await gateway.leave();
    gateway.tell(facts);
    expect(await rows()).toEqual([]);
  });

  test("a process that is alone with its database has the only row, and is not judged by its lease", async () => {
    await store.write((tx) => renewProcess(tx, { id: "rep_killed", kind: "gateway" }));
    const alone = { isShared: false, write: store.write };
    const gateway = createMembership({ store: alone, log: silentLog, id: "rep_1", kind: "gateway" });
    await store.write((tx) => gateway.enter(tx));
    expect((await rows()).map(({ id }) => id)).toEqual(["rep_1"]);
    expect([gateway.isFresh(), gateway.mayJudge(0)]).toEqual([true, true]);
    await gateway.leave();
  });
});

test.each(["gateway", "facilitator"] as const)(
  "a %s lives for the time of its lease, and all do while not all could renew",
  (kind) => {
    const { leaseMs } = PROCESS_LEASES[kind];
    const facts = { master_key_ids: null, seen_version: null, wallets: null, is_able: null };
    const processes = ["a", "b"].map((id, index) => ({ id, kind, lease_until: NOW + leaseMs - index, ...facts }));
    const ids = (now: number, mayJudge = true) => livingAmong({ now, processes }, mayJudge).map(({ id }) => id);
    expect([ids(NOW), ids(NOW + leaseMs - 1), ids(NOW + leaseMs)]).toEqual([["a", "b"], ["a"], []]);
    expect([ids(NOW - 1), ids(NOW - leaseMs), ids(NOW + leaseMs, false)]).toEqual([["b"], [], ["a", "b"]]);
  },
);

const GATEWAY_LEASE_MS = 15_000;
const RENEW_MS = 5_000;

/** A replica that renews every five seconds; the test moves the database's clock and its own. */
function replica() {
  let [database, own] = [1_790_000_000_000, 0];
  const trust = createLeaseTrust(GATEWAY_LEASE_MS, () => own);
  const pass = (ms: number, databaseMs = ms) => {
    own += ms;
    database += databaseMs;
  };
  const renew = () => trust.renewed(database);
  const renewFor = (ms: number) => {
    for (let passed = 0; passed < ms; passed += RENEW_MS) {
      pass(RENEW_MS);
      renew();
    }
  };
  return { pass, renew, renewFor, holds: () => trust.holds(database) };
}

test("a replica believes the others' leases when it has renewed its own for the time of one", () => {
  const at = replica();
  expect(at.holds()).toBe(false);
  at.renew();
  expect(at.holds()).toBe(false);
  at.renewFor(10_000);
  expect(at.holds()).toBe(false);
  at.renewFor(5_000);
  expect(at.holds()).toBe(true);
});

test.each<[string, number, number]>([
  ["an outage of the database", 16_000, 16_000],
  ["an outage of the database that is shorter than a lease, but in which another's may have run out", 11_000, 11_000],
  ["a database whose clock is set ahead", 1_000, 3_600_000],
  ["a database whose clock is set back", 1_000, -3_600_000],
  ["a pause of the machine, for which its own clock stood still", 1_000, 60_000],
])("a replica ends no other's call for the time of a lease after %s", (_, ownMs, databaseMs) => {
  const at = replica();
  at.renew();
  at.renewFor(60_000);
  expect(at.holds()).toBe(true);
  at.pass(ownMs, databaseMs);
  expect(at.holds()).toBe(false);
  at.renew();
  at.renewFor(10_000);
  expect(at.holds()).toBe(false);
  at.renewFor(5_000);
  expect(at.holds()).toBe(true);
});

/** Steps of the simulated time. */
const TICK_MS = 1_000;

/**
 * Processes of one kind on one database, and a thing that one of them has. The test moves the database's clock and theirs.
 * Each renews its lease in time, unless it can't reach the database or was killed, and takes the thing when the one that has
 * it lives no more, as far as it may judge.
 */
function simulation(kind: "gateway" | "facilitator", store: Store) {
  const { leaseMs, renewMs } = PROCESS_LEASES[kind];
  let [database, own] = [1_790_000_000_000, 1_000_000];
  const clocks = [
    spyOn(performance, "now").mockImplementation(() => own),
    spyOn(Date, "now").mockImplementation(() => 1_700_000_000_000 + own),
  ];
  let owner = "";
  let started = 0;
  const members: Member[] = [];
  const robbed: string[] = [];

  interface Member {
    readonly membership: Membership;
    renewedAt: number;
    isCut: boolean;
    isKilled: boolean;
    /** As far as it knows. */
    has: boolean;
  }

  async function begin(): Promise<void> {
    const id = `p${++started}`;
    const through: Pick<Store, "isShared" | "write"> = {
      isShared: true,
      write: (work, options) =>
        member.isCut
          ? Promise.reject(new Error("cut"))
          : store.write((tx) => work({ ...tx, now: sql`${database}` }), options),
    };
    const membership = createMembership({ store: through, log: silentLog, id, kind });
    // At other times than the others.
    const renewedAt = own - ((started * TICK_MS) % renewMs);
    const member: Member = { membership, renewedAt, isCut: false, isKilled: false, has: false };
    members.push(member);
    await through.write((tx) => membership.enter(tx));
  }

  function judge(member: Member, renewal: Renewal): void {
    const { membership } = member;
    member.has = owner === membership.id;
    const living = livingAmong(renewal, membership.mayJudge(renewal.now)).map(({ id }) => id);
    if (living.includes(owner)) return;
    const before = members.find((each) => each.membership.id === owner);
    if (before !== undefined && !before.isKilled && before.membership.isFresh()) robbed.push(owner);
    owner = membership.id;
    member.has = true;
  }

  async function renew(member: Member): Promise<void> {
    member.renewedAt = own;
    member.membership.start((renewal) => judge(member, renewal));
    member.membership.tell({ seen_version: own });
    await member.membership.stop();
  }

  async function pass(ms: number): Promise<void> {
    for (const end = own + ms; own < end; ) {
      own += TICK_MS;
      database += TICK_MS;
      for (const each of members) if (!each.isKilled && own - each.renewedAt >= renewMs) await renew(each);
      const holding = members.filter((each) => each.has && !each.isKilled && each.membership.isFresh());
      expect(holding.length).toBeLessThanOrEqual(1);
      // The one that had it has let go by itself, and so none that renews in time ever loses it.
      expect(robbed).toEqual([]);
    }
  }

  const one = (index: number) => members[index % members.length];

  return {
    begin,
    pass,
    kill(index: number) {
      const member = one(index);
      if (member !== undefined) member.isKilled = true;
    },
    cut(index: number, isCut: boolean) {
      const member = one(index);
      if (member !== undefined) member.isCut = isCut;
    },
    /** Two steps are further apart than a lease is long: of two that undo each other in less, others may notice nothing. */
    async step(ms: number) {
      database += ms;
      await pass(leaseMs);
    },
    /** Everybody can renew again, and all that are dead have been so for long. */
    async settle() {
      for (const member of members) member.isCut = false;
      await begin();
      own += DAY_MS;
      database += DAY_MS;
      await pass(3 * leaseMs);
      const { processes: t } = store.read.tables;
      const rows = await store.read.db.select().from(t).orderBy(t.id);
      const alive = members.filter(({ isKilled }) => !isKilled);
      expect(rows.map(({ id }) => id).sort()).toEqual(alive.map(({ membership }) => membership.id).sort());
      // Somebody has it that is alive.
      expect(alive.filter(({ has, membership }) => has && membership.isFresh())).toHaveLength(1);
      for (const { membership } of alive) await membership.leave();
      await store.write(async ({ db }) => void (await db.delete(t)));
    },
    end() {
      for (const clock of clocks) clock.mockRestore();
    },
  };
}

const PASS = fc.record({ kind: fc.constant("pass"), ms: fc.integer({ min: 1_000, max: 20_000 }) });
const action = fc.oneof(
  { weight: 3, arbitrary: PASS },
  { weight: 3, arbitrary: fc.record({ kind: fc.constant("cut"), ms: fc.nat(3) }) },
  {
    weight: 3,
    arbitrary: fc.record({ kind: fc.constant("step"), ms: fc.constantFrom(-3_600_000, -20_000, 20_000, 3_600_000) }),
  },
  { weight: 2, arbitrary: fc.record({ kind: fc.constantFrom("kill", "join"), ms: fc.nat(3) }) },
  { weight: 1, arbitrary: fc.record({ kind: fc.constant("begin"), ms: fc.constant(0) }) },
);

describe.each(["gateway", "facilitator"] as const)("of the processes of kind %s", (kind) => {
  let place: Place;
  let store: Store;
  beforeEach(async () => {
    place = await places.sqlite();
    store = await place.open();
  });
  afterEach(async () => {
    await store.close();
    place.remove();
  });

  test("one at most works for a thing, whatever the database's clock does and whoever can't renew, and rows of the dead go", async () => {
    await fc.assert(
      fc.asyncProperty(fc.array(action, { minLength: 1, maxLength: 12 }), async (actions) => {
        const simulated = simulation(kind, store);
        try {
          for (let n = 0; n < 2; n++) await simulated.begin();
          await simulated.pass(20_000);
          for (const { kind: what, ms } of actions) {
            if (what === "pass") await simulated.pass(ms);
            else if (what === "step") await simulated.step(ms);
            else if (what === "kill") simulated.kill(ms);
            else if (what === "begin") await simulated.begin();
            else simulated.cut(ms, what === "cut");
          }
          await simulated.settle();
        } finally {
          simulated.end();
          await store.write(async ({ db, tables }) => void (await db.delete(tables.processes)));
        }
      }),
      { numRuns: 60 },
    );
  }, 60_000);
});
