// How commands on Postgres come together, over a database that the test answers for.
import { expect, test } from "bun:test";
import { Fault } from "../../core/fault.ts";
import { unavailable } from "../failures.ts";
import { type Command, CommitUnknown } from "../store.ts";
import { type CommandGroup, createCommandBatches, createCommandLanes } from "./batches.ts";

interface Input {
  readonly name: string;
  readonly tenant?: string;
  readonly key?: string;
  readonly bytes?: number;
}

const named = (name: string) =>
  ({
    name,
    tenantOf: ({ tenant = "t" }) => tenant,
    bytesOf: ({ bytes = 1 }) => bytes,
    keyOf: ({ key = null }) => key,
  }) as unknown as Command<Input, string>;
const [first, second] = [named("first"), named("second")];

interface Run {
  readonly names: readonly string[];
  readonly until: number;
  /** Says that nothing but the commit is left. */
  committing(): void;
  answer(error?: unknown): void;
}

/** Batches whose runs wait for the test, which sees them in their order. */
function batchesByHand({ atOnce = 2, waitMsMax = 60_000 } = {}) {
  const runs: Run[] = [];
  let onRun = () => {};
  const batches = createCommandBatches({
    atOnce,
    waitMsMax,
    run(groups: readonly CommandGroup[], until: number, committing: () => void) {
      const names = groups.map(({ inputs }) => inputs.map((input) => (input as Input).name));
      return new Promise<unknown[][]>((resolve, reject) => {
        const answer = (error?: unknown) => (error === undefined ? resolve(names) : reject(error));
        runs.push({ names: names.flat(), until, committing, answer });
        onRun();
      });
    },
  });
  async function ran(number: number): Promise<Run> {
    while (runs.length <= number)
      await new Promise<void>((resolve) => {
        onRun = resolve;
      });
    return runs[number] as Run;
  }
  return { ...batches, runs, ran };
}

const kindOf = (promise: Promise<unknown>) =>
  promise.then(
    (value) => value,
    (error) => (error instanceof Fault ? error.kind : error),
  );

test("commands of one turn are one batch, each kind together, and each is told its own outcome", async () => {
  const { execute, ran } = batchesByHand();
  const all = [execute(second, { name: "a" }), execute(first, { name: "b" }), execute(second, { name: "c" })];
  const run = await ran(0);
  expect(run.names).toEqual(["b", "a", "c"]);
  run.answer();
  expect(await Promise.all(all)).toEqual(["a", "b", "c"]);
});

test("of two hundred the one that fails is told so, and the others are stored", async () => {
  const stored: string[] = [];
  let transactions = 0;
  const batches = createCommandBatches({
    atOnce: 2,
    waitMsMax: 60_000,
    async run(groups) {
      transactions++;
      const names = groups.map(({ inputs }) => inputs.map((input) => (input as Input).name));
      if (names.flat().includes("137")) throw new Error("poison");
      stored.push(...names.flat());
      return names;
    },
  });
  const all = Array.from({ length: 200 }, (_, i) => batches.execute(i % 3 ? first : second, { name: `${i}` }));
  const settled = await Promise.allSettled(all);
  settled.forEach((each, i) => {
    if (i === 137) expect(each).toMatchObject({ reason: { message: "poison" } });
    else expect(each).toEqual({ status: "fulfilled", value: `${i}` });
  });
  expect(new Set(stored).size).toBe(199);
  expect(stored).toHaveLength(199);
  expect(transactions).toBeLessThan(20);
});

test("a commit without an answer is unknown to all of its batch, and nothing of it is written again", async () => {
  const { execute, ran, runs } = batchesByHand();
  const all = ["a", "b", "c"].map((name) => execute(first, { name }));
  (await ran(0)).answer(new CommitUnknown(new Error("lost")));
  for (const each of await Promise.allSettled(all))
    expect(each.status === "rejected" && each.reason).toBeInstanceOf(CommitUnknown);
  expect(runs).toHaveLength(1);
});

test("commands of one key are written one after another in their order, whatever their kind", async () => {
  const { execute, ran, runs } = batchesByHand();
  const told: string[] = [];
  const all = [
    execute(second, { name: "a1", key: "a" }),
    execute(first, { name: "a2", key: "a" }),
    execute(second, { name: "a3", key: "a" }),
    execute(first, { name: "b", key: "b" }),
  ].map((each) => kindOf(each).then((name) => void told.push(name)));
  expect((await ran(0)).names).toEqual(["b", "a1"]);
  const other = execute(first, { name: "c" });
  expect((await ran(1)).names).toEqual(["c"]);
  runs[1]?.answer();
  await other;
  // Its turn has come and gone, and the first of the key is not written yet.
  await new Promise(setImmediate);
  expect(runs).toHaveLength(2);
  runs[0]?.answer();
  const third = await ran(2);
  expect(third.names).toEqual(["a2"]);
  // One that fails makes way for the next as well.
  third.answer(unavailable(new Error("away")));
  const fourth = await ran(3);
  expect(fourth.names).toEqual(["a3"]);
  fourth.answer();
  await Promise.all(all);
  expect(told).toEqual(["b", "a1", "unavailable", "a3"]);
});

test("what comes while one is at its statements is gathered until that one waits for the disk", async () => {
  const { execute, ran, runs } = batchesByHand();
  const all = [execute(first, { name: "a" })];
  const run = await ran(0);
  for (const name of ["b", "c"]) {
    all.push(execute(first, { name }));
    await new Promise(setImmediate);
  }
  expect(runs).toHaveLength(1);
  run.committing();
  expect((await ran(1)).names).toEqual(["b", "c"]);
  // There are two at once, and no more.
  all.push(execute(first, { name: "d" }));
  runs[1]?.committing();
  await new Promise(setImmediate);
  await new Promise(setImmediate);
  expect(runs).toHaveLength(2);
  runs[1]?.answer();
  expect((await ran(2)).names).toEqual(["d"]);
  for (const each of runs) each.answer();
  expect(await Promise.all(all)).toEqual(["a", "b", "c", "d"]);
});

test("one that does not come to its commit, since it waits for a lock, does not hold up the others for long", async () => {
  const { execute, ran, runs } = batchesByHand();
  const all = [execute(first, { name: "a" })];
  await ran(0);
  all.push(execute(first, { name: "b" }));
  expect((await ran(1)).names).toEqual(["b"]);
  for (const each of runs) each.answer();
  expect(await Promise.all(all)).toEqual(["a", "b"]);
});

test("however many have one key, the others do not wait, and the key of each is asked for once", async () => {
  let asked = 0;
  const counted: Command<Input, string> = {
    ...first,
    keyOf({ key = null }) {
      asked++;
      return key;
    },
  };
  const { execute, ran, close } = batchesByHand({ atOnce: 1 });
  const same = Array.from({ length: 1_000 }, (_, i) => kindOf(execute(counted, { name: `${i}`, key: "same" })));
  const others = Array.from({ length: 10 }, (_, i) => execute(counted, { name: `other ${i}` }));
  const run = await ran(0);
  expect(run.names).toEqual(["0", ...Array.from({ length: 10 }, (_, i) => `other ${i}`)]);
  run.answer();
  await Promise.all(others);
  for (let i = 1; i < 1_000; i++) (await ran(i)).answer();
  expect(await Promise.all(same)).toEqual(Array.from({ length: 1_000 }, (_, i) => `${i}`));
  expect(asked).toBe(1_010);
  await close();
});

test("one tenant has seven eighths of those that may wait, is refused itself at once beyond, and then has them again", async () => {
  const { execute, runs, close } = batchesByHand({ atOnce: 1 });
  const names = Array.from({ length: 17_500 }, (_, i) => `${i}`);
  for (let round = 0, i = 0; round < 2; round++) {
    // Those that wait for their key count too.
    const all = names.map((name, at) => kindOf(execute(first, { name, key: `${at % 10_000}` })));
    expect(await kindOf(execute(first, { name: "more" }))).toBe("unavailable");
    all.push(kindOf(execute(first, { tenant: "neighbour", name: "other" })));
    const answered = Promise.all(all);
    let isOver = false;
    void answered.then(() => {
      isOver = true;
    });
    for (; !isOver; await new Promise(setImmediate)) while (i < runs.length) runs[i++]?.answer();
    expect(await answered).toEqual([...names, "other"]);
  }
  await close();
});

test("a large command is written by itself", async () => {
  const { execute, ran } = batchesByHand();
  const all = [execute(first, { name: "large", bytes: 32 << 20 }), execute(first, { name: "small" })];
  expect((await ran(0)).names).toEqual(["large"]);
  (await ran(0)).answer();
  (await ran(1)).answer();
  expect(await Promise.all(all)).toEqual(["large", "small"]);
});

test("closing, twice too, waits for those that wait, and refuses more", async () => {
  const { execute, close, ran } = batchesByHand({ atOnce: 1 });
  const told: string[] = [];
  const all = ["a", "b"].map((name) => execute(first, { name, key: "k" }).then(() => told.push(name)));
  const closed = [close(), close()].map((each) => each.then(() => told.push("closed")));
  expect(await kindOf(execute(first, { name: "late" }))).toBe("unavailable");
  (await ran(0)).answer();
  (await ran(1)).answer();
  await Promise.all([...all, ...closed]);
  expect(told).toEqual(["a", "b", "closed", "closed"]);
  await close();
});

/** Until so much of the time limit is over. */
const passes = async (until: number) => {
  while (performance.now() < until) await Bun.sleep(1);
};

test("what has waited too long is refused without being written, with all that wait behind it", async () => {
  const { execute, ran, runs } = batchesByHand({ atOnce: 1, waitMsMax: 50 });
  const writing = execute(first, { name: "writing" });
  await ran(0);
  const late = ["a", "b", "c"].map((name) => kindOf(execute(first, { name, key: "k" })));
  await passes(performance.now() + 51);
  runs[0]?.answer();
  expect(await Promise.all([writing, ...late])).toEqual(["writing", "unavailable", "unavailable", "unavailable"]);
  expect(runs).toHaveLength(1);
});

test("thousands that have waited too long are refused few in a turn of the event loop", async () => {
  const { execute, ran, runs } = batchesByHand({ atOnce: 1, waitMsMax: 50 });
  void execute(first, { name: "writing" });
  await ran(0);
  let refused = 0;
  const late = Array.from({ length: 5_000 }, (_, i) =>
    kindOf(execute(first, { name: `${i}` })).then(() => {
      refused++;
    }),
  );
  await passes(performance.now() + 51);
  runs[0]?.answer();
  let most = 0;
  for (let before = 0; refused < late.length; before = refused) {
    await new Promise(setImmediate);
    most = Math.max(most, refused - before);
  }
  expect(most).toBeLessThanOrEqual(2 * 256);
});

test("a command with most of its time left is not refused with one that has little", async () => {
  const { execute, ran, runs } = batchesByHand({ atOnce: 1, waitMsMax: 2_000 });
  void execute(first, { name: "writing" });
  await ran(0);
  const old = kindOf(execute(first, { name: "old" }));
  await passes(performance.now() + 1_001);
  const fresh = execute(first, { name: "fresh" });
  runs[0]?.answer();
  const run = await ran(1);
  expect(run.names).toEqual(["old"]);
  run.answer(unavailable(new Error("late")));
  expect(await old).toBe("unavailable");
  (await ran(2)).answer();
  expect(await fresh).toBe("fresh");
});

test("small commands do not wait for large ones", async () => {
  const largeAnswer = Promise.withResolvers<unknown[][]>();
  const lanes = createCommandLanes({
    atOnce: 1,
    largeAtOnce: 1,
    waitMsMax: 60_000,
    run(groups) {
      const names = groups.map(({ inputs }) => inputs.map((input) => (input as Input).name));
      return names.flat().includes("large") ? largeAnswer.promise : Promise.resolve(names);
    },
  });
  const large = [1, 2].map(() => lanes.execute(first, { name: "large", bytes: 1024 * 1024 }));
  expect(await lanes.execute(first, { name: "small" })).toBe("small");
  largeAnswer.resolve([["large"]]);
  expect(await Promise.all(large)).toContain("large");
  await lanes.close();
});

test("behind a thousand of another tenant one is in the next batch, whatever it is, and those of a key keep their order", async () => {
  const { execute, ran, runs, close } = batchesByHand({ atOnce: 1 });
  const hostile = Array.from({ length: 1_000 }, (_, i) =>
    execute(i % 2 ? first : second, { name: `${i}`, key: `${i % 600}` }),
  );
  const { names, answer } = await ran(0);
  expect(names).toHaveLength(256);
  const own = ["a", "b"].map((name) => execute(second, { tenant: "neighbour", name, key: "own" }));
  answer();
  const next = await ran(1);
  expect(next.names).toContain("a");
  expect(next.names).toHaveLength(256);
  next.answer();
  const third = await ran(2);
  expect(third.names).toContain("b");
  third.answer();
  expect(await Promise.all(own)).toEqual(["a", "b"]);
  // The last one.
  (await ran(3)).answer();
  expect(await Promise.all(hostile)).toHaveLength(1_000);
  const written = runs.flatMap((run) => run.names);
  for (let i = 600; i < 1_000; i++) expect(written.indexOf(`${i}`)).toBeGreaterThan(written.indexOf(`${i - 600}`));
  await close();
});

test("when more wait than are written together, tenants have turns, and each one's own keep their order", async () => {
  const ofTenant = { ...first, tenantOf: ({ name }: Input) => name.slice(0, 1) };
  const { execute, ran } = batchesByHand({ atOnce: 1 });
  const enter = (tenant: string, count: number) =>
    Array.from({ length: count }, (_, at) => execute(ofTenant, { name: `${tenant}${at}` }));
  const all = [...enter("a", 600), ...enter("b", 2), ...enter("c", 1)];
  const { names, answer } = await ran(0);
  expect(names.slice(0, 6)).toEqual(["a0", "b0", "c0", "a1", "b1", "a2"]);
  expect(names).toHaveLength(256);
  answer();
  for (const number of [1, 2]) (await ran(number)).answer();
  expect((await ran(1)).names.slice(0, 2)).toEqual(["a253", "a254"]);
  expect(await Promise.all(all)).toHaveLength(603);
});

test("a command that may wait less than the others is refused in time, and is never written", async () => {
  const { execute, ran, runs } = batchesByHand({ atOnce: 1 });
  const writing = execute(first, { name: "writing" });
  await ran(0);
  const soon = performance.now() + 20;
  const late = [{ name: "a" }, { name: "b", key: "k" }, { name: "c", key: "k" }];
  const answers = late.map((input) => kindOf(execute(first, input, soon)));
  const patient = execute(first, { name: "patient" });
  expect(await Promise.all(answers)).toEqual(["unavailable", "unavailable", "unavailable"]);
  expect(runs).toHaveLength(1);
  runs[0]?.answer();
  const run = await ran(1);
  expect(run.names).toEqual(["patient"]);
  run.answer();
  expect(await Promise.all([writing, patient])).toEqual(["writing", "patient"]);
});

test("nobody is told that a command was not stored once it is being written, however little time it has", async () => {
  const { execute, ran } = batchesByHand();
  const soon = performance.now() + 20;
  const written = execute(first, { name: "a" }, soon).catch((error) => error);
  const run = await ran(0);
  expect(run.until).toBe(soon);
  await passes(soon + 20);
  await new Promise((resolve) => setTimeout(resolve));
  run.answer(new CommitUnknown(new Error("no answer")));
  expect(await written).toBeInstanceOf(CommitUnknown);
});
