import { describe, expect, test } from "bun:test";
import { eachPostgres } from "../../../test/support/stores/postgres-kinds.ts";
import { type Place, places, postgresPlace } from "../../../test/support/stores/stores.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { changeHolder, freeWallets, holdsUntilCommit } from "./leases.ts";

const WALLET: Hex = "0x01";

function suite(openPlace: () => Promise<Place>): void {
  async function opened<T>(work: (store: Store) => Promise<T>): Promise<T> {
    const place = await openPlace();
    const store = await place.open();
    try {
      return await work(store);
    } finally {
      await store.close();
      place.remove();
    }
  }

  test("of those that take a wallet at once, one gets it, and a token that has passed holds nothing", () =>
    opened(async (store) => {
      const take = (id: string, token: number) => store.write((tx) => changeHolder(tx, WALLET, id, token));
      const holds = (id: string, token: number) => store.write((tx) => holdsUntilCommit(tx, WALLET, id, token));
      const ids = ["a", "b", "c", "d"];
      const first = await Promise.all(ids.map((id) => take(id, 0)));
      expect(first.filter((token) => token !== null)).toEqual([1]);
      const holder = ids[first.indexOf(1)]!;
      expect(await Promise.all(ids.map((id) => holds(id, 1)))).toEqual(ids.map((id) => id === holder));
      expect(await take("e", 1)).toBe(2);
      expect([await holds(holder, 1), await holds("e", 2), await take(holder, 1)]).toEqual([false, true, null]);
      await store.write((tx) => freeWallets(tx, "e"));
      expect(await holds("e", 2)).toBe(false);
    }));
}

describe("leases on sqlite", () => suite(places.sqlite));
describe("leases on postgres 18", () => suite(places.postgres));
eachPostgres((kind) => suite(async () => postgresPlace(await kind.freshDatabase())));
