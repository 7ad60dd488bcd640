import { Database } from "bun:sqlite";
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { SQL } from "bun";
import fc from "fast-check";
import { type Catalog, fresh, MCP, openCatalog, UPSTREAM_URL } from "../../../test/support/stores/catalog.ts";
import { agentsIn } from "../../../test/support/stores/many-agents.ts";
import { startPostgres } from "../../../test/support/stores/postgres.ts";
import { type AgentStatus, PROTOCOLS, type Protocol } from "../../core/states.ts";
import type { Reader } from "../../storage/store.ts";
import { type AgentFilter, findAgents, fold, searchText } from "./lists.ts";

const ALL: AgentFilter = { status: null, protocol: null, tag: null, q: null, limit: 20, offset: 0 };

interface Shown {
  readonly id: string;
  readonly name: string;
  readonly description: string;
  readonly status: AgentStatus;
  readonly protocol: Protocol;
  readonly tags: readonly string[] | null;
}

/** What the words of the interface say, of all agents one by one. */
function naive(agents: readonly Shown[], filter: AgentFilter) {
  const { status, protocol, tag, q, limit, offset } = filter;
  const found = agents
    .filter((agent) => (status === null ? agent.status !== "inactive" : agent.status === status))
    .filter((agent) => protocol === null || agent.protocol === protocol)
    .filter((agent) => tag === null || agent.tags?.includes(tag))
    .filter(({ name, description }) => [name, description].some((text) => fold(text).includes(fold(q ?? ""))))
    .map(({ id }) => id)
    .sort()
    .reverse();
  return { ids: found.slice(offset, offset + limit), total: found.length };
}

describe.each(["sqlite", "postgres"] as const)("on %s", (dialect) => {
  let catalog: Catalog;
  let url: string | null = null;
  beforeAll(async () => {
    if (dialect === "postgres") url = await (await startPostgres()).freshDatabase();
    catalog = await openCatalog(url);
  });

  async function execute(statement: string): Promise<void> {
    if (url === null) {
      using database = new Database(join(catalog.dir, "tollgate.db"));
      database.run(statement);
    } else {
      await using client = new SQL(url, { max: 1 });
      await client.unsafe(statement);
    }
  }
  afterAll(() => catalog[Symbol.asyncDispose]());

  const words = fc.constantFrom("a", "b", "/", "any", "http", "live/any", "Straße", "'", '"', "\\", "%");
  const texts = fc.array(words, { maxLength: 3 }).map((parts) => parts.join(""));
  const tags = fc.option(fc.array(words, { maxLength: 4 }));
  const fields = fc.record({ description: texts, tags, isPending: fc.boolean(), isMcp: fc.boolean() });
  const steps = fc.oneof(
    { weight: 3, arbitrary: fields.map((value) => ({ kind: "create" as const, value })) },
    {
      weight: 2,
      arbitrary: fc.tuple(fc.nat(), fields).map(([at, value]) => ({ kind: "patch" as const, at, value })),
    },
    { weight: 1, arbitrary: fc.nat().map((at) => ({ kind: "remove" as const, at })) },
  );
  const filters = fc.record({
    status: fc.option(fc.constantFrom<AgentStatus>("pending", "active", "inactive")),
    protocol: fc.option(fc.constantFrom(...PROTOCOLS)),
    tag: fc.option(words),
    q: fc.option(texts),
    limit: fc.integer({ min: 1, max: 5 }),
    offset: fc.nat({ max: 6 }),
  });

  const body = ({ description, tags, isPending, isMcp }: typeof fields extends fc.Arbitrary<infer F> ? F : never) => ({
    description,
    tags: tags ?? [],
    upstream_url: isPending ? null : UPSTREAM_URL,
    ...(isMcp ? MCP : { protocol: "http", mcp_transport: null }),
  });

  let serial = 0;
  async function play(steps_: readonly (typeof steps extends fc.Arbitrary<infer S> ? S : never)[]) {
    const tenant = `${dialect} ${++serial}`;
    const ids: string[] = [];
    for (const step of steps_) {
      if (step.kind === "create") {
        const made = await catalog.send("POST", "/v1/agents", fresh(body(step.value)), tenant);
        expect(made.status).toBe(201);
        ids.push(made.body.id);
      } else if (ids.length > 0) {
        const path = `/v1/agents/${ids[step.at % ids.length]}`;
        const { status } =
          step.kind === "remove"
            ? await catalog.send("DELETE", path, undefined, tenant)
            : await catalog.send("PATCH", path, body(step.value), tenant);
        expect(status).toBeOneOf([200, 204, 404]);
      }
    }
    const agents: Shown[] = [];
    for (const id of ids) agents.push((await catalog.send("GET", `/v1/agents/${id}`, undefined, tenant)).body);
    return { tenant, agents };
  }

  test("whatever is made, changed and deleted, every list is what looking at all agents finds", async () => {
    await fc.assert(
      fc.asyncProperty(
        fc.array(steps, { maxLength: 12 }),
        fc.array(filters, { minLength: 20, maxLength: 20 }),
        async (steps_, asked) => {
          const { tenant, agents } = await play(steps_);
          for (const filter of [ALL, ...asked]) {
            expect(await findAgents(catalog.store.read, tenant, filter)).toEqual(naive(agents, filter));
          }
          // No list is kept that nobody is in.
          const { db, tables } = catalog.store.read;
          const totals = await db.select().from(tables.catalogTotals);
          expect(totals.filter(({ count }) => count < 1)).toEqual([]);
        },
      ),
      { numRuns: dialect === "sqlite" ? 60 : 25 },
    );
  }, 120_000);

  const COUNT = 6_000;

  /** Queries that were made of a reader, and the rows that they gave. */
  function counting(reader: Reader): { reader: Reader; queries(): number } {
    let queries = 0;
    const db = new Proxy(reader.db, {
      get(target, name) {
        if (name === "select") queries++;
        const value = Reflect.get(target, name);
        return typeof value === "function" ? value.bind(target) : value;
      },
    });
    return { reader: { ...reader, db }, queries: () => queries };
  }

  test("a page takes the same work at six thousand agents as at ten, and a search steps with a bound", async () => {
    const [many, few] = [`many ${dialect}`, `few ${dialect}`];
    for (const statement of [...agentsIn(many, COUNT), ...agentsIn(few, 10)]) {
      await execute(statement);
    }
    const work = async (tenant: string, filter: Partial<AgentFilter>) => {
      const { reader, queries } = counting(catalog.store.read);
      const found = await findAgents(reader, tenant, { ...ALL, limit: 5, ...filter });
      return { queries: queries(), ...found };
    };
    const asked: Partial<AgentFilter>[] = [
      {},
      { status: "active" },
      { status: "pending", protocol: "http" },
      { protocol: "mcp", tag: "common" },
      { tag: "common" },
      { offset: 3 },
    ];
    for (const filter of asked) {
      const [large, small] = [await work(many, filter), await work(few, filter)];
      expect([filter, large.queries]).toEqual([filter, small.queries]);
      expect(large.total).toBeGreaterThan(small.total * 50);
    }
    const deep = await work(many, { offset: COUNT - 2 });
    expect([deep.ids.length, deep.total, deep.queries]).toEqual([2, COUNT, 3]);
    expect(deep.ids).toEqual((await work(many, { limit: COUNT })).ids.slice(-2));

    const search = await work(many, { q: "needle 7", limit: 100 });
    // 7, 70 to 79 and 700 to 799.
    expect([search.ids.length, search.total]).toEqual([100, 111]);
    const later = await work(many, { q: "needle 7", limit: 100, offset: 30 });
    expect(later.ids.slice(0, 70)).toEqual(search.ids.slice(30));
    expect([later.ids.length, later.total]).toEqual([81, 111]);
    // Each text has about two KiB, and a step no more than 256.
    expect(search.queries).toBeGreaterThanOrEqual(2 * Math.floor((COUNT * 2) / 256));
  });
});

test("on SQLite every list is found along the keys, whatever else there is", async () => {
  await using catalog = await openCatalog();
  const database = new Database(join(catalog.dir, "tollgate.db"), { readonly: true });
  const plan = (query: string) =>
    database
      .query<{ detail: string }, []>(`explain query plan ${query}`)
      .all()
      .map(({ detail }) => detail)
      .join("\n");
  expect(plan("select id from agent_lists where tenant = '' and list = '' and id < '' order by id desc limit 9")).toBe(
    "SEARCH agent_lists USING PRIMARY KEY (tenant=? AND list=? AND id<?)",
  );
  expect(plan(`select * from agents where tenant = '' and id in (${Array(16).fill("''")}) order by id desc`)).toBe(
    "SEARCH agents USING PRIMARY KEY (tenant=? AND id=?)",
  );
  expect(
    plan("select id from agent_search where tenant = '' and inactive = 0 and id < '' order by id desc limit 9"),
  ).toBe("SEARCH agent_search USING PRIMARY KEY (tenant=? AND inactive=? AND id<?)");
  expect(plan("delete from agent_lists where tenant = '' and list in ('1', '2', '3', '4') and id = ''")).toBe(
    "SEARCH agent_lists USING PRIMARY KEY (tenant=? AND list=? AND id=?)",
  );
  database.close();
});

const texts = fc.string({ unit: "binary" });

test("folding a part gives a part of the folded whole, so that a search finds a part of a name whatever its case", () => {
  fc.assert(
    fc.property(texts, texts, texts, (before, part, after) => {
      expect(fold(before + part + after)).toContain(fold(part));
      for (const cased of [part.toUpperCase(), part.toLowerCase()]) {
        expect(fold(cased)).toBe(fold(part));
      }
    }),
  );
});

test("a search matches nothing across the end of the name", () => {
  expect(searchText({ name: "ab", description: "cd" })).not.toContain(fold("abcd"));
  expect(searchText({ name: "ab", description: "cd" })).not.toContain(fold("ab\u0001cd"));
});
