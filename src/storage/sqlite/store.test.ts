import { Database } from "bun:sqlite";
import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { chmodSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import { count, sql } from "drizzle-orm";
import { outcome, sqlitePlace } from "../../../test/support/stores/stores.ts";
import { until } from "../../../test/support/until.ts";
import { ActingRequest, actFor } from "../../kernel/wait.ts";
import { acquireDataDirLock } from "../data-dir.ts";
import type { Store, Tx } from "../store.ts";

describe("on SQLite alone", () => {
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
      db.insert(tables.invocationBodies).values({ tenant: "t", invocation_id: id, request: Buffer.alloc(bytes, 1) }),
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

  test("the probe changes the database, since what stays as it was is not written", async () => {
    using other = new Database(join(place.dir, "tollgate.db"));
    using changes = other.prepare<{ data_version: number }, []>("pragma data_version");
    const seen = [changes.get()?.data_version];
    for (let i = 0; i < 2; i += 1) {
      await store.probe(2_000);
      seen.push(changes.get()?.data_version);
    }
    expect(new Set(seen).size).toBe(3);
  });

  test("writes wait while another process holds the lock, and the event loop runs on", async () => {
    const other = new Database(join(place.dir, "tollgate.db"));
    other.run("begin immediate");
    const write = addBody("inv_1", 10);
    /** The part of a while in which the event loop did not turn. */
    const blocked = async () => {
      const began = performance.now();
      let ms = 0;
      for (let last = began; last - began < 300; last = performance.now()) {
        await Bun.sleep(1);
        ms += Math.max(performance.now() - last - 10, 0);
      }
      return ms / (performance.now() - began);
    };
    const turns = (async () => {
      let least = 1;
      // On a busy machine others may hold it up for a while.
      for (let looks = 0; looks < 8 && least >= 1 / 3; looks++) least = Math.min(least, await blocked());
      return least;
    })();
    expect(await Promise.race([write.then(() => "written"), turns])).toBeLessThan(1 / 3);
    other.run("commit");
    other.close();
    await write;
    expect(await bodyIds()).toEqual(["inv_1"]);
  });

  test("while another process holds the lock, all writes of a request wait no longer than it may, and none is made later", async () => {
    const other = new Database(join(place.dir, "tollgate.db"));
    other.run("begin immediate");
    const request = new ActingRequest("acme", 1_000);
    const begun = performance.now();
    const refused = await actFor(request, async () => {
      const first = await outcome(addBody("inv_1", 10));
      return [first, await outcome(addBody("inv_2", 10))];
    });
    // Without the bound, each of them is refused after the 4 s for which another process may hold the lock.
    expect(performance.now() - begun).toBeLessThan(3_000);
    expect(refused).toEqual(["unavailable", "unavailable"]);
    request.liftBound();
    const paid = actFor(request, () => addBody("inv_3", 10));
    other.run("commit");
    other.close();
    await paid;
    expect(await bodyIds()).toEqual(["inv_3"]);
  });

  test("where the lock of another process comes and goes, what waits behind many writes is told in time too", async () => {
    const other = new Database(join(place.dir, "tollgate.db"));
    let isOver = false;
    const pulses = (async () => {
      while (!isOver) {
        // A group may be under way.
        await until(async () => (await outcome((async () => other.run("begin immediate"))())) === "stored");
        await Bun.sleep(3_000);
        other.run("commit");
        // For a group or two, each of one of the bodies.
        await Bun.sleep(20);
      }
    })();
    // More than another process may hold the lock at a time.
    const waitMsMax = 4_100;
    const told = Array.from({ length: 40 }, async (_, i) => {
      const begun = performance.now();
      const told = await actFor(new ActingRequest("acme", waitMsMax), () => outcome(addBody(`inv_${i}`, 900_000)));
      return { told, ms: performance.now() - begun };
    });
    const answers = await Promise.all(told);
    isOver = true;
    await pulses;
    other.close();
    expect(answers.filter(({ ms }) => ms > waitMsMax + 1_200)).toEqual([]);
    expect(new Set(answers.map((answer) => answer.told))).toEqual(new Set(["stored", "unavailable"]));
    const stored = answers.filter((answer) => answer.told === "stored").length;
    expect(await bodyIds()).toHaveLength(stored);
  });

  test("a log that has been large once is moved each second again, and not at every look at it", async () => {
    const file = join(place.dir, "tollgate.db");
    const logBytes = () => statSync(`${file}-wal`).size;
    let written = 0;
    const write = (bytes: number) => addBody(`inv_${written++}`, bytes);
    while (logBytes() < 110 * 1024 * 1024) await write(8 * 1024 * 1024);
    // It starts anew, and is cut.
    for (let most = logBytes(); logBytes() >= most; most = Math.max(most, logBytes())) {
      await write(10);
      await Bun.sleep(1);
    }
    const changes = new Set<number>();
    const begun = performance.now();
    const seconds = () => (performance.now() - begun) / 1000;
    while (seconds() < 2) {
      await write(10);
      changes.add(statSync(file).mtimeMs);
      await Bun.sleep(1);
    }
    // Each move may be seen at its beginning and at its end.
    expect(changes.size).toBeLessThan(2 * seconds() + 4);
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
    const { db, tables } = store.read as unknown as Tx;
    expect(
      db.insert(tables.processes).values({ id: "rep", kind: "gateway", lease_until: 0 }).execute(),
    ).rejects.toThrow(/readonly/);
  });

  test("the dispatcher's queries walk an index, whatever is in the table", async () => {
    const { db } = store.read as unknown as Tx;
    const plan = async (where: string) => {
      const rows = (await db.all(sql.raw(`explain query plan select * from open_invocations where ${where}`))) as {
        detail: string;
      }[];
      return rows.map((row) => row.detail).join("; ");
    };
    const due = "status = 'pending' and coalesce(settlement_status, '') <> 'pending'";
    expect(await plan(`agent_id = 'a' and mode = 'transactional' and ${due} order by id`)).toBe(
      "SEARCH open_invocations USING INDEX open_invocations_pending (agent_id=?)",
    );
    expect(await plan(`updated_at < 1 and mode = 'streaming' and ${due} order by updated_at`)).toBe(
      "SEARCH open_invocations USING INDEX open_invocations_unclaimed (updated_at<?)",
    );
    expect(await plan("owner = 'r' and status = 'running'")).toBe(
      "SEARCH open_invocations USING INDEX open_invocations_running (owner=?)",
    );
  });

  test("processes that open a new database at once agree on one schema", async () => {
    const fresh = sqlitePlace();
    const script = `
      import { openStore } from ${JSON.stringify(join(import.meta.dir, "../open.ts"))};
      import { silentLog } from ${JSON.stringify(join(import.meta.dir, "../../core/log.ts"))};
      console.log("ready");
      await Bun.stdin.text();
      const options = { databaseUrl: null, dataDir: ${JSON.stringify(fresh.dir)}, log: silentLog, clock: { now: () => 0 } };
      const store = await openStore(options);
      await store.write(({ db, tables }) => db.insert(tables.processes).values({ id: process.argv[1], kind: "gateway", lease_until: 0 }));
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
    expect(await opened.read.db.select({ n: count() }).from(opened.read.tables.processes)).toEqual([{ n: 6 }]);
    await opened.close();
    fresh.remove();
  });

  test("a data directory has one gateway, until that one has gone", async () => {
    const script = `
      import { acquireDataDirLock } from ${JSON.stringify(join(import.meta.dir, "../data-dir.ts"))};
      // Kept, or it could be collected and closed with all that it holds.
      globalThis.lock = acquireDataDirLock(${JSON.stringify(place.dir)});
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
