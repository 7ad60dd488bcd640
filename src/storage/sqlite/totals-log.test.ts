import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import fc from "fast-check";
import type { CountDimension } from "../../../db/schema.ts";
import { temporaryRoot } from "../../../test/support/gateway/process.ts";
import { silentLog } from "../../core/log.ts";
import { migrateSqlite } from "../migrate.ts";
import { addCount, type Count, type Counts, changedCounts, inOrder } from "../totals.ts";
import { createSqliteTotals, type SqliteTotals } from "./totals-log.ts";

function empty(): Database {
  const database = new Database(":memory:");
  migrateSqlite(database, { clock: { now: () => 0 }, log: silentLog });
  return database;
}

/** Writes a group of additions; it may be undone, or the process may be gone right after its commit. */
function group(database: Database, totals: SqliteTotals, added: readonly Count[], outcome: Outcome): SqliteTotals {
  const counts: Counts = new Map();
  for (const { tenant, period, dimension, value, delta } of added) {
    addCount(counts, tenant, period, dimension, value, delta);
  }
  database.run("begin immediate");
  const committed = totals.write(counts);
  database.run(outcome === "undone" ? "rollback" : "commit");
  if (outcome === "stored" || outcome === "settled") committed();
  return outcome === "crash" ? createSqliteTotals(database, SMALL) : totals;
}

function settle(database: Database, totals: SqliteTotals): void {
  const isMoved = totals.hurry();
  while (!isMoved()) group(database, totals, [], "stored");
}

type Outcome = "stored" | "undone" | "crash" | "settled";
/** So that most groups find something to move. */
const SMALL = { logBytes: 100, movedAtOnce: 3 };

const anyCount: fc.Arbitrary<Count> = fc.record({
  tenant: fc.constantFrom("a", "b", "ä\u{1F600}", "__proto__"),
  period: fc.constantFrom(0, 7),
  dimension: fc.constantFrom<CountDimension>("all", "model", "status"),
  value: fc.constantFrom("", "x", "1", "__proto__"),
  delta: fc.integer({ min: -3, max: 3 }),
});
const anyGroup = fc.record({
  added: fc.array(anyCount, { maxLength: 12 }),
  outcome: fc.constantFrom<Outcome>("stored", "stored", "stored", "undone", "crash", "settled"),
});

const inTable =
  "select coalesce(sum(count), 0) as n from invocation_counts where tenant = ? and dimension = ? and value = ?";

test("table and log together are exact after each group, however much has moved and whatever was undone or lost", () => {
  let moved = 0;
  fc.assert(
    fc.property(fc.array(anyGroup, { maxLength: 30 }), (groups) => {
      using database = empty();
      const total = database.prepare<{ n: number }, [string, string, string]>(inTable);
      let totals = createSqliteTotals(database, SMALL);
      const expected = new Map<string, number>();
      for (const { added, outcome } of groups) {
        totals = group(database, totals, added, outcome);
        if (outcome === "settled") settle(database, totals);
        for (const { delta, period, ...place } of outcome === "undone" ? [] : added) {
          const key = JSON.stringify(place);
          expected.set(key, (expected.get(key) ?? 0) + delta);
        }
        for (const [key, sum] of expected) {
          const { tenant, dimension, value } = JSON.parse(key) as Count;
          const table = total.get(tenant, dimension, value)?.n ?? 0;
          if (table !== 0) moved += 1;
          expect([key, table + totals.of(tenant, dimension, value)]).toEqual([key, sum]);
        }
      }
      settle(database, totals);
      expect(database.prepare("select * from count_additions").all()).toEqual([]);
    }),
    { numRuns: 60 },
  );
  expect(moved).toBeGreaterThan(100);
});

test("the log stays short, though each group adds more totals than are moved with it, as when each call names a model of its own", () => {
  using database = empty();
  const totals = createSqliteTotals(database, { logBytes: 100_000, totalsMax: 50, movedAtOnce: 3 });
  const rows = database.prepare<{ bytes: number }, []>("select sum(length(additions)) as bytes from count_additions");
  const stood: number[] = [];
  for (let turn = 0; turn < 400; turn++) {
    const added = Array.from({ length: 40 }, (_, i): Count => {
      return { tenant: "a", period: 7, dimension: "model", value: `model ${turn}.${i}`, delta: 1 };
    });
    group(database, totals, added, "stored");
    stood.push(rows.get()?.bytes ?? 0);
  }
  // It grows until what moves with each group is as much as each group adds.
  const most = (part: readonly number[]) => Math.max(...part);
  expect(most(stood.slice(200))).toBe(most(stood.slice(100, 200)));
  expect(most(stood)).toBeLessThan(100_000);
  settle(database, totals);
  expect(database.prepare("select count(*) as n from invocation_counts where count = 1").get()).toEqual({ n: 16_000 });
});

/** Puts down how many rows of the log it has given. */
class CountingDatabase extends Database {
  rows = 0;
  override prepare: Database["prepare"] = (text: string, ...rest: never[]) => {
    const statement = super.prepare<never, never[]>(text, ...rest);
    const all = statement.all.bind(statement);
    if (text.includes("from count_additions")) {
      statement.all = (...values) => {
        const found = all(...values);
        this.rows += found.length;
        return found;
      };
    }
    return statement as never;
  };
}

test("of the log only what others have written to it is read, however much they write elsewhere", () => {
  const dir = mkdtempSync(join(temporaryRoot(), "totals-"));
  const open = () => new CountingDatabase(join(dir, "test.db"), { create: true });
  {
    using one = open();
    one.run("pragma journal_mode = wal");
    migrateSqlite(one, { clock: { now: () => 0 }, log: silentLog });
    using other = open();
    const total = one.prepare<{ n: number }, [string, string, string]>(inTable);
    const add = (database: Database, totals: SqliteTotals, value: string) =>
      group(database, totals, [{ tenant: "a", period: 7, dimension: "model", value, delta: 1 }], "stored");
    const totals = createSqliteTotals(one);
    for (let i = 0; i < 50; i++) add(one, totals, "x");
    const sumOf = (value: string) => {
      totals.version();
      return (total.get("a", "model", value)?.n ?? 0) + totals.of("a", "model", value);
    };
    const read = (value: string) => {
      one.rows = 0;
      return [sumOf(value), one.rows];
    };
    for (let i = 0; i < 5; i++) {
      other.run(
        "insert into job_leases (job, next_at) values ('x', 1) on conflict (job) do update set next_at = next_at + 1",
      );
      expect(read("x")).toEqual([50, 0]);
    }
    const others = createSqliteTotals(other, SMALL);
    add(other, others, "y");
    // What it adds, and that it has moved something.
    expect(read("y")).toEqual([1, expect.any(Number)]);
    expect(one.rows).toBeLessThan(3);
    expect(sumOf("x")).toBe(50);
    settle(other, others);
    expect([sumOf("x"), sumOf("y"), totals.of("a", "model", "x")]).toEqual([50, 1, 0]);
    add(one, totals, "x");
    add(other, others, "x");
    expect(sumOf("x")).toBe(52);
  }
  rmSync(dir, { recursive: true });
});

test("what is moved is put in order as it goes, and not all at its start", () => {
  let listed = 0;
  class CountingMap<K, V> extends Map<K, V> {
    override keys() {
      listed += this.size;
      return super.keys();
    }
  }
  const counts: Counts = new CountingMap();
  const tenants: Counts extends Map<number, infer T> ? T : never = new CountingMap();
  counts.set(7, tenants);
  for (let i = 0; i < 1_000; i++) {
    const values = new CountingMap(Array.from({ length: 8 }, (_, value) => [`${7 - value}`, 1]));
    tenants.set(`tenant ${i}`, new CountingMap([["model", values]]));
  }
  const first = inOrder(counts).take(20).toArray();
  expect(listed).toBeLessThan(1_100);
  expect(first).toEqual(changedCounts(counts).slice(0, 20));
});

const anyStep = fc.record({
  added: fc.array(anyCount, { maxLength: 8 }),
  outcome: fc.constantFrom<Outcome>("stored", "stored", "stored", "stored", "undone", "crash", "settled"),
  writer: fc.constantFrom(0, 1),
});

test("two processes that write beside each other both see exact totals, whatever each has moved, undone or lost", () => {
  const dir = mkdtempSync(join(temporaryRoot(), "totals-"));
  let serial = 0;
  let unchanged = 0;
  fc.assert(
    fc.property(fc.array(anyStep, { maxLength: 40 }), (steps) => {
      const path = join(dir, `${++serial}.db`);
      const open = () => new Database(path, { create: true });
      using one = open();
      one.run("pragma journal_mode = wal");
      one.run("pragma synchronous = off");
      migrateSqlite(one, { clock: { now: () => 0 }, log: silentLog });
      using other = open();
      other.run("pragma synchronous = off");
      const sides = [
        { database: one, totals: createSqliteTotals(one, SMALL) },
        { database: other, totals: createSqliteTotals(other, { logBytes: 300, totalsMax: 6, movedAtOnce: 2 }) },
      ];
      const expected = new Map<string, number>();
      const placeOf = (key: string) => JSON.parse(key) as Count;
      const inTables = (database: Database, key: string) => {
        const { tenant, dimension, value } = placeOf(key);
        return database.query<{ n: number }, [string, string, string]>(inTable).get(tenant, dimension, value)?.n ?? 0;
      };
      const logged = (totals: SqliteTotals, key: string) => {
        const { tenant, dimension, value } = placeOf(key);
        return totals.of(tenant, dimension, value);
      };
      for (const { added, outcome, writer } of steps) {
        // A look at a total that begins before the group and ends after it: as totals.ts does it.
        const begun = sides.map(({ database, totals }) => {
          const version = totals.version();
          const tables = [...expected].map(([key, sum]) => ({ key, sum, table: inTables(database, key) }));
          return { totals, version, tables };
        });
        const side = sides[writer] as (typeof sides)[number];
        side.totals = group(side.database, side.totals, added, outcome);
        if (outcome === "settled") settle(side.database, side.totals);
        for (const { delta, period, ...place } of outcome === "undone" ? [] : added) {
          const key = JSON.stringify(place);
          expected.set(key, (expected.get(key) ?? 0) + delta);
        }
        for (const { totals, version, tables } of begun) {
          if (!sides.some((each) => each.totals === totals) || totals.version() !== version) continue;
          unchanged += 1;
          for (const { key, sum, table } of tables) {
            expect([sum, expected.get(key) ?? 0]).toContain(table + logged(totals, key));
          }
        }
        for (const { database, totals } of sides) {
          totals.version();
          for (const [key, sum] of expected) {
            expect([key, inTables(database, key) + logged(totals, key)]).toEqual([key, sum]);
          }
        }
      }
    }),
    { numRuns: 40 },
  );
  expect(unchanged).toBeGreaterThan(20);
  rmSync(dir, { recursive: true });
}, 120_000);
