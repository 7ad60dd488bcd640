// What replicas promise each other on Postgres: their transactions never wait for each other in a circle.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { accepted, counted, SUCCESS } from "../../../../test/support/stores/invocations.ts";
import { eachPostgres } from "../../../../test/support/stores/postgres-kinds.ts";
import { postgresPlace } from "../../../../test/support/stores/stores.ts";
import type { Store } from "../../../storage/store.ts";
import { accept, claim, finish } from "../service.ts";

const NOW = 1_790_000_000_000;

function suite(freshDatabase?: () => Promise<string>, isSnapshot = false): void {
  let stores: Store[] = [];
  beforeAll(async () => {
    const place = await postgresPlace(await freshDatabase?.());
    stores = [await place.open(), await place.open()];
  });
  afterAll(() => Promise.all(stores.map((store) => store.close())));

  test("two replicas that accept calls of two tenants in other orders are both done at once", async () => {
    const both = Promise.withResolvers<void>();
    let begun = 0;
    let runs = 0;
    const works = stores.map((store, at) =>
      store.write(async (tx) => {
        runs += 1;
        const tenants = at === 0 ? ["acme", "rival"] : ["rival", "acme"];
        for (const tenant of tenants) {
          await accept(tx, accepted(NOW, { tenant }));
          if (++begun === 2) both.resolve();
          await both.promise;
        }
      }),
    );
    await Promise.all(works);
    expect(runs).toBe(2);
    for (const store of stores) {
      expect(await Promise.all(["acme", "rival"].map((tenant) => counted(store.read, tenant, "all", "")))).toEqual([
        2, 2,
      ]);
    }
  });

  test("two replicas that end their calls, and look in vain for those of the other, are both done at once", async () => {
    const calls = stores.map(() => accepted(NOW));
    const keys = calls.map(({ row: { tenant, id } }) => ({ tenant, id }));
    for (const [at, call] of calls.entries())
      await accept(stores[0] as Store, call, { owner: `rep_${at}`, token: `t${at}` });
    const both = Promise.withResolvers<void>();
    let looked = 0;
    let runs = 0;
    const works = stores.map((store, at) =>
      store.write(async (tx) => {
        runs += 1;
        const [own, other] = at === 0 ? keys : keys.toReversed();
        if (own === undefined || other === undefined) throw new Error("no calls");
        const claimed = await claim(tx, { key: other, owner: `rep_${at}`, token: "late", now: NOW });
        if (++looked === 2) both.resolve();
        await both.promise;
        return [claimed, await finish(tx, { key: own, token: `t${at}`, request_id: "r" }, SUCCESS, NOW)];
      }),
    );
    expect(await Promise.all(works)).toEqual([
      [null, true],
      [null, true],
    ]);
    // Where a transaction sees one state of the database, one of the two is undone at once if it has read what the other changes,
    // or if both add to one of a total's rows, which is one time in 32.
    expect(runs).toBeWithin(2, isSnapshot ? 4 : 3);
  });
}

describe("on Postgres 18", () => suite());
eachPostgres((kind) => suite(() => kind.freshDatabase(), /repeatable|serializable/.test(kind.name)));
