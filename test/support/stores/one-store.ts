// A database of its own for the tests of one block.
import { afterAll, beforeAll } from "bun:test";
import type { Store } from "../../../src/storage/store.ts";
import { type Place, places } from "./stores.ts";

export interface OpenPlace {
  readonly place: Place;
  readonly store: Store;
}

/** Opens it before the first test, hands it to `set`, and removes it after the last. */
export function useStore(dialect: keyof typeof places, set: (opened: OpenPlace) => void): void {
  let opened: OpenPlace | undefined;
  beforeAll(async () => {
    const place = await places[dialect]();
    opened = { place, store: await place.open() };
    set(opened);
  }, 30_000);
  afterAll(async () => {
    await opened?.store.close();
    opened?.place.remove();
  });
}
