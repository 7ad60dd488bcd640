import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { silentLog } from "../core/log.ts";
import { migrateSqlite } from "./migrate.ts";
import type { RecentCall } from "./recent.ts";
import { createSqliteRecent } from "./sqlite-recent.ts";

const CALLS = 4_096;
/** Twice the steps that halving takes. */
const LOOKS_MAX = 2 * Math.log2(CALLS);

test("a call that was accepted long ago finds its place without passing all that ended since", () => {
  using database = new Database(":memory:");
  migrateSqlite(database, { clock: { now: () => 0 }, log: silentLog });
  const recent = createSqliteRecent({ writer: database, reader: database }, { callsLeast: 2 * CALLS });
  let looks = 0;
  const call = (n: number): RecentCall => ({
    n,
    tenant: "a",
    get id() {
      looks += 1;
      return `inv_${String(n).padStart(6, "0")}`;
    },
    agent_id: "agt_1",
    mode: "transactional",
    status: "succeeded",
    error_class: null,
    model: null,
  });
  recent.write(Array.from({ length: CALLS }, (_, i) => call(10 + 2 * i)))();
  for (const late of [1, CALLS + 1, 10 + 2 * CALLS]) {
    looks = 0;
    recent.write([call(late)])();
    // Its own ID is looked at each time too.
    expect(looks).toBeLessThan(2 * LOOKS_MAX);
  }
  const places = recent.of("a").map(({ n }) => n);
  expect(places).toEqual(places.toSorted((a, b) => a - b));
});
