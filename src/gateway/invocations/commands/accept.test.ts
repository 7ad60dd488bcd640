// What the batches of open calls promise on SQLite: the order of IDs, and few pages for the calls of many tenants.
import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { statSync } from "node:fs";
import { join } from "node:path";
import fc from "fast-check";
import { accepted } from "../../../../test/support/stores/invocations.ts";
import { sqlitePlace } from "../../../../test/support/stores/stores.ts";
import { newId } from "../../../core/id.ts";
import type { SqliteStatement, SqlValue } from "../../../storage/store.ts";
import { accept } from "../service.ts";
import { batchesOn } from "./accept.ts";

const NOW = 1_790_000_000_000;
const PAGE_BYTES = 4_096;

test("walked by batch and then by ID, calls have the order of their IDs, however late they are and wherever the clock goes", () => {
  const calls = fc.record({
    /** How the clock moves before them. */
    step: fc.oneof(fc.integer({ min: 0, max: 3 }), fc.integer({ min: -3_000, max: 3_000 })),
    count: fc.oneof(fc.integer({ min: 1, max: 5 }), fc.constant(1_500)),
    /** How much older than now each of them may be. */
    late: fc.integer({ min: 0, max: 50 }),
    /** What happens after them. */
    after: fc.constantFrom("more", "restart", "undo", "end some"),
  });
  fc.assert(
    fc.property(fc.array(calls, { maxLength: 12 }), (history) => {
      using database = new Database(":memory:");
      database.run("create table open_invocations (id text primary key, batch integer not null)");
      database.run("create index batches on open_invocations (batch, id)");
      const connect = () => (text: string) => {
        const statement = database.prepare<Record<string, unknown>, SqlValue[]>(text);
        return { run: () => 0, get: (...values: SqlValue[]) => statement.get(...values) } satisfies SqliteStatement;
      };
      const insert = database.prepare("insert into open_invocations (id, batch) values (?, ?)");
      let batchOf = batchesOn(connect());
      let now = NOW;
      for (const { step, count, late, after } of history) {
        now += step;
        database.run("begin");
        for (let i = 0; i < count; i++) {
          const id = newId("inv", now + Math.floor(i / 20) - (i % (late + 1)));
          insert.run(id, batchOf(id));
        }
        database.run(after === "undo" ? "rollback" : "commit");
        if (after === "restart") batchOf = batchesOn(connect());
        if (after === "end some") database.run("delete from open_invocations where rowid % 3 <> 0");
      }
      const ids = (order: string) =>
        database.query(`select id from open_invocations order by ${order}`).values().flat();
      expect(ids("batch, id")).toEqual(ids("id"));
    }),
    { numRuns: 40 },
  );
});

test("the calls of many tenants with a backlog are written on few pages together", async () => {
  const place = sqlitePlace();
  const store = await place.open();
  const tenants = Array.from({ length: 200 }, (_, i) => `tenant-${i}`);
  const acceptOfAll = (now: number) => Promise.all(tenants.map((tenant) => accept(store, accepted(now, { tenant }))));
  const size = () => statSync(join(place.dir, "tollgate.db-wal")).size;
  for (let i = 0; i < 30; i++) await acceptOfAll(NOW + i);
  const before = size();
  await acceptOfAll(NOW + 30);
  // By the tenant alone each of them had a page of its own.
  expect((size() - before) / PAGE_BYTES).toBeLessThan(tenants.length);
  await store.close();
  place.remove();
});
