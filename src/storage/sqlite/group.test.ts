import { Database } from "bun:sqlite";
import { afterEach, beforeEach, expect, test } from "bun:test";
import { sql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/bun-sqlite";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { Fault } from "../../core/fault.ts";
import { silentLog } from "../../core/log.ts";
import { actFor } from "../../kernel/wait.ts";
import { migrateSqlite } from "../migrate.ts";
import { type Command, type Queries, type Tx, UniqueViolation } from "../store.ts";
import { createGroupCommit, type GroupCommit } from "./group.ts";

let writer: Database;
let group: GroupCommit;

beforeEach(() => {
  writer = new Database(":memory:");
  migrateSqlite(writer, { clock: { now: () => 0 }, log: silentLog });
  writer.run("pragma foreign_keys = on");
  // A reference that is checked at the commit only: the way to make a commit fail.
  writer.run("create table part (whole integer references whole (id) deferrable initially deferred)");
  writer.run("create table whole (id integer primary key)");
  const db = drizzle(writer) as unknown as Queries;
  // What is asked for together is one group, however busy the machine is.
  const groupMs = 60_000;
  group = createGroupCommit({
    writer,
    db,
    tables: defineSchema(columns.sqlite),
    now: sql<number>`0`,
    log: silentLog,
    ended: () => {},
    groupMs,
  });
});

afterEach(async () => {
  await group.close();
  writer.close();
});

const add = (id: string) => async (tx: Tx) => {
  await tx.db.insert(tx.tables.processes).values({ id, kind: "gateway", lease_until: 0 });
  tx.count("t", "all", "", 1);
  return id;
};
const replicas = () => writer.query("select id from processes order by id").values().flat();
const total = () => writer.query("select count from invocation_counts").values().flat();
const settled = async (works: Promise<unknown>[]) =>
  (await Promise.allSettled(works)).map((each) => (each.status === "fulfilled" ? each.value : each.reason));

interface Stored {
  readonly id: string;
  readonly tenant?: string;
  readonly bytes?: number;
}

const store: Command<Stored, void> = {
  name: "store",
  tenantOf: ({ tenant = "t" }) => tenant,
  bytesOf: ({ bytes = 1 }) => bytes,
  sqlite(prepare) {
    const insert = prepare("insert into processes (id, kind, lease_until) values (?, 'gateway', 0)");
    return ({ id }) => void insert.run(id);
  },
  postgres: { text: "", valuesOf: () => [], outputsOf: () => [] },
};

/** A group of its own that counts its commits. */
function countingGroup(groupMs: number) {
  let begun = 0;
  const begin = writer.prepare.bind(writer);
  writer.prepare = ((text: string) => {
    const statement = begin(text);
    if (text === "begin immediate") {
      const run = statement.run.bind(statement);
      statement.run = (...values) => {
        begun += 1;
        return run(...values);
      };
    }
    return statement;
  }) as typeof writer.prepare;
  const db = drizzle(writer) as unknown as Queries;
  const tables = defineSchema(columns.sqlite);
  const counting = createGroupCommit({
    writer,
    db,
    tables,
    now: sql<number>`0`,
    log: silentLog,
    ended: () => {},
    groupMs,
  });
  return { counting, begun: () => begun };
}

test("commands of more than a mebibyte together do not share a commit, however many come at once", async () => {
  const { counting, begun } = countingGroup(60_000);
  const sizes = [2 ** 21, 2 ** 19, 2 ** 19, 1, 2 ** 19, 2 ** 25, ...Array.from({ length: 400 }, () => 1)];
  await Promise.all(sizes.map((bytes, i) => counting.execute(store, { id: `c${1000 + i}`, bytes })));
  expect(replicas()).toEqual(sizes.map((_, i) => `c${1000 + i}`));
  // The first alone, two halves, the next two, the largest alone, and all others.
  expect(begun()).toBe(5);
});

test("the same holds for writes that say how much they carry", async () => {
  const { counting, begun } = countingGroup(60_000);
  const sizes = [2 ** 20, 2 ** 20, 2 ** 19, 2 ** 19, 1];
  await Promise.all(sizes.map((bytes, i) => counting.write(add(`w${i}`), { bytes })));
  expect(replicas()).toEqual(sizes.map((_, i) => `w${i}`));
  // Each of the first two alone, two halves, and the last one.
  expect(begun()).toBe(4);
});

const MEBIBYTE = 2 ** 20;

test("a small write waits for one large one, however many were there before, and the large ones come on too", async () => {
  const order: string[] = [];
  const write = (id: string, bytes = 0) => group.write(add(id), { bytes }).then((done) => order.push(done));
  const large = Array.from({ length: 20 }, (_, i) => write(`large${i}`, MEBIBYTE));
  for (let i = 0; i < 10; i++) await write(`small${i}`);
  expect(order.filter((id) => id.startsWith("large")).length).toBeWithin(4, 12);
  await Promise.all(large);
  expect(order.filter((id) => id.startsWith("large"))).toEqual(Array.from({ length: 20 }, (_, i) => `large${i}`));
});

test("a large write that fails is refused alone, among small ones and large ones", async () => {
  const own = new Fault("conflict", "no");
  const refuse = async (tx: Tx) => {
    await add("rep_x")(tx);
    throw own;
  };
  const works = Array.from({ length: 12 }, (_, i) => [
    group.write(add(`s${i}`)),
    group.write<unknown>(i % 3 === 1 ? refuse : add(`l${i}`), { bytes: MEBIBYTE }),
  ]);
  const expected = Array.from({ length: 12 }, (_, i) => [`s${i}`, i % 3 === 1 ? own : `l${i}`]);
  expect(await settled(works.flat())).toEqual(expected.flat());
  expect(total()).toEqual([20]);
});

test("writes of one turn of the event loop share a commit, and those that wait for them the next", async () => {
  const { counting, begun } = countingGroup(10);
  await Promise.all(
    Array.from({ length: 50 }, async (_, i) => {
      await counting.write(add(`a${i}`));
      await counting.write(add(`b${i}`));
    }),
  );
  // Two, unless the machine is so busy that a group runs out of time.
  expect(begun()).toBeLessThan(20);
  expect(total()).toEqual([100]);
});

test("what a tenant's requests make fail is undone alone, and the commit of all others is neither undone nor made again", async () => {
  const { counting, begun } = countingGroup(60_000);
  const ran: string[] = [];
  const noted = (id: string) => (tx: Tx) => {
    ran.push(id);
    return add(id)(tx);
  };
  const works: Promise<unknown>[] = [];
  for (let i = 0; i < 5; i++) {
    works.push(counting.write(noted(`n${i}`)), counting.execute(store, { id: `c${i}` }));
    // A name that is in use.
    works.push(actFor("hostile", () => counting.write(noted("n0"))));
  }
  const outcomes = await settled(works);
  for (let i = 0; i < 5; i++) {
    expect(outcomes[3 * i]).toBe(`n${i}`);
    expect(outcomes[3 * i + 2]).toBeInstanceOf(UniqueViolation);
  }
  expect(ran.toSorted()).toEqual([...Array(6).fill("n0"), "n1", "n2", "n3", "n4"]);
  expect(replicas()).toHaveLength(10);
  expect([begun(), ...total()]).toEqual([1, 5]);
});

test("a commit that fails refuses every write of its group, those that failed by themselves too", async () => {
  const own = new Fault("conflict", "no");
  const orphan = (tx: Tx) => tx.db.run(sql`insert into part values (1)`) as Promise<unknown>;
  const refuse = async (tx: Tx) => {
    await add("rep_2")(tx);
    throw own;
  };
  const outcomes = await settled([group.write(add("rep_1")), group.write(orphan), group.write(refuse)]);
  for (const each of outcomes) expect(each).toMatchObject({ kind: "unavailable", retryAfterSeconds: 5 });
  expect(writer.inTransaction).toBe(false);
  expect(await settled([group.write(add("rep_3")), group.write(refuse)])).toEqual(["rep_3", own]);
  expect(replicas()).toEqual(["rep_3"]);
  expect(total()).toEqual([1]);
});

test("when one write makes SQLite undo the whole group, the others are done all the same", async () => {
  const undoing = async (tx: Tx) => {
    await add("rep_x")(tx);
    await tx.db.run(sql`rollback`);
    throw new Fault("unavailable", "disk");
  };
  const works = [add("rep_1"), undoing, add("rep_2"), undoing, add("rep_3")];
  const outcomes = await settled(works.map((work) => group.write<unknown>(work)));
  expect(outcomes.map((each) => (each instanceof Fault ? each.kind : each))).toEqual([
    "rep_1",
    "unavailable",
    "rep_2",
    "unavailable",
    "rep_3",
  ]);
  expect(replicas()).toEqual(["rep_1", "rep_2", "rep_3"]);
  expect(total()).toEqual([3]);
});

test("no write is answered before the commit", async () => {
  const seen: boolean[] = [];
  const note = () => seen.push(writer.inTransaction);
  const fails = group.write(async () => {
    throw new Error("no");
  });
  await Promise.all([group.write(add("rep_1")).then(note), fails.catch(note), group.write(add("rep_2")).then(note)]);
  expect(seen).toEqual([false, false, false]);
});

test("many writes are done in several groups, and the event loop turns between them", async () => {
  let turns = 0;
  let done = false;
  const turn = () => {
    turns += 1;
    if (!done) setImmediate(turn);
  };
  setImmediate(turn);
  await Promise.all(Array.from({ length: 3_000 }, (_, i) => group.write(add(`rep_${i}`))));
  done = true;
  expect(turns).toBeGreaterThanOrEqual(3_000 / 512);
  expect(total()).toEqual([3_000]);
});

test("one tenant has seven eighths of those that may wait, is refused itself at once beyond, and then has them again", async () => {
  const write = (tenant: string, id: string) => group.execute(store, { tenant, id }).then(() => "done");
  for (const round of [1, 2]) {
    const works = Array.from({ length: 17_501 }, (_, i) => write("hostile", `${round} ${i}`));
    works.push(
      write("neighbour", `${round} neighbour`),
      group.write(async () => "done"),
    );
    const outcomes = await settled(works);
    expect(outcomes.filter((each) => each === "done")).toHaveLength(17_502);
    expect(outcomes[17_500]).toMatchObject({ kind: "unavailable" });
  }
});

/** Of so many that one tenant has handed in at once, how many are stored while another one waits for its first. */
async function behindHostile({ execute }: Pick<GroupCommit, "execute">, count: number, bytes: number) {
  const order: string[] = [];
  const write = (tenant: string, id: string) => execute(store, { tenant, id, bytes }).then(() => void order.push(id));
  const hostile = Array.from({ length: count }, (_, i) => write("hostile", `h${i}`));
  await hostile[0];
  const before = order.length;
  await write("neighbour", "neighbour");
  const waited = order.indexOf("neighbour") - before;
  await Promise.all(hostile);
  const own = order.filter((id) => id !== "neighbour");
  expect(own).toEqual(Array.from({ length: count }, (_, i) => `h${i}`));
  return waited;
}

test("behind thousands of another tenant one is in the next group", async () => {
  expect(await behindHostile(group, 3_000, 1)).toBeLessThanOrEqual(2 * 512);
});

test("the same where a group ends for its time, and what it has not come to is put back", async () => {
  // After each work of a group its time is over.
  expect(await behindHostile(countingGroup(-1).counting, 300, 1)).toBeLessThanOrEqual(4);
});

test("the same among large works, of which each is a group", async () => {
  expect(await behindHostile(group, 40, MEBIBYTE)).toBeLessThanOrEqual(4);
});

test("closures do not wait for the commands of a thousand tenants, nor a command for thousands of closures", async () => {
  const stored: Record<"commands" | "closures", number> = { commands: 0, closures: 0 };
  const each = (count: number, kind: keyof typeof stored, write: (i: number) => Promise<unknown>) =>
    Array.from({ length: count }, (_, i) => write(i).then(() => stored[kind]++));
  const commands = (name: string, count: number, tenants: number) =>
    each(count, "commands", (i) => group.execute(store, { tenant: `t${i % tenants}`, id: `${name} ${i}` }));
  const closures = (name: string, count: number) => each(count, "closures", (i) => group.write(add(`${name} ${i}`)));

  const busy = commands("busy", 3_000, 1_000);
  await Promise.all(closures("few", 20));
  expect(stored.commands).toBeLessThanOrEqual(2 * 512);
  await Promise.all(busy);
  stored.closures = 0;
  const many = closures("many", 3_000);
  await Promise.all(commands("own", 20, 1));
  expect(stored.closures).toBeLessThanOrEqual(2 * 512);
  await Promise.all(many);
});

test("a command is written while there are always closures and large works, of which each is all that a group has time for", async () => {
  const { counting } = countingGroup(-1);
  let isOver = false;
  let others = 0;
  const go = async (name: string, bytes = 0) => {
    for (let i = 0; !isOver && others < 200; i++) {
      await counting.write(add(`${name} ${i}`), { bytes });
      others++;
    }
  };
  const busy = [go("a"), go("b"), go("large", MEBIBYTE), go("larger", MEBIBYTE)];
  await Promise.all(Array.from({ length: 4 }, (_, i) => counting.execute(store, { id: `own ${i}` })));
  isOver = true;
  expect(others).toBeLessThan(40);
  await Promise.all(busy);
});

test("when no group can begin, the thousands that wait are refused few in a turn of the event loop", async () => {
  const prepare = writer.prepare.bind(writer);
  const fails = () => {
    throw new Error("the disk is gone");
  };
  writer.prepare = ((text: string) => {
    const statement = prepare(text);
    if (text === "begin immediate") statement.run = fails;
    return statement;
  }) as typeof writer.prepare;
  const { counting } = countingGroup(10);
  let refused = 0;
  for (let i = 0; i < 5_000; i++) counting.execute(store, { id: `r${i}` }).catch(() => refused++);
  let most = 0;
  for (let before = 0; refused < 5_000; before = refused) {
    await new Promise(setImmediate);
    most = Math.max(most, refused - before);
  }
  expect(most).toBeLessThanOrEqual(512);
});
