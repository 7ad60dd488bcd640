// What every store must do, run against both databases by the same tests; below, what only one of them has.
import { Database } from "bun:sqlite";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { chmodSync, mkdtempSync, readdirSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { SQL } from "bun";
import { and, asc, count, desc, eq, getTableColumns, getTableName, inArray, sql } from "drizzle-orm";
import fc from "fast-check";
import { startPostgres, type TestPostgres } from "../../test/support/postgres.ts";
import { startRelay } from "../../test/support/relay.ts";
import { Fault } from "../core/fault.ts";
import { silentLog } from "../core/log.ts";
import { counted } from "./counts.ts";
import { acquireDataDirLock } from "./lock.ts";
import { openStore } from "./open.ts";
import { openPostgres } from "./postgres.ts";
import { bind, prepared, type Reader, type Store, type Tx, UniqueViolation } from "./store.ts";

const clock = { now: () => 1_763_700_000_000 };

let postgres: TestPostgres;
beforeAll(async () => {
  postgres = await startPostgres();
}, 30_000);
afterAll(() => postgres.stop());

/** One empty database, which any number of stores may open. */
interface Place {
  open(): Promise<Store>;
  /** Runs a statement past the store. */
  execute(statement: string): Promise<void>;
  remove(): void;
}

function sqlitePlace(): Place & { dir: string } {
  const dir = mkdtempSync(join(tmpdir(), "tollgate-store-"));
  return {
    dir,
    open: () => openStore({ databaseUrl: null, dataDir: dir, log: silentLog, clock }),
    async execute(statement) {
      const database = new Database(join(dir, "tollgate.db"));
      database.run(statement);
      database.close();
    },
    remove: () => rmSync(dir, { recursive: true, force: true }),
  };
}

async function postgresPlace(): Promise<Place & { url: string }> {
  const url = await postgres.freshDatabase();
  return {
    url,
    open: () => openStore({ databaseUrl: url, dataDir: "/nowhere", log: silentLog, clock }),
    async execute(statement) {
      await using client = new SQL(url, { max: 1 });
      await client.unsafe(statement);
    },
    remove() {},
  };
}

const places = { sqlite: async () => sqlitePlace(), postgres: postgresPlace };

const agent = (id: string, name = id) => ({
  tenant: "acme",
  id,
  name,
  description: "",
  search_text: name,
  tags: null,
  metadata: "{}",
  suspended: false,
  emit_receipts: false,
  capture_body: true,
  protocol: "http" as const,
  created_by: "ada",
  created_at: 1_763_700_000_123,
  updated_at: 0,
  rate_revision: 0,
});

const addAgent = (tx: Tx, id: string, name?: string) =>
  tx.db.insert(tx.tables.agents).values(agent(id, name));

async function agentIds({ read: { db, tables } }: Store): Promise<string[]> {
  const rows = await db.select({ id: tables.agents.id }).from(tables.agents).orderBy(asc(tables.agents.id));
  return rows.map((row) => row.id);
}

const kindOf = (error: unknown) => (error instanceof Fault ? error.kind : String(error));
const outcome = (promise: Promise<unknown>) =>
  promise.then(
    () => "stored",
    (error) => kindOf(error),
  );

const versions = (dialect: string) =>
  readdirSync(join(import.meta.dir, "../../db", dialect)).filter((name) => /^\d{4}_\w+\.sql$/.test(name))
    .length;

/** Everything that a log may print of an error. */
function shown(error: unknown): string {
  return error instanceof Error
    ? `${Bun.inspect(error)} ${JSON.stringify(error)} ${shown(error.cause)}`
    : String(error);
}

describe.each(["sqlite", "postgres"] as const)("%s", (dialect) => {
  let place: Place;
  let store: Store;
  beforeAll(async () => {
    place = await places[dialect]();
    store = await place.open();
  }, 30_000);
  afterAll(async () => {
    await store.close();
    place.remove();
  });

  const cleared = () =>
    store.write(async ({ db, tables }) => {
      for (const table of Object.values(tables)) await db.delete(table);
    });

  test("a resolved write is seen by the next read and by another process's store", async () => {
    await cleared();
    const other = await place.open();
    for (let turn = 0; turn < 20; turn += 1) {
      const id = `agt_${String(turn).padStart(2, "0")}`;
      await store.write((tx) => addAgent(tx, id));
      expect((await agentIds(store)).at(-1)).toBe(id);
      expect((await agentIds(other)).at(-1)).toBe(id);
    }
    await other.close();
  });

  test("what a work writes, it reads", async () => {
    await cleared();
    const seen = await store.write(async (tx) => {
      await addAgent(tx, "agt_1");
      return tx.db.select().from(tx.tables.agents);
    });
    expect(seen).toEqual([
      {
        ...agent("agt_1"),
        upstream_url: null,
        credential_ref: null,
        invocation_rate_limit: null,
        invocation_burst: null,
        mcp_transport: null,
        mcp_protocol_version: null,
        pricing: null,
        deleted_at: null,
      },
    ]);
  });

  test("a work that throws undoes its own writes only, and its own error comes back", async () => {
    await cleared();
    const refusal = new Fault("conflict", "no");
    const works = Array.from({ length: 60 }, (_, i) =>
      store.write(async (tx) => {
        await addAgent(tx, `agt_${String(i).padStart(2, "0")}`);
        if (i % 3 === 0) throw refusal;
        return i;
      }),
    );
    const settled = await Promise.allSettled(works);
    const expected = settled.map((_, i) =>
      i % 3 === 0 ? { status: "rejected", reason: refusal } : { status: "fulfilled", value: i },
    );
    expect(settled as unknown[]).toEqual(expected);
    expect(await agentIds(store)).toEqual(
      settled.flatMap((_, i) => (i % 3 === 0 ? [] : [`agt_${String(i).padStart(2, "0")}`])),
    );
  });

  test("a second live agent of the same name is a UniqueViolation, of a deleted one not", async () => {
    await cleared();
    const both = await Promise.allSettled(
      ["agt_1", "agt_2"].map((id) => store.write((tx) => addAgent(tx, id, "same"))),
    );
    expect(both.map((each) => each.status).sort()).toEqual(["fulfilled", "rejected"]);
    expect(both.find((each) => each.status === "rejected")?.reason).toBeInstanceOf(UniqueViolation);
    await store.write(({ db, tables }) => db.update(tables.agents).set({ deleted_at: 1 }));
    await store.write((tx) => addAgent(tx, "agt_3", "same"));
    const again = store.write((tx) => addAgent(tx, "agt_3", "other"));
    expect(await again.catch((error) => error)).toBeInstanceOf(UniqueViolation);
  });

  test("an error shows none of the values", async () => {
    await cleared();
    const secret = "sk-live-4242";
    const add = (change: object) =>
      store
        .write(({ db, tables }) => db.insert(tables.agents).values({ ...agent("agt_1", secret), ...change }))
        .catch((error) => error);
    expect(await add({})).not.toBeInstanceOf(Error);
    const refused = [
      await add({}),
      await add({ id: "agt_2", protocol: "smtp" }),
      await add({ created_by: null }),
    ];
    const read = await store.read.db
      .select({ wrong: sql`nothing_of_this_name = ${secret}` })
      .from(store.read.tables.agents)
      .execute()
      .catch((error) => error);
    for (const error of [...refused, read]) {
      expect(error).toBeInstanceOf(Error);
      expect(shown(error)).not.toContain(secret);
    }
  });

  test("lock holds the others back until the work has ended", async () => {
    await cleared();
    await store.write(({ db, tables }) => db.insert(tables.replicas).values({ id: "rep", lease_until: 0 }));
    await Promise.all(
      Array.from({ length: 40 }, () =>
        store.write(async ({ db, tables: { replicas }, lock }) => {
          await lock("the counter");
          const [row] = await db.select().from(replicas);
          await db.update(replicas).set({ lease_until: (row?.lease_until ?? 0) + 1 });
        }),
      ),
    );
    expect(await store.read.db.select().from(store.read.tables.replicas)).toEqual([
      { id: "rep", lease_until: 40 },
    ]);
  });

  test("totals stay exact whatever fails", async () => {
    const change = fc.record({
      tenant: fc.constantFrom("a", "b", "a b", "ä\u{1F600}"),
      value: fc.constantFrom("", "x", "1 x"),
      delta: fc.integer({ min: -3, max: 3 }),
    });
    const work = fc.record({ changes: fc.array(change, { maxLength: 4 }), fails: fc.boolean() });
    const runs = fc.array(fc.array(work, { minLength: 1, maxLength: 12 }), { maxLength: 5 });
    await fc.assert(
      fc.asyncProperty(runs, async (groups) => {
        await cleared();
        const expected = new Map<string, number>();
        for (const group of groups) {
          const writes = group.map(({ changes, fails }) =>
            store.write(async (tx) => {
              for (const { tenant, value, delta } of changes) tx.count(tenant, "model", value, delta);
              if (fails) throw new Fault("conflict", "no");
            }),
          );
          await Promise.allSettled(writes);
          for (const { tenant, value, delta } of group.flatMap((w) => (w.fails ? [] : w.changes))) {
            const key = JSON.stringify([tenant, value]);
            expected.set(key, (expected.get(key) ?? 0) + delta);
          }
        }
        for (const [key, total] of expected) {
          const [tenant, value] = JSON.parse(key);
          expect(await counted(store.read, tenant, "model", value)).toBe(total);
        }
        expect(await counted(store.read, "nobody", "all", "")).toBe(0);
      }),
      { numRuns: 25 },
    );
  }, 30_000);

  test("values come back as they went in", async () => {
    await cleared();
    const texts = ['{"a": 1,\t"b":"\\u0000"}', "\u{1F600} ä \\ ' \" %_", "", "x".repeat(100_000)];
    const big = Buffer.alloc(32 * 1024 * 1024, "0123456789abcdef\u0000\u00ff");
    const blobs = [Buffer.alloc(0), Buffer.from([0, 255, 92, 120]), big, null];
    for (const [i, request] of blobs.entries()) {
      const row = { tenant: "t", invocation_id: `inv_${i}`, call: texts[i], request, response: null };
      await store.write(({ db, tables }) => db.insert(tables.invocationBodies).values(row));
      const [back] = await store.read.db
        .select()
        .from(store.read.tables.invocationBodies)
        .where(eq(store.read.tables.invocationBodies.invocation_id, row.invocation_id));
      expect(back?.call).toBe(texts[i] ?? null);
      if (request === null) expect(back?.request).toBeNull();
      else expect(back?.request !== null && back !== undefined && request.equals(back.request)).toBe(true);
    }
    const numbers = {
      ...agent("agt_1"),
      invocation_rate_limit: 0.1,
      invocation_burst: 2 ** 53 - 1,
      suspended: true,
    };
    await store.write(({ db, tables }) => db.insert(tables.agents).values(numbers));
    const [back] = await store.read.db.select().from(store.read.tables.agents);
    expect(back).toMatchObject(numbers);
  }, 30_000);

  test("prepared queries are built once per handle, with values of every column type", async () => {
    await cleared();
    let built = 0;
    const insert = prepared((tx: Tx) => {
      built += 1;
      const { agents } = tx.tables;
      return tx.db.insert(agents).values({
        ...agent("unused"),
        id: bind(agents.id, "id"),
        name: bind(agents.id, "id"),
        suspended: bind(agents.suspended, "suspended"),
        created_at: bind(agents.created_at, "at"),
        invocation_rate_limit: bind(agents.invocation_rate_limit, "rate"),
        deleted_at: bind(agents.deleted_at, "deleted_at"),
      });
    });
    const find = prepared(({ db, tables: { agents } }: Reader) =>
      db
        .select({
          suspended: agents.suspended,
          rate: agents.invocation_rate_limit,
          deleted: agents.deleted_at,
        })
        .from(agents)
        .where(and(eq(agents.id, bind(agents.id, "id")), eq(agents.tenant, bind(agents.tenant, "tenant")))),
    );
    for (let i = 0; i < 5; i += 1) {
      const values = {
        id: `agt_${i}`,
        suspended: i % 2 === 1,
        at: 1_763_700_000_123,
        rate: i / 2,
        deleted_at: null,
      };
      await store.write((tx) => insert(tx).execute(values));
      expect(await find(store.read).execute({ id: `agt_${i}`, tenant: "acme" })).toEqual([
        { suspended: i % 2 === 1, rate: i / 2, deleted: null },
      ]);
      expect(await find(store.read).execute({ id: `agt_${i}`, tenant: "other" })).toEqual([]);
    }
    expect(built).toBe(1);
    const bodies = prepared((tx: Tx) => {
      const { invocationBodies: b } = tx.tables;
      return tx.db
        .insert(b)
        .values({
          tenant: "t",
          invocation_id: "inv",
          request: bind(b.request, "request"),
          call: bind(b.call, "call"),
        })
        .returning({ request: b.request, call: b.call });
    });
    const returned = store.write((tx) => bodies(tx).execute({ request: Buffer.from("ab"), call: null }));
    expect(await returned).toEqual([{ request: Buffer.from("ab"), call: null }]);
  });

  test("the builders of the port mean the same on both", async () => {
    await cleared();
    await store.write(async ({ db, tables: { agents, replicas } }) => {
      const row = { id: "rep_1", lease_until: 1 };
      expect(await db.insert(replicas).values(row).onConflictDoNothing().returning()).toEqual([row]);
      expect(await db.insert(replicas).values(row).onConflictDoNothing().returning()).toEqual([]);
      await db
        .insert(replicas)
        .values({ id: "rep_1", lease_until: 5 })
        .onConflictDoUpdate({
          target: replicas.id,
          set: { lease_until: sql`${replicas.lease_until} + excluded.lease_until` },
        });
      expect(await db.select().from(replicas)).toEqual([{ id: "rep_1", lease_until: 6 }]);
      const guarded = (from: number[]) =>
        db
          .update(replicas)
          .set({ lease_until: 7 })
          .where(and(eq(replicas.id, "rep_1"), inArray(replicas.lease_until, from)))
          .returning({ until: replicas.lease_until });
      expect(await guarded([1, 2])).toEqual([]);
      expect(await guarded([5, 6])).toEqual([{ until: 7 }]);
      expect(await db.delete(replicas).where(eq(replicas.id, "rep_1")).returning()).toEqual([
        { id: "rep_1", lease_until: 7 },
      ]);
      for (const name of ["Straße", "alpha_1", "ALPHAX1", "beta"])
        await db.insert(agents).values(agent(`agt_${name}`, name));
      const names = async (query: PromiseLike<{ name: string }[]>) => (await query).map((each) => each.name);
      const named = () => db.select({ name: agents.name }).from(agents).$dynamic();
      // Byte order, whatever the locale of the database; lower() folds ASCII only.
      expect(await names(named().orderBy(asc(agents.name)))).toEqual([
        "ALPHAX1",
        "Straße",
        "alpha_1",
        "beta",
      ]);
      expect(await names(named().orderBy(desc(agents.id)).limit(2).offset(1))).toEqual(["alpha_1", "Straße"]);
      const contains = (text: string) => sql`lower(${agents.name}) like ${`%${text}%`} escape '\\'`;
      expect((await names(named().where(contains("alpha")))).sort()).toEqual(["ALPHAX1", "alpha_1"]);
      expect(await names(named().where(contains("alpha\\_")))).toEqual(["alpha_1"]);
      expect(await db.select({ n: count() }).from(agents)).toEqual([{ n: 4 }]);
      const protocols = await db.selectDistinct({ protocol: agents.protocol }).from(agents);
      expect(protocols).toEqual([{ protocol: "http" }]);
    });
  });

  test("probe writes, and tells in time", async () => {
    await store.probe(2_000);
  });

  test("a closed store refuses, after what waited has been stored", async () => {
    await cleared();
    const closing = await place.open();
    const last = closing.write((tx) => addAgent(tx, "agt_last"));
    const closed = closing.close();
    expect(await outcome(closing.write((tx) => addAgent(tx, "agt_late")))).toBe("unavailable");
    await closed;
    expect(await agentIds(store)).toEqual(["agt_last"]);
    expect(await outcome(last)).toBe("stored");
    expect(await outcome(closing.write((tx) => addAgent(tx, "agt_late")))).toBe("unavailable");
    expect(await agentIds(store)).toEqual(["agt_last"]);
  });

  test("opening again changes nothing", async () => {
    await cleared();
    await store.write((tx) => addAgent(tx, "agt_1"));
    const again = await place.open();
    expect(await agentIds(again)).toEqual(["agt_1"]);
    await again.close();
  });

  test("a database of a newer program is refused", async () => {
    const newer = await places[dialect]();
    await (await newer.open()).close();
    await newer.execute("insert into schema_migrations (version, applied_at) values (999, 0)");
    expect(newer.open()).rejects.toThrow(/version 999.*newer tollgate/s);
    newer.remove();
  });

  test("every column of the schema is in the database, and no other", async () => {
    const { db, tables } = store.read;
    for (const table of Object.values(tables)) {
      const name = getTableName(table);
      const columns =
        dialect === "sqlite"
          ? sql`select name from pragma_table_info(${name})`
          : sql`select column_name as name from information_schema.columns where table_name = ${name}`;
      const found = await db.select({ name: sql<string>`c.name` }).from(sql`(${columns}) as c`);
      expect(found.map((row) => row.name).sort()).toEqual(Object.keys(getTableColumns(table)).sort());
    }
  });
});

test("the migrations of both databases end at the same version", () => {
  expect(versions("sqlite")).toBeGreaterThan(0);
  expect(versions("sqlite")).toBe(versions("postgres"));
});

describe("sqlite alone", () => {
  let place: ReturnType<typeof sqlitePlace>;
  let store: Store;
  beforeEach(async () => {
    place = sqlitePlace();
    store = await place.open();
  });
  afterEach(async () => {
    await store.close();
    place.remove();
  });

  /** Lets the database grow by no more than `pages`; undefined lifts the limit. */
  const limitPages = (pages?: number) =>
    store.write(async ({ db }) => {
      const [row] = (await db.all(sql`pragma page_count`)) as { page_count: number }[];
      await db.run(
        sql.raw(`pragma max_page_count = ${pages === undefined ? 1 << 30 : (row?.page_count ?? 0) + pages}`),
      );
    });

  const addBody = (id: string, bytes: number) =>
    store.write(({ db, tables }) =>
      db
        .insert(tables.invocationBodies)
        .values({ tenant: "t", invocation_id: id, request: Buffer.alloc(bytes, 1) }),
    );

  const bodyIds = async () => {
    const { db, tables } = store.read;
    const rows = await db.select({ id: tables.invocationBodies.invocation_id }).from(tables.invocationBodies);
    return rows.map((row) => row.id).sort();
  };

  test("works are applied in the order in which they were handed in", async () => {
    const order: number[] = [];
    await Promise.all(Array.from({ length: 2_000 }, (_, i) => store.write(async () => void order.push(i))));
    expect(order).toEqual(Array.from({ length: 2_000 }, (_, i) => i));
  });

  test("a full disk refuses what it cannot take, loses nothing it took, and works again once it has room", async () => {
    await addBody("before", 10);
    await limitPages(20);
    const sizes = Array.from({ length: 40 }, (_, i) => (i % 4 === 3 ? 1_000_000 : 3_000));
    const outcomes = await Promise.all(sizes.map((size, i) => outcome(addBody(`inv_${i}`, size))));
    expect(new Set(outcomes)).toEqual(new Set(["stored", "unavailable"]));
    const stored = outcomes.flatMap((each, i) => (each === "stored" ? [`inv_${i}`] : []));
    expect(await bodyIds()).toEqual(["before", ...stored].sort());
    const refused = await addBody("big", 1_000_000).catch((error) => error);
    expect(refused).toMatchObject({
      kind: "unavailable",
      message: "the store cannot take a write now",
      retryAfterSeconds: 5,
    });
    await limitPages();
    await addBody("big", 1_000_000);
    expect(await bodyIds()).toEqual(["before", "big", ...stored].sort());
  });

  test("writes wait while another process holds the lock, and the event loop runs on", async () => {
    const other = new Database(join(place.dir, "tollgate.db"));
    other.run("begin immediate");
    const write = addBody("inv_1", 10);
    const turns = Promise.withResolvers<void>();
    let left = 10;
    const timer = setInterval(() => {
      left -= 1;
      if (left > 0) return;
      clearInterval(timer);
      turns.resolve();
    }, 5);
    expect(await Promise.race([write, turns.promise.then(() => "waiting")])).toBe("waiting");
    other.run("commit");
    other.close();
    await write;
    expect(await bodyIds()).toEqual(["inv_1"]);
  });

  test("files are private, also those of a database that was not", async () => {
    await addBody("inv_1", 10);
    await store.close();
    chmodSync(join(place.dir, "tollgate.db"), 0o644);
    store = await place.open();
    await addBody("inv_2", 10);
    acquireDataDirLock(place.dir).release();
    const files = readdirSync(place.dir).filter((name) => name.startsWith("tollgate."));
    expect(files.length).toBeGreaterThanOrEqual(3);
    for (const name of files) expect(statSync(join(place.dir, name)).mode & 0o777).toBe(0o600);
  });

  test("the reader cannot write", async () => {
    const { db, tables } = store.read as Tx;
    expect(db.insert(tables.replicas).values({ id: "rep", lease_until: 0 }).execute()).rejects.toThrow(
      /readonly/,
    );
  });

  test("history pages and the dispatcher's queries walk an index, whatever is in the table", async () => {
    const { db } = store.read as Tx;
    const plan = async (where: string) => {
      const rows = (await db.all(sql.raw(`explain query plan select * from invocations where ${where}`))) as {
        detail: string;
      }[];
      return rows.map((row) => row.detail).join("; ");
    };
    const page = "order by id desc limit 20 offset 40";
    const window = "id >= 'inv_0' and id < 'inv_1'";
    expect(await plan(`tenant = 't' ${page}`)).toBe("SEARCH invocations USING PRIMARY KEY (tenant=?)");
    for (const [column, index] of Object.entries({
      agent_id: "agent",
      status: "status",
      mode: "mode",
      settlement_status: "settlement",
      error_class: "error_class",
      model: "model",
    })) {
      const used = `SEARCH invocations USING INDEX invocations_${index} (tenant=? AND ${column}=?`;
      expect(await plan(`tenant = 't' and ${column} = 'x' ${page}`)).toBe(`${used})`);
      expect(await plan(`tenant = 't' and ${column} = 'x' and ${window} ${page}`)).toBe(
        `${used} AND id>? AND id<?)`,
      );
    }
    expect(await plan("agent_id = 'a' and status = 'pending' order by id")).toBe(
      "SEARCH invocations USING INDEX invocations_pending (agent_id=?)",
    );
    expect(await plan("owner = 'r' and status = 'running'")).toBe(
      "SEARCH invocations USING INDEX invocations_running (owner=?)",
    );
  });

  test("processes that open a new database at once agree on one schema", async () => {
    const fresh = sqlitePlace();
    const script = `
      import { openStore } from ${JSON.stringify(join(import.meta.dir, "open.ts"))};
      import { silentLog } from ${JSON.stringify(join(import.meta.dir, "../core/log.ts"))};
      console.log("ready");
      await Bun.stdin.text();
      const options = { databaseUrl: null, dataDir: ${JSON.stringify(fresh.dir)}, log: silentLog, clock: { now: () => 0 } };
      const store = await openStore(options);
      await store.write(({ db, tables }) => db.insert(tables.replicas).values({ id: process.argv[1], lease_until: 0 }));
      await store.close();`;
    const children = Array.from({ length: 6 }, (_, i) =>
      Bun.spawn([process.execPath, "-e", script, `rep_${i}`], {
        stdin: "pipe",
        stdout: "pipe",
        stderr: "inherit",
      }),
    );
    await Promise.all(children.map((child) => child.stdout.getReader().read()));
    for (const child of children) child.stdin.end();
    expect(await Promise.all(children.map((child) => child.exited))).toEqual([0, 0, 0, 0, 0, 0]);
    const opened = await fresh.open();
    expect(await opened.read.db.select({ n: count() }).from(opened.read.tables.replicas)).toEqual([{ n: 6 }]);
    await opened.close();
    fresh.remove();
  }, 20_000);

  test("a data directory has one gateway, until that one has gone", async () => {
    const script = `
      import { acquireDataDirLock } from ${JSON.stringify(join(import.meta.dir, "lock.ts"))};
      acquireDataDirLock(${JSON.stringify(place.dir)});
      console.log("held");
      setInterval(() => {}, 60_000);
      process.stdin.on("end", () => process.exit()).resume();`;
    const holder = Bun.spawn([process.execPath, "-e", script], {
      stdin: "pipe",
      stdout: "pipe",
      stderr: "inherit",
    });
    await holder.stdout.getReader().read();
    expect(() => acquireDataDirLock(place.dir)).toThrow(/another tollgate/);
    const command = await place.open();
    await command.close();
    await addBody("inv_1", 10);
    holder.kill("SIGKILL");
    await holder.exited;
    const lock = acquireDataDirLock(place.dir);
    expect(() => acquireDataDirLock(place.dir)).toThrow(/another tollgate/);
    lock.release();
    acquireDataDirLock(place.dir).release();
  });
});

describe("postgres alone", () => {
  /** A store whose server the test can take away. */
  async function behindRelay(callMsMax?: number) {
    const url = new URL(await postgres.freshDatabase());
    const relay = startRelay(Number(url.port));
    url.port = `${relay.port}`;
    const store = await openPostgres({
      databaseUrl: url.href,
      clock,
      ...(callMsMax === undefined ? {} : { callMsMax }),
    });
    const add = (id: string) => outcome(store.write((tx) => addAgent(tx, id)));
    const close = async () => {
      await store.close();
      relay.stop();
    };
    return { relay, store, add, close };
  }

  test("connections that were cut while idle cost no call", async () => {
    const { relay, store, add, close } = await behindRelay();
    expect(await Promise.all(["1", "2", "3"].map(add))).toEqual(["stored", "stored", "stored"]);
    expect(await agentIds(store)).toHaveLength(3);
    relay.cut();
    expect(await Promise.all(["4", "5", "6"].map(add))).toEqual(["stored", "stored", "stored"]);
    relay.cut();
    expect(await agentIds(store)).toHaveLength(6);
    await close();
  });

  test("a server that has gone is unavailable, and back again by itself", async () => {
    const { relay, store, add, close } = await behindRelay();
    expect(await add("1")).toBe("stored");
    relay.refuse();
    expect(await Promise.all(["2", "3"].map(add))).toEqual(["unavailable", "unavailable"]);
    expect(await outcome(agentIds(store))).toBe("unavailable");
    expect(await outcome(store.probe(2_000))).toBe("unavailable");
    relay.restore();
    expect(await add("4")).toBe("stored");
    expect(await agentIds(store)).toEqual(["1", "4"]);
    await close();
  });

  test("a server that falls silent is unavailable in time, for more callers than connections", async () => {
    const { relay, store, add, close } = await behindRelay(400);
    expect(await add("0")).toBe("stored");
    relay.stall();
    const calls = Array.from({ length: 40 }, (_, i) => add(`1${i}`));
    const began = performance.now();
    expect(new Set(await Promise.all([...calls, outcome(agentIds(store))]))).toEqual(
      new Set(["unavailable"]),
    );
    expect(performance.now() - began).toBeLessThan(1_500);
    relay.restore();
    expect(await add("2")).toBe("stored");
    expect(await agentIds(store)).toEqual(["0", "2"]);
    await close();
  });

  test("a connection lost within a work leaves nothing of it", async () => {
    const { relay, store, add, close } = await behindRelay();
    const lost = store.write(async (tx) => {
      await addAgent(tx, "1");
      relay.cut();
      await addAgent(tx, "2");
    });
    expect(await outcome(lost)).toBe("unavailable");
    expect(await add("3")).toBe("stored");
    expect(await agentIds(store)).toEqual(["3"]);
    await close();
  });

  test("a work that swallows the failure of a statement is not told that it was stored", async () => {
    const place = await postgresPlace();
    const store = await place.open();
    await store.write((tx) => addAgent(tx, "agt_1"));
    const swallowed = store.write(async (tx) => {
      await addAgent(tx, "agt_0");
      await addAgent(tx, "agt_1").catch(() => {});
    });
    expect(await swallowed.catch((error) => error)).toBeInstanceOf(UniqueViolation);
    expect(await agentIds(store)).toEqual(["agt_1"]);
    await store.close();
  });

  test("of two works in a deadlock both are done", async () => {
    const place = await postgresPlace();
    const store = await place.open();
    await store.write(async ({ db, tables }) => {
      for (const id of ["a", "b"]) await db.insert(tables.replicas).values({ id, lease_until: 0 });
    });
    const bothHoldOne = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    const cross = (ids: string[], mine: number) =>
      store.write(async ({ db, tables: { replicas } }) => {
        for (const id of ids) {
          await db
            .update(replicas)
            .set({ lease_until: sql`${replicas.lease_until} + 1` })
            .where(eq(replicas.id, id));
          bothHoldOne[mine]?.resolve();
          await bothHoldOne[1 - mine]?.promise;
        }
      });
    await Promise.all([cross(["a", "b"], 0), cross(["b", "a"], 1)]);
    const rows = await store.read.db
      .select()
      .from(store.read.tables.replicas)
      .orderBy(store.read.tables.replicas.id);
    expect(rows.map((row) => row.lease_until)).toEqual([2, 2]);
    await store.close();
  });

  test("a text with U+0000, which Postgres cannot hold, is the caller's fault", async () => {
    const place = await postgresPlace();
    const store = await place.open();
    expect(await outcome(store.write((tx) => addAgent(tx, "agt_1", "a\u0000b")))).toBe("invalid_request");
    await store.close();
  });

  test("history pages walk an index, also for a value that is common elsewhere", async () => {
    const place = await postgresPlace();
    await (await place.open()).close();
    await using client = new SQL(place.url, { max: 1 });
    // Of "a", nothing failed and nothing streamed; of the others, nearly all.
    await client.unsafe(`
      insert into invocations (tenant, id, agent_id, caller, mode, status, response_truncated, body_captured,
        emit_receipt, updated_at, completed_at)
      select case when i % 5 = 0 then 'a' else 'b' end, 'inv_' || lpad(i::text, 8, '0'), 'agt_1', 'c',
        case when i % 5 = 0 then 'transactional' else 'streaming' end,
        case when i % 5 = 0 then 'succeeded' else 'failed' end, false, false, false, 1, 1
      from generate_series(1, 20000) i`);
    await client.unsafe("analyze invocations");
    const filters = {
      status: "failed",
      mode: "streaming",
      error_class: "x",
      model: "x",
      settlement_status: "x",
    };
    for (const plans of ["force_generic_plan", "force_custom_plan"]) {
      await client.unsafe(`set plan_cache_mode = ${plans}`);
      for (const [column, value] of Object.entries(filters)) {
        await client.unsafe(`prepare page (text, text) as
          select * from invocations where tenant = $1 and ${column} = $2 order by id desc limit 20`);
        const rows = await client.unsafe(`explain (costs off) execute page ('a', '${value}')`).values();
        const index = `invocations_${column === "settlement_status" ? "settlement" : column}`;
        expect(rows.join("\n")).toContain(`Index Scan Backward using ${index} on invocations`);
        await client.unsafe("deallocate page");
      }
    }
  });

  test("replicas that start at once agree on one schema", async () => {
    const place = await postgresPlace();
    const stores = await Promise.all(Array.from({ length: 5 }, () => place.open()));
    await Promise.all(stores.map((store, i) => store.write((tx) => addAgent(tx, `agt_${i}`))));
    for (const store of stores) {
      expect(await agentIds(store)).toHaveLength(5);
      await store.close();
    }
  });

  test("a server that is not there is named at the start, without the password", async () => {
    const databaseUrl = "postgres://tollgate:hunter2@127.0.0.1:1/x";
    const error = await openPostgres({ databaseUrl, clock }).catch((thrown) => thrown);
    expect(error.message).toMatch(/Postgres server of DATABASE_URL does not answer/);
    expect(shown(error)).not.toContain("hunter2");
  });
});
