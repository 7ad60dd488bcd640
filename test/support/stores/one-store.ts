// A database of its own for the tests of one block.
import { afterAll, beforeAll, describe } from "bun:test";
import type { Store } from "../../../src/storage/store.ts";
import { eachPostgres } from "./postgres-kinds.ts";
import { type Place, places, postgresPlace } from "./stores.ts";

export interface OpenPlace {
  readonly place: Place;
  readonly store: Store;
}

export type MakePlace = () => Promise<Place>;

/** Opens it before the first test, hands it to `set`, and removes it after the last. */
export function useStore(where: keyof typeof places | MakePlace, set: (opened: OpenPlace) => void): void {
  const makePlace: MakePlace = typeof where === "string" ? places[where] : where;
  let opened: OpenPlace | undefined;
  beforeAll(async () => {
    const place = await makePlace();
    opened = { place, store: await place.open() };
    set(opened);
  }, 30_000);
  afterAll(async () => {
    await opened?.store.close();
    opened?.place.remove();
  });
}

/** The same suite on SQLite, and on each kind of Postgres. */
export function eachStore(suite: (makePlace: MakePlace, dialect: "sqlite" | "postgres") => void): void {
  for (const dialect of ["sqlite", "postgres"] as const)
    describe(`on ${dialect}`, () => suite(places[dialect], dialect));
  eachPostgres((kind) => suite(async () => postgresPlace(await kind.freshDatabase()), "postgres"));
}
