import { describe, expect, test } from "bun:test";
import { SQL } from "bun";
import { eq, sql } from "drizzle-orm";
import { oneOf } from "../../../db/schema.ts";
import { startRelay } from "../../../test/support/http/relay.ts";
import { startPostgres } from "../../../test/support/stores/postgres.ts";
import { addAgent, agentIds, clock, outcome, postgresPlace, shown } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import { StartupProblem } from "../../core/startup.ts";
import { agentLookUp } from "../../gateway/agents/store.ts";
import { ActingRequest, actFor, outlastRequest } from "../../kernel/wait.ts";
import { untilStored } from "../failures.ts";
import { renewProcess } from "../leases.ts";
import { type Tx, UniqueViolation } from "../store.ts";
import { postgresQueries, postgresTables } from "./pool.ts";
import { openPostgres } from "./store.ts";

describe("on Postgres alone", () => {
  /** A store whose server the test can take away. */
  async function behindRelay(callMsMax?: number) {
    const direct = await (await startPostgres()).freshDatabase();
    const url = new URL(direct);
    const relay = startRelay(Number(url.port));
    url.port = `${relay.port}`;
    const store = await openPostgres({
      databaseUrl: url.href,
      clock,
      log: silentLog,
      ...(callMsMax === undefined ? {} : { callMsMax }),
    });
    const add = (id: string) => outcome(store.write((tx) => addAgent(tx, id)));
    const close = async () => {
      await store.close();
      relay.stop();
    };
    return { relay, store, add, close, direct };
  }

  test("all text compares byte by byte, as on SQLite, whatever the locale of the database", async () => {
    const databaseUrl = await (await startPostgres()).emptyDatabase();
    await (await openPostgres({ databaseUrl, clock, log: silentLog })).close();
    await using client = new SQL(databaseUrl);
    const others = await client`
      select table_name, column_name from information_schema.columns
      where table_schema = current_schema() and data_type = 'text' and collation_name is distinct from 'C'`;
    expect([...others]).toEqual([]);
  });

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

  test("a server that has gone is unavailable, and is used again by itself when it is back", async () => {
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
    void relay.stall();
    const calls = Array.from({ length: 40 }, (_, i) => add(`1${i}`));
    const began = performance.now();
    expect(new Set(await Promise.all([...calls, outcome(agentIds(store))]))).toEqual(new Set(["unavailable"]));
    // Less than if each waited for the one before it, or for the limit of a connection.
    expect(performance.now() - began).toBeLessThan(5_000);
    relay.restore();
    expect(await add("2")).toBe("stored");
    expect(await agentIds(store)).toEqual(["0", "2"]);
    await close();
  });

  test("a server that answers late again and again holds up a request no longer than one that is away", async () => {
    const waitMsMax = 3_000;
    const { store, add, close } = await behindRelay();
    expect(await add("0")).toBe("stored");
    const slowly = (seconds: number) => sql<string>`pg_sleep(${sql.raw(`${seconds}`)})::text`;
    const { db } = store.read;
    const read = () => outcome(db.select({ slept: slowly(1.2) }).from(sql`(values (1)) as one`));
    const write = () =>
      outcome(store.write((tx) => tx.db.select({ slept: slowly(1.2) }).from(sql`(values (1)) as one`)));
    const lookUp = () => outcome(store.execute(agentLookUp, { tenant: "acme", id: "0" }));
    const request = new ActingRequest("acme", waitMsMax);
    await actFor(request, async () => {
      const began = performance.now();
      // At the same time, so their time counts once.
      expect(await Promise.all([read(), write(), read()])).not.toContain("unavailable");
      expect(await write()).not.toBe("unavailable");
      expect(await read()).toBe("unavailable");
      expect([await read(), await add("1"), await lookUp()]).toEqual(Array(3).fill("unavailable"));
      let tries = 0;
      const trying = untilStored(
        () => {
          tries++;
          return store.write((tx) => addAgent(tx, "1"));
        },
        () => false,
      );
      expect([await outcome(trying), tries]).toEqual(["unavailable", 1]);
      expect(performance.now() - began).toBeLessThan(waitMsMax + 1_200);
      expect(await outlastRequest(() => add("2"))).toBe("stored");
      request.liftBound();
      expect(await read()).not.toBe("unavailable");
      expect([await add("3"), await lookUp()]).toEqual(["stored", expect.anything()]);
    });
    expect(await agentIds(store)).toEqual(["0", "2", "3"]);
    await close();
  });

  test("a server that has become read-only is not read from either: what is written may be elsewhere by now", async () => {
    const { relay, store, add, close, direct } = await behindRelay();
    expect(await add("1")).toBe("stored");
    const database = new URL(direct).pathname.slice(1);
    await using operator = new SQL(direct, { max: 1, database });
    await operator.unsafe(`alter database ${database} set default_transaction_read_only = on`);
    relay.cut();
    expect(await outcome(agentIds(store))).toBe("unavailable");
    await operator.unsafe(`alter database ${database} reset default_transaction_read_only`);
    expect(await agentIds(store)).toEqual(["1"]);
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

  test("a lease is renewed while all other writes wait for a lock of somebody else", async () => {
    const place = await postgresPlace();
    const store = await place.open();
    await using client = new SQL(place.url, { max: 1 });
    const somebody = await client.reserve();
    await somebody.unsafe("begin; lock table agents in share mode");
    let isLocked = true;
    const waiting = Array.from({ length: 40 }, async (_, i) => {
      const came = await outcome(store.write((tx) => addAgent(tx, `${i}`)));
      return isLocked ? "not held up" : came;
    });
    const renew = (tx: Tx) => renewProcess(tx, { id: "rep_1", kind: "gateway" });
    expect(await store.write(renew, { urgent: true })).toBeGreaterThan(0);
    isLocked = false;
    await somebody.unsafe("rollback");
    somebody.release();
    expect(new Set(await Promise.all(waiting))).toEqual(new Set(["stored"]));
    await store.close();
  });

  test("of two works in a deadlock both are done", async () => {
    const place = await postgresPlace();
    const store = await place.open();
    await store.write(async ({ db, tables }) => {
      for (const id of ["a", "b"]) await db.insert(tables.processes).values({ id, kind: "gateway", lease_until: 0 });
    });
    const bothHoldOne = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    const cross = (ids: string[], mine: number) =>
      store.write(async ({ db, tables: { processes } }) => {
        for (const id of ids) {
          await db
            .update(processes)
            .set({ lease_until: sql`${processes.lease_until} + 1` })
            .where(eq(processes.id, id));
          bothHoldOne[mine]?.resolve();
          await bothHoldOne[1 - mine]?.promise;
        }
      });
    await Promise.all([cross(["a", "b"], 0), cross(["b", "a"], 1)]);
    const rows = await store.read.db.select().from(store.read.tables.processes).orderBy(store.read.tables.processes.id);
    expect(rows.map((row) => row.lease_until)).toEqual([2, 2]);
    await store.close();
  });

  test("a text with U+0000, which Postgres cannot hold, is the caller's fault", async () => {
    const place = await postgresPlace();
    const store = await place.open();
    expect(await outcome(store.write((tx) => addAgent(tx, "agt_1", "a\u0000b")))).toBe("invalid_request");
    await store.close();
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

  test("an error repeats no value, though the server's message does", async () => {
    const place = await postgresPlace();
    const store = await place.open();
    const secret = "sk-live-4242";
    const error = await store
      .write(({ db }) =>
        db
          .select({ wrong: sql`${secret}::text::bigint` })
          .from(sql`(values (1)) as one`)
          .limit(1)
          .execute(),
      )
      .catch((thrown) => thrown);
    expect(error).toBeInstanceOf(Error);
    expect(shown(error)).toContain("22P02");
    expect(shown(error)).not.toContain(secret);
    await store.close();
  });

  test("a server that is not there is named at the start, without the password", async () => {
    const databaseUrl = "postgres://tollgate:hunter2@127.0.0.1:1/x";
    const error = await openPostgres({ databaseUrl, clock, log: silentLog }).catch((thrown) => thrown);
    expect(error).toBeInstanceOf(StartupProblem);
    expect(error.message).toBe("the Postgres server of DATABASE_URL does not answer at 127.0.0.1:1");
    expect(shown(error)).not.toContain("hunter2");
  });

  test("a host name that does not exist is told as such, without the password", async () => {
    // A label of more than 63 characters, for which no name server is asked.
    const host = `${"a".repeat(64)}.invalid`;
    const databaseUrl = `postgres://tollgate:hunter2@${host}/x`;
    const error = await openPostgres({ databaseUrl, clock, log: silentLog }).catch((thrown) => thrown);
    expect(error).toBeInstanceOf(StartupProblem);
    expect(error.message).toBe(
      `the Postgres server of DATABASE_URL does not answer at ${host}:5432: the host name is not found`,
    );
    expect(shown(error)).not.toContain("hunter2");
  });

  test("a server that refuses is named at the start with its reason, without the password", async () => {
    const good = await (await startPostgres()).freshDatabase();
    const wrong = { password: "hunter2", pathname: "/nope", search: "?sslmode=require" };
    for (const [part, value] of Object.entries(wrong)) {
      const databaseUrl = Object.assign(new URL(good), { [part]: value }).href;
      const error = await openPostgres({ databaseUrl, clock, log: silentLog }).catch((thrown) => thrown);
      expect(error).toBeInstanceOf(StartupProblem);
      expect(error.message).toMatch(/^the Postgres server of DATABASE_URL refuses: \S/);
      expect(shown(error)).not.toContain("hunter2");
    }
  });
});

test("rows that are asked for by their IDs take few statements, however many they are", async () => {
  const texts = new Set<string>();
  const asked: unknown[][] = [];
  const db = postgresQueries(async (text, values) => {
    texts.add(text);
    asked.push([...values]);
    return [];
  });
  const { agents: t } = postgresTables;
  for (let many = 1; many <= 200; many++) {
    const ids = Array.from({ length: many }, (_, n) => `agt_${n}`);
    await db.select().from(t).where(oneOf(t.id, ids));
    expect(new Set(asked.at(-1))).toEqual(new Set(ids));
  }
  expect(texts.size).toBe(9);
});
