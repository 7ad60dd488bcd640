import { Database } from "bun:sqlite";
import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import { drizzle } from "drizzle-orm/bun-sqlite";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { accepted, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { FILTERS, longHistory } from "../../../test/support/stores/long-history.ts";
import { clock, postgresPlace, sqlitePlace } from "../../../test/support/stores/stores.ts";
import { BEGIN_READ, postgresClient, postgresQueries } from "../../storage/postgres/pool.ts";
import type { Queries, Reader } from "../../storage/store.ts";
import { readHistory } from "./history.ts";
import { type AcceptedCall, accept, claim, finish } from "./service.ts";

const one = Object.entries(FILTERS).map(([name, [value]]): [string, string] => [name, value]);
const pairs = one.flatMap((first, index) => one.slice(index + 1).map((second) => [first, second]));
const ALWAYS: Record<string, string> = { since: "1970-01-01T00:00:00Z", until: "2999-01-01T00:00:00Z" };
const NEVER: Record<string, string>[] = [
  { since: "2999-01-01T00:00:00Z" },
  { until: "1970-01-01T00:00:00Z" },
  { since: "2025-11-21T00:00:00Z", until: "2025-11-21T00:00:00Z" },
];

/** No filter, each one and each pair, without dates and with them, and the indexes that may be walked for it. */
const QUESTIONS = [[], ...one.map((filter) => [filter]), ...pairs].flatMap((filters) =>
  [{}, ALWAYS, ...(filters.length < 2 ? NEVER : [])].map((dates) => ({
    query: new URLSearchParams({ ...Object.fromEntries(filters), ...dates, offset: "3" }),
    indexes: filters.map(([name]) => `invocations_${name === "agent_id" ? "agent" : name}`),
  })),
);

type Statement = readonly [text: string, values: readonly unknown[]];

/** What a page asks of the invocations themselves; the reader puts down all that it is asked in `asked`. */
async function statements(reader: Reader, asked: Statement[], tenant: string, query: URLSearchParams) {
  asked.length = 0;
  await readHistory(reader, tenant, query);
  const found = asked.filter(([text]) => !text.includes('from "invocation_counts"'));
  expect(found.length).toBeGreaterThan(0);
  return found;
}

/** Whether it reads calls by their IDs, which another statement has found. */
const isById = ([text]: Statement) => text.includes('from "invocations"');

/** Of an index of the history. */
const columnOf = (index: string) =>
  ({ invocations_agent: "agent_id", invocations_settlement: "settlement_status" })[index] ??
  index.replace("invocations_", "");

describe("whatever is asked of the history, of the ended calls one index is walked, and of the open ones that of their tenant", () => {
  test("on SQLite", async () => {
    const place = sqlitePlace();
    await (await place.open()).close();
    for (const statement of longHistory("acme", 300)) await place.execute(statement);
    const database = new Database(join(place.dir, "tollgate.db"));
    const asked: Statement[] = [];
    const logger = { logQuery: (text: string, values: unknown[]) => void asked.push([text, values]) };
    const db = drizzle(database, { logger }) as unknown as Queries;
    const reader = { db, tables: defineSchema(columns.sqlite) };
    const key = "PRIMARY KEY (tenant=? AND id>? AND id<?)";
    for (const { query, indexes } of QUESTIONS) {
      for (const statement of await statements(reader, asked, "acme", query)) {
        const [text] = statement;
        const rows = database.prepare<{ detail: string }, []>(`explain query plan ${text}`).all();
        const plan = rows.map(({ detail }) => detail).join("; ");
        expect(plan).not.toMatch(/SCAN (open|ended)_invocations/);
        if (text.includes('from "open_invocations"')) {
          expect(plan).toContain(
            "SEARCH open_invocations USING COVERING INDEX open_invocations_tenant (ANY(batch) AND tenant=?",
          );
        }
        if (isById(statement)) expect(plan).toContain("SEARCH ended_invocations USING PRIMARY KEY (tenant=? AND id=?)");
        if (!text.includes('from "ended_invocations"')) continue;
        const walked = /SEARCH ended_invocations USING (?:COVERING )?(?:INDEX )?(.*?\))(?:$|;)/.exec(plan)?.[1] ?? "";
        const expected = indexes.map((index) => {
          const row = `(${columnOf(index)},id)`;
          return `${index} (tenant=? AND ${row}>(?,?) AND ${row}<(?,?))`;
        });
        expect([`${query}`, ...(indexes.length === 0 ? [key] : expected)]).toContain(walked);
        // Matches of two filters at once are put in order within their window, and what is found of open and of ended calls.
        const sorts = text.includes("union all") ? 2 : 0;
        if (indexes.length < 2) expect(plan.match(/TEMP B-TREE/g) ?? []).toHaveLength(sorts);
      }
    }
    database.close();
    place.remove();
  });

  /** The plans of what tenant `tenant` may ask, as a reader of the product gets them. */
  async function expectWalks(url: string, tenant: string): Promise<void> {
    await using client = postgresClient(url);
    await client.unsafe(BEGIN_READ);
    const asked: Statement[] = [];
    const db = postgresQueries(async (text, values, rows) => {
      asked.push([text, values]);
      const running = client.unsafe(text, values);
      return rows === "arrays" ? await running.values() : await running;
    });
    for (const { query, indexes } of QUESTIONS) {
      const reader = { db, tables: defineSchema(columns.postgres) };
      for (const statement of await statements(reader, asked, tenant, query)) {
        const [text, values] = statement;
        await client.unsafe(`prepare asked as ${text}`);
        for (const plans of ["force_generic_plan", "force_custom_plan"]) {
          await client.unsafe(`set plan_cache_mode = ${plans}`);
          const given = values.map((value) => (typeof value === "number" ? value : `'${value}'`));
          const rows = await client.unsafe(`explain (costs off) execute asked (${given})`).values();
          const plan = rows.join("\n");
          expect(plan).not.toMatch(/Bitmap|Seq Scan/);
          // No open call has an error class.
          if (plan.includes("One-Time Filter: false")) continue;
          // What is found of the open and of the ended calls is put in order.
          const walks = text.includes("union all") ? plan.match(/Subquery Scan on[\s\S]*?Index/g) : [plan];
          if (indexes.length < 2) for (const walk of walks ?? []) expect(walk).not.toMatch(/-> +Sort$/m);
          if (text.includes('from "open_invocations"')) expect(plan).toContain("using open_invocations_tenant");
          if (isById(statement)) expect(plan).toContain("using ended_invocations_pkey on ended_invocations");
          if (!text.includes('from "ended_invocations"')) continue;
          const walked = /Index (?:Only )?Scan Backward using (\w+) on ended_invocations.*\n +Index Cond: (.*)/.exec(
            plan,
          );
          const expected = indexes.length === 0 ? ["ended_invocations_pkey"] : indexes;
          expect([`${tenant} ${query}\n${plan}`, ...expected]).toContain(walked?.[1] ?? "");
          expect(walked?.[2]).toMatch(/id\)? >= .* AND .*id\)? < /);
        }
        await client.unsafe("deallocate asked");
      }
    }
  }

  test("on Postgres, measured or not, and for a tenant who is newer than the statistics", async () => {
    const place = await postgresPlace();
    await (await place.open()).close();
    for (const statement of longHistory("acme", 10_000)) await place.execute(statement);
    await expectWalks(place.url, "acme");
    await place.execute("analyze");
    await expectWalks(place.url, "acme");
    for (const statement of longHistory("new", 200)) await place.execute(statement);
    await expectWalks(place.url, "new");
  });
});

test("a page needs no walk, however many open calls there are beside the ended ones", async () => {
  const place = sqlitePlace();
  await (await place.open()).close();
  // Every fifth one is open.
  for (const statement of longHistory("acme", 12_000, 5)) await place.execute(statement);
  // In batches of twenty, as they would have come.
  await place.execute("update open_invocations set batch = cast(substr(id, 9, 4) || substr(id, 14, 2) as integer)");
  const database = new Database(join(place.dir, "tollgate.db"));
  const asked: string[] = [];
  const logger = { logQuery: (text: string) => void asked.push(text) };
  const reader = { db: drizzle(database, { logger }) as unknown as Queries, tables: defineSchema(columns.sqlite) };
  const page = async (query: string) => (await readHistory(reader, "acme", new URLSearchParams(query))).rows;
  const all = database.query("select id from invocations order by id desc").values().flat();
  for (const offset of [0, 30, 4_900]) {
    asked.length = 0;
    const rows = await page(`limit=30&offset=${offset}`);
    expect(rows.map(({ id }) => id)).toEqual(all.slice(offset, offset + 30) as string[]);
    expect(asked.filter((text) => text.includes("ended_entries"))).toEqual([]);
    const dates = new URLSearchParams(ALWAYS);
    expect(await page(`limit=30&offset=${offset}&${dates}`)).toEqual(rows);
  }
  expect(asked.length).toBeGreaterThan(0);
  database.close();
  place.remove();
});

test("a page stays the same when open calls end between the looks at them and at the ended ones, on Postgres", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  const calls = Array.from({ length: 12 }, (_, i) => accepted(clock.now() + i));
  for (const call of calls) await accept(store, call);
  async function end({ row: { tenant, id } }: AcceptedCall): Promise<void> {
    const key = { tenant, id };
    await claim(store, { key, owner: "rep_1", token: "t", now: 1 });
    await finish(store, { key, token: "t", request_id: "r" }, SUCCESS, 2);
  }
  for (const call of calls.slice(0, 6)) await end(call);
  await using client = postgresClient(place.url);
  const left = calls.slice(6);
  const db = postgresQueries(async (text, values, rows) => {
    const next = text.includes('from "ended_invocations"') ? left.pop() : undefined;
    if (next !== undefined) await end(next);
    const running = client.unsafe(text, values);
    return rows === "arrays" ? await running.values() : await running;
  });
  const ids = calls.map(({ row }) => row.id).reverse();
  for (const dates of [{}, ALWAYS]) {
    for (const offset of [7, 2]) {
      const query = new URLSearchParams({ ...dates, limit: "3", offset: `${offset}` });
      const page = await readHistory({ db, tables: defineSchema(columns.postgres) }, "acme", query);
      expect(page.rows.map(({ id }) => id)).toEqual(ids.slice(offset, offset + 3));
    }
  }
  expect(left.length).toBeLessThan(3);
  await store.close();
});

test("a page is that of one moment when calls come between the look at how many are open and the page itself, on Postgres", async () => {
  const place = await postgresPlace();
  const store = await place.open();
  const calls = Array.from({ length: 21 }, (_, i) => accepted(clock.now() + i));
  for (const call of calls) await accept(store, call);
  for (const { row } of calls.slice(0, 20)) {
    const key = { tenant: row.tenant, id: row.id };
    await claim(store, { key, owner: "rep_1", token: "t", now: 1 });
    await finish(store, { key, token: "t", request_id: "r" }, SUCCESS, 2);
  }
  await using client = postgresClient(place.url);
  const coming = Array.from({ length: 5 }, (_, i) => accepted(clock.now() + 100 + i));
  const db = postgresQueries(async (text, values, rows) => {
    if (text.includes("union all")) for (const call of coming.splice(0)) await accept(store, call);
    const running = client.unsafe(text, values);
    return rows === "arrays" ? await running.values() : await running;
  });
  const after = [...calls, ...coming].map(({ row }) => row.id).reverse();
  const query = new URLSearchParams({ limit: "5", offset: "10" });
  const page = await readHistory({ db, tables: defineSchema(columns.postgres) }, "acme", query);
  expect(page.rows.map(({ id }) => id)).toEqual(after.slice(10, 15));
  await store.close();
});

test("a walk finds each call once, and how many there are, when calls end between any two looks", async () => {
  const place = sqlitePlace();
  await (await place.open()).close();
  for (const statement of longHistory("acme", 12_000, 5)) await place.execute(statement);
  const database = new Database(join(place.dir, "tollgate.db"));
  const kept = "tenant, id, agent_id, caller, mode, model, settlement_status, body_captured, outbox, updated_at";
  const some = "from open_invocations where id in (select id from open_invocations order by id desc limit 8)";
  const logger = {
    logQuery(text: string) {
      if (!text.includes('"ended_invocations"')) return;
      database.run(
        `insert into ended_invocations (${kept}, status, response_truncated, completed_at) select ${kept}, 'failed', 0, 1 ${some}`,
      );
      database.run(`delete ${some}`);
    },
  };
  const reader = { db: drizzle(database, { logger }) as unknown as Queries, tables: defineSchema(columns.sqlite) };
  const [agent_id, mode] = [FILTERS.agent_id[0], "transactional"];
  for (const filters of [
    { mode, ...ALWAYS },
    { agent_id, mode },
  ]) {
    const of = Object.entries(filters).filter(([name]) => !(name in ALWAYS));
    const where = of.map(([name, value]) => `${name} = '${value}'`).join(" and ");
    const ids = database
      .query(`select id from invocations where ${where} order by id desc`)
      .values()
      .flat() as string[];
    for (let offset = 0; offset < ids.length; offset += 500) {
      const query = new URLSearchParams({ ...filters, limit: "100", offset: `${offset}` });
      const page = await readHistory(reader, "acme", query);
      expect([offset, page.rows.map(({ id }) => id)]).toEqual([offset, ids.slice(offset, offset + 100)]);
      expect([offset, page.total]).toEqual([offset, ids.length]);
    }
  }
  database.close();
  place.remove();
});
