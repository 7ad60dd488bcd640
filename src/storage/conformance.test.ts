import { expect, test } from "bun:test";
import { and, asc, count, desc, eq, getTableColumns, getTableName, inArray, sql } from "drizzle-orm";
import fc from "fast-check";
import { eachStore, useStore } from "../../test/support/stores/one-store.ts";
import { addAgent, agent, agentIds, outcome, type Place, shown } from "../../test/support/stores/stores.ts";
import type { CallEnd } from "../core/call.ts";
import { Fault } from "../core/fault.ts";
import { type Log, silentLog } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { newestVersion } from "./migrate.ts";
import { bind, prepared, type Reader, type Store, type Tx, UniqueViolation } from "./store.ts";
import { endedTotal } from "./totals.ts";

const END: CallEnd = {
  tenant: "acme",
  invocation_id: "inv_1",
  agent_id: "agt_1",
  caller: "ada",
  mode: "transactional",
  model: null,
  mcp_method: null,
  request_id: null,
  status: "succeeded",
  error_class: null,
  error_detail: null,
  upstream_status: 200,
  latency_ms: 1,
  ttft_ms: null,
  req_size: 1,
  resp_size: 1,
  response_truncated: false,
  response_content_type: null,
  accepted_at: 0,
  ended_at: 1,
  payment: null,
  detail: null,
};

const OPEN_CALL = {
  tenant: "t",
  agent_id: "agt_1",
  caller: "ada",
  mode: "transactional",
  status: "pending",
  body_captured: true,
  outbox: null,
  updated_at: 0,
  call: "{}",
} as const;

eachStore((makePlace, dialect) => {
  let place: Place;
  let store: Store;
  useStore(makePlace, (opened) => {
    ({ place, store } = opened);
  });

  const cleared = () =>
    store.write(async ({ db, tables }) => {
      const { invocations, ...stored } = tables;
      for (const table of Object.values(stored)) await db.delete(table);
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

  test("the end of a call is told when its work is durable, and never when that is undone", async () => {
    await cleared();
    const own = await place.open();
    const told: string[] = [];
    own.onCallEnded(() => {
      throw new Error("a listener that fails harms nobody");
    });
    own.onCallEnded(({ invocation_id }) => told.push(invocation_id));
    const refusal = new Fault("conflict", "no");
    const works = Array.from({ length: 30 }, (_, i) =>
      own.write(async (tx) => {
        tx.ended({ ...END, invocation_id: `inv_${i}` });
        await addAgent(tx, `agt_${i}`);
        if (i % 3 === 0) throw refusal;
        return told.includes(`inv_${i}`);
      }),
    );
    const settled = await Promise.allSettled(works);
    const stored = settled.flatMap(({ status }, i) => (status === "fulfilled" ? [`inv_${i}`] : []));
    expect(stored).toHaveLength(20);
    expect(told.toSorted()).toEqual(stored.toSorted());
    expect(settled.some((each) => each.status === "fulfilled" && each.value)).toBe(false);
    await own.close();
  });

  test("a work reads what it writes", async () => {
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

  test("a second live agent of the same name is a UniqueViolation, one of a deleted agent's name is not", async () => {
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
    const refused = [await add({}), await add({ id: "agt_2", protocol: "smtp" }), await add({ created_by: null })];
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

  test("a lock holds the others back until the work has ended", async () => {
    await cleared();
    await store.write(({ db, tables }) =>
      db.insert(tables.processes).values({ id: "rep", kind: "gateway", lease_until: 0 }),
    );
    await Promise.all(
      Array.from({ length: 40 }, () =>
        store.write(async ({ db, tables: { processes }, lock }) => {
          await lock("the counter");
          const [row] = await db.select().from(processes);
          await db.update(processes).set({ lease_until: (row?.lease_until ?? 0) + 1 });
        }),
      ),
    );
    expect(await store.read.db.select().from(store.read.tables.processes)).toMatchObject([
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
        const run = crypto.randomUUID();
        const expected = new Map<string, number>();
        for (const group of groups) {
          const writes = group.map(({ changes, fails }) =>
            store.write(async (tx) => {
              for (const { tenant, value, delta } of changes) tx.count(run + tenant, "model", value, delta);
              if (fails) throw new Fault("conflict", "no");
            }),
          );
          await Promise.allSettled(writes);
          for (const { tenant, value, delta } of group.flatMap((w) => (w.fails ? [] : w.changes))) {
            const key = JSON.stringify([run + tenant, value]);
            expected.set(key, (expected.get(key) ?? 0) + delta);
          }
        }
        for (const [key, total] of expected) {
          const [tenant, value] = JSON.parse(key);
          expect(await endedTotal(store.read, tenant, "model", value)).toBe(total);
        }
        expect(await endedTotal(store.read, "nobody", "all", "")).toBe(0);
      }),
      { numRuns: 25 },
    );
  });

  test("values come back as they were written", async () => {
    await cleared();
    const texts = ['{"a": 1,\t"b":"\\u0000"}', "\u{1F600} ä \\ ' \" %_", "", "x".repeat(100_000)];
    const big = Buffer.alloc(32 * 1024 * 1024, "0123456789abcdef\u0000\u00ff");
    const blobs = [Buffer.alloc(0), Buffer.from([0, 255, 92, 120]), big, null];
    for (const [i, request] of blobs.entries()) {
      const row = { ...OPEN_CALL, id: `inv_${i}`, call: texts[i] ?? "", request };
      await store.write(({ db, tables }) => db.insert(tables.openInvocations).values(row));
      const [back] = await store.read.db
        .select()
        .from(store.read.tables.openInvocations)
        .where(eq(store.read.tables.openInvocations.id, row.id));
      expect(back?.call).toBe(row.call);
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
  });

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
      const { openInvocations: t } = tx.tables;
      return tx.db
        .insert(t)
        .values({ ...OPEN_CALL, id: "inv", request: bind(t.request, "request"), model: bind(t.model, "model") })
        .returning({ request: t.request, model: t.model });
    });
    const returned = store.write((tx) => bodies(tx).execute({ request: Buffer.from("ab"), model: null }));
    expect(await returned).toEqual([{ request: Buffer.from("ab"), model: null }]);
  });

  test("the query builders of the port mean the same on both databases", async () => {
    await cleared();
    await store.write(async ({ db, tables: { agents, processes } }) => {
      const row = { id: "rep_1", kind: "gateway", lease_until: 1 } as const;
      expect(await db.insert(processes).values(row).onConflictDoNothing().returning()).toMatchObject([row]);
      expect(await db.insert(processes).values(row).onConflictDoNothing().returning()).toEqual([]);
      await db
        .insert(processes)
        .values({ id: "rep_1", kind: "gateway", lease_until: 5 })
        .onConflictDoUpdate({
          target: processes.id,
          set: { lease_until: sql`${processes.lease_until} + excluded.lease_until` },
        });
      expect(await db.select().from(processes)).toMatchObject([{ id: "rep_1", lease_until: 6 }]);
      const guarded = (from: number[]) =>
        db
          .update(processes)
          .set({ lease_until: 7 })
          .where(and(eq(processes.id, "rep_1"), inArray(processes.lease_until, from)))
          .returning({ until: processes.lease_until });
      expect(await guarded([1, 2])).toEqual([]);
      expect(await guarded([5, 6])).toEqual([{ until: 7 }]);
      expect(await db.delete(processes).where(eq(processes.id, "rep_1")).returning()).toMatchObject([
        { id: "rep_1", lease_until: 7 },
      ]);
      for (const name of ["Straße", "alpha_1", "ALPHAX1", "beta"])
        await db.insert(agents).values(agent(`agt_${name}`, name));
      const names = async (query: PromiseLike<{ name: string }[]>) => (await query).map((each) => each.name);
      const named = () => db.select({ name: agents.name }).from(agents).$dynamic();
      // Byte order, whatever the locale of the database; lower() folds ASCII only.
      expect(await names(named().orderBy(asc(agents.name)))).toEqual(["ALPHAX1", "Straße", "alpha_1", "beta"]);
      expect(await names(named().orderBy(desc(agents.id)).limit(2).offset(1))).toEqual(["alpha_1", "Straße"]);
      const contains = (text: string) => sql`lower(${agents.name}) like ${`%${text}%`} escape '\\'`;
      expect((await names(named().where(contains("alpha")))).sort()).toEqual(["ALPHAX1", "alpha_1"]);
      expect(await names(named().where(contains("alpha\\_")))).toEqual(["alpha_1"]);
      expect(await db.select({ n: count() }).from(agents)).toEqual([{ n: 4 }]);
      const protocols = await db.selectDistinct({ protocol: agents.protocol }).from(agents);
      expect(protocols).toEqual([{ protocol: "http" }]);
    });
  });

  test("the probe writes, and tells in time", async () => {
    await store.probe(2_000);
  });

  test("a closed store refuses more, after it has stored what waited", async () => {
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

  test("a schema of a newer program is refused, unless that says that this one may run on it", async () => {
    const newer = await makePlace();
    await (await newer.open()).close();
    const opened = async (log?: Log) => newer.open(log).catch((error) => error);
    await newer.execute("insert into schema_versions (version, applied_at, floor) values (999, 0, 999)");
    const refused = await opened();
    expect(refused).toBeInstanceOf(StartupProblem);
    expect(refused.message).toMatch(/version 999, on which only programs that know version 999 .*newer tollgate/s);
    await newer.execute(`update schema_versions set floor = ${newestVersion() + 1} where version = 999`);
    expect((await opened()).message).toContain(`know version ${newestVersion() + 1} may run, and this program knows`);

    await newer.execute(`update schema_versions set floor = ${newestVersion()} where version = 999`);
    const warnings: unknown[] = [];
    const log: Log = { ...silentLog, warn: (...line) => void warnings.push(line) };
    const serving: Store = await opened(log);
    await serving.write((tx) => addAgent(tx, "agt_1"));
    expect(await agentIds(serving)).toEqual(["agt_1"]);
    await serving.close();
    const versions = { schema_version: 999, known_version: newestVersion() };
    expect(warnings).toContainEqual(["database_is_newer", expect.objectContaining(versions)]);
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
      const own = dialect === "sqlite" ? (ON_SQLITE[name] ?? []) : [];
      expect(found.map((row) => row.name).sort()).toEqual([...Object.keys(getTableColumns(table)), ...own].sort());
    }
  });
});

/** A column that the schema does not have, for an index. */
const ON_SQLITE: Readonly<Record<string, string[]>> = { open_invocations: ["batch"] };
