// What the totals of commands promise on Postgres: transactions that add to the same ones never wait for each other.
import { afterAll, beforeAll, describe, expect, spyOn, test } from "bun:test";
import { accepted } from "../../../../test/support/stores/invocations.ts";
import { eachPostgres } from "../../../../test/support/stores/postgres-kinds.ts";
import { postgresPlace } from "../../../../test/support/stores/stores.ts";
import { counted } from "../../../storage/counts.ts";
import type { Store } from "../../../storage/store.ts";
import { accept } from "../service.ts";

const NOW = 1_790_000_000_000;

function suite(freshDatabase?: () => Promise<string>): void {
  let stores: Store[] = [];
  beforeAll(async () => {
    const place = await postgresPlace(await freshDatabase?.());
    stores = [await place.open(), await place.open()];
  }, 30_000);
  afterAll(() => Promise.all(stores.map((store) => store.close())));

  test("two replicas that add to totals of two tenants in other orders are both done at once", async () => {
    // Wherever they are left to chance, both come to the same place.
    using _ = spyOn(Math, "random").mockReturnValue(0);
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
}

describe("on Postgres 18", () => suite());
eachPostgres((kind) => suite(() => kind.freshDatabase()));
