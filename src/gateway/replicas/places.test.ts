import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import fc from "fast-check";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { eachPostgres } from "../../../test/support/stores/postgres-kinds.ts";
import { type Place, postgresPlace } from "../../../test/support/stores/stores.ts";
import type { Store } from "../../storage/store.ts";
import { abandon, accept } from "../invocations/service.ts";
import { baseOf, exchange, fairPart, type Need } from "./places.ts";
import { dropLeases, removeGone } from "./store.ts";

const needs: fc.Arbitrary<Need[]> = fc.uniqueArray(fc.record({ granted: fc.nat(70), wanted: fc.nat(70) }), {
  selector: ({ granted }) => granted,
  minLength: 1,
  maxLength: 6,
});
const partsOf = (pool: number, all: readonly Need[]) =>
  all.map((own) =>
    fairPart(
      pool,
      own,
      all.filter((one) => one !== own),
    ),
  );
const total = (numbers: readonly number[]) => numbers.reduce((sum, one) => sum + one, 0);

test("the parts of all are what there is, or what is wanted, and nobody has more while another wants as much", () => {
  fc.assert(
    fc.property(fc.nat(70), needs, (pool, all) => {
      const parts = partsOf(pool, all);
      expect(total(parts)).toBe(Math.min(pool, total(all.map(({ wanted }) => wanted))));
      const most = Math.max(...parts);
      for (const [at, { wanted }] of all.entries()) {
        const part = parts[at] ?? 0;
        expect(part).toBeLessThanOrEqual(wanted);
        if (part < wanted) expect(most - part).toBeLessThanOrEqual(1);
      }
    }),
  );
});

test("whoever has less gets what can't be divided", () => {
  const need = (granted: number) => ({ granted, wanted: 5 });
  expect(partsOf(1, [need(1), need(0), need(2)])).toEqual([0, 1, 0]);
  expect(partsOf(5, [need(3), need(2)])).toEqual([2, 3]);
});

const AGENT = { tenant: "acme", agent_id: "agt_1", mode: "transactional" } as const;

function suite(numRuns: number, freshDatabase?: () => Promise<string>): void {
  let place: Place;
  let store: Store;
  beforeAll(async () => {
    place = await postgresPlace(await freshDatabase?.());
    store = await place.open();
  }, 30_000);
  afterAll(() => store.close());

  const ask = (replica: string, limit: number, kept: number, wanted: number) =>
    store.write((tx) => exchange(tx, { replica, limit, asksOf: () => [{ ...AGENT, kept, wanted }] }));
  const replicaIds = async () => {
    const { replicas: t } = store.read.tables;
    const rows = await store.read.db.select().from(t).orderBy(t.id);
    return rows.map(({ id, agent_base }) => [id, agent_base]);
  };
  const leave = (replica: string) => store.write((tx) => dropLeases(tx, replica));

  test("together replicas never have more of an agent than its limit, and one alone has all of it", async () => {
    const step = fc.record({
      replica: fc.nat(3),
      wanted: fc.nat(80),
      share: fc.double({ min: 0, max: 1, noNaN: true }),
    });
    await fc.assert(
      fc.asyncProperty(fc.constantFrom(1, 7, 64), fc.array(step, { maxLength: 25 }), async (limit, steps) => {
        const has = [0, 0, 0, 0];
        const bases = [0, 0, 0, 0];
        for (const { replica, wanted, share } of steps) {
          const kept = Math.floor((has[replica] ?? 0) * share);
          const { base, grants } = await ask(`rep_${replica}`, limit, kept, Math.max(kept, wanted));
          bases[replica] = base;
          has[replica] = grants[0]?.granted ?? 0;
          expect(total(has) + total(bases)).toBeLessThanOrEqual(limit);
        }
        for (const at of [1, 2, 3]) await leave(`rep_${at}`);
        const { base } = await ask("rep_0", limit, 0, 0);
        const { grants } = await ask("rep_0", limit, 0, limit - base);
        expect(base + (grants[0]?.granted ?? 0)).toBe(limit);
        await leave("rep_0");
      }),
      { numRuns },
    );
  }, 60_000);

  test("where limits differ, as while one is changed, the highest holds for all, and the lowest for its own", async () => {
    const limits = [64, 64, 4, 1] as const;
    const step = fc.record({ at: fc.nat(3), wanted: fc.nat(80), share: fc.double({ min: 0, max: 1, noNaN: true }) });
    await fc.assert(
      fc.asyncProperty(fc.array(step, { maxLength: 25 }), async (steps) => {
        const has = [0, 0, 0, 0];
        for (const [at, limit] of limits.entries()) await ask(`rep_${at}`, limit, 0, 0);
        for (const { at, wanted, share } of steps) {
          const limit = limits[at] ?? 0;
          const kept = Math.floor((has[at] ?? 0) * share);
          const { base, grants } = await ask(`rep_${at}`, limit, kept, Math.max(kept, Math.min(wanted, limit)));
          has[at] = grants[0]?.granted ?? 0;
          expect(base + (has[at] ?? 0)).toBeLessThanOrEqual(limit);
          expect(total(has) + 2 * baseOf(64)).toBeLessThanOrEqual(64);
        }
        for (const [at, limit] of limits.entries()) await ask(`rep_${at}`, limit, 0, 0);
        for (const at of [2, 3]) {
          const { grants } = await ask(`rep_${at}`, limits[at] ?? 0, 0, 1);
          expect(grants).toEqual([{ granted: 1, part: 1 }]);
          await ask(`rep_${at}`, limits[at] ?? 0, 0, 0);
        }
        await Promise.all([0, 1, 2, 3].map((at) => leave(`rep_${at}`)));
      }),
      { numRuns },
    );
  }, 60_000);

  test("a replica that comes while others have much begins without a base, and gets one when they have less", async () => {
    const limit = 64;
    const alone = await ask("rep_0", limit, 0, 0);
    expect(alone.base).toBe(baseOf(limit));
    await ask("rep_0", limit, 0, limit - alone.base);
    expect(await ask("rep_1", limit, 0, 1)).toMatchObject({ isNew: true, base: 0, grants: [{ granted: 0, part: 1 }] });
    // It is told that another one needs some, and its base besides, and keeps what it uses.
    expect((await ask("rep_0", limit, 60, 60)).grants).toEqual([{ granted: 60, part: 55 }]);
    await ask("rep_0", limit, 56, 56);
    expect(await ask("rep_1", limit, 0, 1)).toMatchObject({ isNew: false, base: baseOf(limit) });
    await Promise.all(["rep_0", "rep_1"].map(leave));
  });

  test("a replica that comes gets its base, though another one has more calls of one agent than it may run", async () => {
    const limit = 64;
    await ask("rep_0", limit, 0, 0);
    expect((await ask("rep_0", limit, 0, 60)).grants).toEqual([{ granted: 60, part: 60 }]);
    expect((await ask("rep_1", limit, 0, 0)).base).toBe(0);
    // All of it is in use, and of what ends so much is given back.
    const [grant] = (await ask("rep_0", limit, 60, 60)).grants;
    expect((await ask("rep_0", limit, grant?.part ?? 0, 60)).grants).toEqual([{ granted: 56, part: 56 }]);
    expect((await ask("rep_1", limit, 0, 0)).base).toBe(baseOf(limit));
    await Promise.all(["rep_0", "rep_1"].map(leave));
  });

  test("what is gone loses its places when its calls have ended, and its row later; what lives keeps all", async () => {
    for (const id of ["rep_0", "rep_1", "rep_2", "rep_3"]) await ask(id, 64, 0, 10);
    const call = accepted(Date.now());
    await accept(store, call, { owner: "rep_2", token: "t" });
    const remove = () => removeGone(store, "rep_0", () => true);
    const age = (id: string, by: string) =>
      place.execute(`update replicas set lease_until = lease_until - ${by} where id = '${id}'`);
    await remove();
    await Promise.all(["rep_1", "rep_2"].map((id) => age(id, "20000")));
    // Nobody is judged while not all have had time to renew.
    await removeGone(store, "rep_0", () => false);
    const base = baseOf(64);
    expect(await replicaIds()).toEqual(["rep_0", "rep_1", "rep_2", "rep_3"].map((id) => [id, base]));
    await remove();
    const kept = [
      ["rep_0", base],
      ["rep_1", null],
      ["rep_2", base],
      ["rep_3", base],
    ];
    expect(await replicaIds()).toEqual(kept);
    const { agentPlaces: t } = store.read.tables;
    const holders = await store.read.db.select({ replica: t.replica }).from(t).orderBy(t.replica);
    expect(holders.map(({ replica }) => replica)).toEqual(["rep_0", "rep_2", "rep_3"]);
    await Promise.all(["rep_1", "rep_2"].map((id) => age(id, "3600000")));
    await remove();
    expect((await replicaIds()).map(([id]) => id)).toEqual(["rep_0", "rep_2", "rep_3"]);
    await abandon(store, { tenant: call.row.tenant, id: call.row.id }, "internal", Date.now());
    await remove();
    expect((await replicaIds()).map(([id]) => id)).toEqual(["rep_0", "rep_3"]);
    // What an operator removes leaves nothing behind once another one comes.
    await place.execute("delete from replicas where id = 'rep_3'");
    expect(await ask("rep_4", 64, 0, 60)).toMatchObject({ base, grants: [{ granted: 46, part: 46 }] });
    await leave("rep_4");
    await ask("rep_3", 64, 0, 10);
    // One that was taken for gone and goes on has nothing, and begins anew.
    await age("rep_3", "20000");
    await remove();
    expect(await ask("rep_3", 64, 5, 5)).toMatchObject({ isNew: true, grants: [{ granted: 5 }] });
    await Promise.all(["rep_0", "rep_3"].map(leave));
  });
}

describe("on Postgres 18", () => suite(15));
eachPostgres((kind) => suite(3, () => kind.freshDatabase()));
