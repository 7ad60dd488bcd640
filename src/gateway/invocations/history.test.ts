import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { eq } from "drizzle-orm";
import fc from "fast-check";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { FILTERS, longHistory } from "../../../test/support/stores/long-history.ts";
import { type Place, places } from "../../../test/support/stores/stores.ts";
import { idTime } from "../../core/id.ts";
import { ERROR_CLASSES, INVOCATION_STATUSES, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import type { Store } from "../../storage/store.ts";
import { countEnded } from "./commands/end.ts";
import { readHistory } from "./history.ts";
import type { InvocationRow } from "./service.ts";

/** More than two steps of a walk. */
const CALLS = 11_000;

const COLUMNS = {
  agent_id: "agent_id",
  status: "status",
  mode: "mode",
  error_class: "error_class",
  model: "model",
  settlement: "settlement_status",
} as const;
type Parameter = keyof typeof COLUMNS;
const PARAMETERS = Object.keys(COLUMNS) as Parameter[];

const someOf = <T>(...values: readonly T[]) => fc.constantFrom(...values);
const orNull = <T>(values: readonly T[]) => someOf(null, ...values);

/** Rows that no gateway would write, in all combinations, and many of them in the same millisecond. */
const anyRow = fc
  .record({
    time: fc.integer({ min: 0, max: 9 }),
    agent_id: someOf("agt_1", ...FILTERS.agent_id),
    status: someOf(...INVOCATION_STATUSES),
    mode: someOf(...MODES),
    error_class: orNull(ERROR_CLASSES),
    model: orNull(["m-0", "M-0", "m-0 ", "", "ü"]),
    settlement_status: orNull(SETTLEMENT_STATUSES),
  })
  .map(({ time, status, ...fields }) => {
    const ended = status === "succeeded" || status === "failed";
    return accepted(2_000_000_000_000 + time, {
      ...fields,
      status,
      owner: status === "running" ? "rep_1" : null,
      completed_at: ended ? 1 : null,
    }).row;
  });

const VALUES: Record<Parameter, readonly string[]> = {
  agent_id: ["agt_1", "agt_2", ...FILTERS.agent_id],
  status: INVOCATION_STATUSES,
  mode: MODES,
  error_class: ["nothing", ...ERROR_CLASSES],
  model: ["m", "m-7", "m-0", "M-0", "m-0 ", "", "ü"],
  settlement: SETTLEMENT_STATUSES,
};
/** Up to three, for hardly a call matches more. */
const anyFilters = fc
  .subarray(PARAMETERS, { maxLength: 3 })
  .chain((names) => fc.tuple(...names.map((name) => fc.tuple(fc.constant(name), someOf(...VALUES[name])))))
  .map((filters) => new Map(filters));

/** A bound at the time of one of the rows, at the milliseconds around it, or far from all of them. */
const anyBound = fc.option(
  fc.oneof(
    { weight: 4, arbitrary: fc.record({ row: fc.nat(), ms: someOf(-1, 0, 1) }) },
    { weight: 1, arbitrary: fc.record({ time: someOf(0, 4_000_000_000_000) }) },
  ),
);

const anyPlace = fc.record(
  {
    limit: someOf(1, 20, 100),
    offset: fc.oneof(
      fc.integer({ min: 0, max: 30 }),
      fc.integer({ min: 0, max: CALLS }),
      someOf(4_990, 5_000, 10_000, CALLS + 1_000),
    ),
  },
  { requiredKeys: [] },
);

const anyQuery = fc.record({
  isBusy: fc.boolean(),
  filters: anyFilters,
  since: anyBound,
  until: anyBound,
  place: anyPlace,
});

type AnyQuery = typeof anyQuery extends fc.Arbitrary<infer Q> ? Q : never;

function boundTime(bound: AnyQuery["since"], rows: readonly InvocationRow[]): number | null {
  if (bound === null) return null;
  if ("time" in bound) return bound.time;
  const row = rows[bound.row % rows.length];
  return row === undefined ? null : idTime(row.id) + bound.ms;
}

describe.each(["sqlite", "postgres"] as const)("the history on %s", (dialect) => {
  let place: Place;
  let store: Store;
  /** Those of tenant acme, newest first. */
  let rows: InvocationRow[];
  /** Those of a tenant with as many open calls as two steps pass. */
  let busyRows: InvocationRow[];
  beforeAll(async () => {
    place = await places[dialect]();
    store = await place.open();
    for (const statement of [
      ...longHistory("acme", CALLS),
      ...longHistory("other", 300),
      ...longHistory("busy", 2 * CALLS, 5),
    ]) {
      await place.execute(statement);
    }
    const odd = fc.sample(anyRow, { numRuns: 500, seed: 4 });
    await store.write(async (tx) => {
      for (const row of odd) {
        if (row.completed_at === null) {
          await tx.db.insert(tx.tables.openInvocations).values({ ...row, status: row.status as "pending", call: "{}" });
          continue;
        }
        await tx.db.insert(tx.tables.endedInvocations).values(row);
        countEnded(tx, row, 1);
      }
    });
    const { db, tables } = store.read;
    const allOf = async (tenant: string) => {
      const all = await db.select().from(tables.invocations).where(eq(tables.invocations.tenant, tenant));
      return all.sort((a, b) => (a.id < b.id ? 1 : -1));
    };
    rows = await allOf("acme");
    busyRows = await allOf("busy");
  });
  afterAll(async () => {
    await store.close();
    place.remove();
  });

  test("has the calls that match any filters, dates and places, newest first, and how many there are", async () => {
    await fc.assert(
      fc.asyncProperty(anyQuery, async ({ isBusy, filters, since, until, place: { limit, offset } }) => {
        const of = isBusy ? busyRows : rows;
        const [from, to] = [boundTime(since, of), boundTime(until, of)];
        const query = new URLSearchParams({
          ...Object.fromEntries(filters),
          ...(from !== null && { since: new Date(from).toISOString() }),
          ...(to !== null && { until: new Date(to).toISOString() }),
          ...(limit !== undefined && { limit: String(limit) }),
          ...(offset !== undefined && { offset: String(offset) }),
        });
        const matches = of.filter(
          (row) =>
            [...filters].every(([name, value]) => row[COLUMNS[name]] === value) &&
            (from === null || idTime(row.id) >= from) &&
            (to === null || idTime(row.id) <= to),
        );
        const start = offset ?? 0;
        const page = await readHistory(store.read, isBusy ? "busy" : "acme", query);
        expect(page.total).toBe(matches.length);
        expect(page.rows).toEqual(matches.slice(start, start + (limit ?? 20)));
        expect([page.limit, page.offset]).toEqual([limit ?? 20, start]);
      }),
      { numRuns: 250 },
    );
  });

  const both = { mode: "transactional", status: "succeeded" };

  test("has a page whole of which two steps have a part", async () => {
    const matches = rows.filter((row) => row.mode === both.mode && row.status === both.status);
    for (let offset = 4_000; offset < 5_100; offset += 100) {
      const query = new URLSearchParams({ ...both, limit: "100", offset: String(offset) });
      const page = await readHistory(store.read, "acme", query);
      expect(page.rows.map((row) => row.id)).toEqual(matches.slice(offset, offset + 100).map((row) => row.id));
    }
  });

  test("has each call once on a page at the end of what a step passes", async () => {
    // The newest but 5,005: one step, and a few more.
    const since = idTime(rows[5_004]?.id ?? "");
    const query = { since: new Date(since).toISOString(), limit: "20", offset: "4990" };
    const page = await readHistory(store.read, "acme", new URLSearchParams(query));
    const matches = rows.filter((row) => idTime(row.id) >= since);
    expect(page.rows.map(({ id }) => id)).toEqual(matches.slice(4_990, 5_010).map(({ id }) => id));
  });

  test.each([
    ["to the end", both],
    ["to a page far behind", { offset: String(CALLS) }],
  ])("lets others pass in a long walk %s", async (_, query: Record<string, string>) => {
    const turnsOf = async (walks: number) => {
      let turns = 0;
      let timer = setImmediate(function count() {
        turns += 1;
        timer = setImmediate(count);
      });
      const walk = () => readHistory(store.read, "acme", new URLSearchParams(query));
      const pages = await Promise.all(Array.from({ length: walks }, walk));
      clearImmediate(timer);
      expect(pages.every(({ total, rows }) => total > 8_000 && rows.length === 20)).toBe(true);
      return turns;
    };
    // Each takes two steps at least, and waits between them for a turn of its own.
    expect(await turnsOf(10)).toBeGreaterThanOrEqual(10);
  });

  test("ends a walk for a caller who has gone at its next step", async () => {
    const gone = AbortSignal.abort();
    expect(await readHistory(store.read, "acme", new URLSearchParams(both))).toMatchObject({
      total: rows.filter((row) => row.mode === both.mode && row.status === both.status).length,
    });
    const { total } = await readHistory(store.read, "acme", new URLSearchParams(both), gone);
    expect(total).toBeLessThan(5_000);
    const behind = new URLSearchParams({ offset: String(CALLS) });
    expect((await readHistory(store.read, "acme", behind, gone)).rows).toEqual([]);
  });
});
