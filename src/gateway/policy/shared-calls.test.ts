// The calls of a caller as the database counts them, against a plain list of them.
import { describe, expect, test } from "bun:test";
import { SQL } from "bun";
import fc from "fast-check";
import { useStore } from "../../../test/support/stores/one-store.ts";
import { eachPostgres } from "../../../test/support/stores/postgres-kinds.ts";
import { type Place, postgresPlace } from "../../../test/support/stores/stores.ts";
import type { Store } from "../../storage/store.ts";
import { countCalls, removeCountedCalls } from "./observed-rate.ts";

const START = 1_790_000_000_000_000;
const SECOND = 1_000_000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
let serial = 0;

/** A caller who calls at times of the test's choosing, in microseconds. */
function callerOf(execute: Store["execute"]) {
  const caller = { tenant: "acme", agentId: `agt_${++serial}`, user: "alice" };
  return {
    ...caller,
    at: (now: number, count = 1) => execute(countCalls(`${now}::bigint`), { ...caller, count }),
  };
}

describe("the calls of a caller in the database", () => {
  let execute: Store["execute"];
  useStore("postgres", ({ store }) => {
    execute = store.execute;
  });

  const steps = fc.array(
    fc.record({
      gap: fc.oneof(
        fc.nat(50_000),
        fc.nat(2 * MINUTE),
        fc.constantFrom(1, 20 * SECOND, 30 * SECOND - 1, 30 * SECOND, 30 * SECOND + 1, MINUTE - 1, MINUTE, MINUTE + 1),
      ),
      count: fc.integer({ min: 1, max: 5 }),
    }),
    { minLength: 1, maxLength: 60 },
  );

  test("of the last 60 seconds are counted as a plain list of them is", async () => {
    await fc.assert(
      fc.asyncProperty(steps, async (calls) => {
        const { at } = callerOf(execute);
        const all: { now: number; count: number }[] = [];
        let now = START;
        for (const { gap, count } of calls) {
          now += gap + 1;
          all.push({ now, count });
          const expected = all.reduce((sum, one) => sum + (one.now > now - MINUTE ? one.count : 0), 0);
          expect(await at(now, count)).toBe(expected);
        }
      }),
      { numRuns: 80 },
    );
  });

  test("are counted at their own time, however many come at one moment", async () => {
    const { at } = callerOf(execute);
    for (let call = 1; call <= 5; call++) expect(await at(START)).toBe(call);
    expect(await at(START + MINUTE - 1)).toBe(6);
    expect(await at(START + MINUTE + 5)).toBe(2);
  });

  test("begin anew when the clock is set back, and are counted from there", async () => {
    const { at } = callerOf(execute);
    expect([await at(START, 4), await at(START + SECOND, 4)]).toEqual([4, 8]);
    // The difference between two servers is no step.
    expect(await at(START + SECOND / 2)).toBe(9);
    expect([await at(START - HOUR), await at(START - HOUR + SECOND)]).toEqual([1, 2]);
    expect(await at(START - HOUR + MINUTE)).toBe(2);
    // What was counted in the future before is not counted again when that has come.
    expect([await at(START + SECOND + 9), await at(START + 2 * SECOND)]).toEqual([1, 2]);
  });

  test("are forgotten when the clock is set ahead, and no more than that", async () => {
    const { at } = callerOf(execute);
    expect([await at(START, 4), await at(START + HOUR, 4), await at(START + HOUR + 1, 4)]).toEqual([4, 4, 8]);
  });

  test("are each caller's own, whatever the names are", async () => {
    const count = countCalls();
    const names = [
      "alice",
      "Alice",
      "",
      "o'hara",
      "\\",
      "\\'; drop table caller_calls; --",
      "$1",
      "{",
      '"',
      "null",
      "É",
      // As the first of a text, what a decoder may take for a byte order mark.
      "\u{feff}alice",
      "\u2028",
      "\u00a0",
    ];
    const called = names.flatMap((tenant) => names.map((user) => ({ tenant, agentId: `agt_of_${tenant}`, user })));
    for (const times of [1, 2]) {
      const rates = await Promise.all(called.map((caller) => execute(count, { ...caller, count: 1 })));
      expect(rates).toEqual(called.map(() => times));
    }
  });
});

eachPostgres((kind) => {
  let place: Place;
  let store: Store;
  useStore(
    async () => postgresPlace(await kind.freshDatabase()),
    (opened) => {
      ({ place, store } = opened);
    },
  );

  test("each of the calls at two replicas is told another rate, beside those who clean up", async () => {
    const other = await place.open();
    try {
      const count = countCalls();
      const [users, each] = [10, 60];
      const replicas = [store, other].map(({ execute }) => execute);
      const cleaning = Promise.all(replicas.map(removeCountedCalls));
      const rates = await Promise.all(
        Array.from({ length: users }, (_, user) =>
          Promise.all(
            replicas.flatMap((execute) =>
              Array.from({ length: each }, () =>
                execute(count, { tenant: "acme", agentId: "agt_1", user: `user ${user}`, count: 1 }),
              ),
            ),
          ),
        ),
      );
      await cleaning;
      const expected = Array.from({ length: 2 * each }, (_, i) => i + 1);
      for (const told of rates) expect(told.sort((a, b) => a - b)).toEqual(expected);
    } finally {
      await other.close();
    }
  });
});

test("clean-up removes what no rate counts any more, and what a wrong clock has left, in groups", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  await using client = new SQL(place.url, { max: 1 });
  const execute = store.execute;
  const now = Date.now() * 1000;
  const [old, young, wrong] = [callerOf(execute), callerOf(execute), callerOf(execute)];
  await old.at(now - HOUR);
  await young.at(now - HOUR);
  for (const age of [30 * SECOND, 10 * SECOND]) await young.at(now - age);
  await wrong.at(now + HOUR);
  await client`insert into caller_calls select 'acme', 'agt_many', 'bob', n, n from generate_series(1, 2500) as n`;
  expect(await removeCountedCalls(execute)).toBe(2_503);
  const callers = await client`select agent_id, counted from caller_rates`;
  expect([...callers]).toEqual([{ agent_id: young.agentId, counted: "3" }]);
  const [calls] = await client`select count(*)::int as count from caller_calls`;
  expect(calls).toEqual({ count: 2 });
  expect(await young.at(now)).toBe(3);
  await store.close();
});

test("clean-up reads what it removes, and not all that there is each time", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  await using client = new SQL(place.url, { max: 1 });
  const rows = 30_000;
  await client`insert into caller_calls select 'acme', 'agt_many', 'bob', n, n from generate_series(1, ${rows}) as n`;
  await client`analyze caller_calls`;
  expect(await removeCountedCalls(store.execute)).toBe(rows);
  await store.close();
  // The server tells of a connection's work when that ends, or a moment later.
  let read = 0;
  while (read < rows) {
    await Bun.sleep(50);
    const [index] = await client`
      select idx_tup_read::int as read from pg_stat_user_indexes where indexrelname = 'caller_calls_in_order'`;
    read = index.read;
  }
  expect(read).toBeLessThan(4 * rows);
});
