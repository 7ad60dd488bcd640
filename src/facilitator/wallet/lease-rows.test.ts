import { describe, expect, test } from "bun:test";
import { eachPostgres } from "../../../test/support/stores/postgres-kinds.ts";
import { type Place, places, postgresPlace } from "../../../test/support/stores/stores.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { changeHolder, dropLease, holdsUntilCommit, LEASE_MS, livingOf, removeGone, renewLease } from "./leases.ts";

const WALLET: Hex = "0x01";
const facilitator = (id: string, isAble = true) => ({ id, isAble, wallets: [WALLET, "0x02"] as Hex[] });

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
      await store.write((tx) => dropLease(tx, "e"));
      expect(await holds("e", 2)).toBe(false);
    }));

  test("a facilitator lives for the time of its lease by the database's clock, and its row goes later", () =>
    opened(async (store) => {
      for (const id of ["a", "b"]) await store.write((tx) => renewLease(tx, facilitator(id)));
      const seen = await store.write((tx) => renewLease(tx, facilitator("b", false)));
      const ids = (now: number, mayJudge = true) => livingOf({ ...seen, now }, mayJudge).map(({ id }) => id);
      expect(livingOf(seen, true)).toEqual([facilitator("a"), facilitator("b", false)]);
      expect([ids(seen.now + LEASE_MS), ids(seen.now - LEASE_MS), ids(seen.now + LEASE_MS, false)]).toEqual([
        [],
        [],
        ["a", "b"],
      ]);
      const left = async (before: number | "all") => {
        await store.write((tx) => removeGone(tx, "b", before));
        return (await store.write((tx) => renewLease(tx, facilitator("b")))).facilitators.map(({ id }) => id);
      };
      expect([await left(seen.now + LEASE_MS), await left(seen.now + 100_000)]).toEqual([["a", "b"], ["b"]]);
    }));
}

describe("leases on sqlite", () => suite(places.sqlite));
describe("leases on postgres 18", () => suite(places.postgres));
eachPostgres((kind) => suite(async () => postgresPlace(await kind.freshDatabase())));
