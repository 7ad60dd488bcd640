// The pool as a model: threads that answer, die and hang in any order, callers that leave. Each job ends exactly once, with
// what its thread said, and no tenant waits for more than one job of each other one.
import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { Fault } from "../core/fault.ts";
import { silentLog } from "../core/log.ts";
import {
  type ComputeOptions,
  type ComputeTask,
  computePool,
  type FromComputeThread,
  type ToComputeThread,
} from "./compute.ts";

const ECHO: ComputeTask<string, string> = { name: "echo", run: (input) => input };
const LONG = 1024 * 1024;

/** Threads that do what they are told to. */
function standIns() {
  const alive: { worker: Worker; job: string | null }[] = [];
  let started = 0;
  return {
    alive,
    started: () => started,
    spawn(): Worker {
      started++;
      const made = Object.assign(new EventTarget(), {
        ref() {},
        unref() {},
        postMessage({ input }: ToComputeThread) {
          expect(own.job).toBeNull();
          own.job = input as string;
        },
        terminate() {
          alive.splice(alive.indexOf(own), 1);
        },
      });
      const own: (typeof alive)[number] = { worker: made as unknown as Worker, job: null };
      alive.push(own);
      return own.worker;
    },
    busy: () => alive.filter(({ job }) => job !== null),
    answers(thread: (typeof alive)[number], data: FromComputeThread = { output: thread.job }) {
      thread.job = null;
      thread.worker.onmessage?.(new MessageEvent("message", { data }));
    },
    dies: (thread: (typeof alive)[number]) => void thread.worker.dispatchEvent(new Event("close")),
  };
}

function pool(options: Partial<ComputeOptions> = {}) {
  const threads = standIns();
  return { threads, ...computePool({ log: silentLog, spawn: threads.spawn, threads: 2, ...options }) };
}

const short = (tenant: string, bytes = 100) => ({ tenant, bytes });

test("in any order of ends each job ends once, within the bounds, and nothing is left", async () => {
  const event = fc.oneof(
    {
      weight: 5,
      arbitrary: fc.record({ kind: fc.constant("run"), n: fc.nat(4), bytes: fc.constantFrom(1, 400, LONG) }),
    },
    ...["answer", "fail", "die", "leave"].map((kind) => ({
      weight: kind === "answer" ? 4 : 1,
      arbitrary: fc.record({ kind: fc.constant(kind), n: fc.nat(1_000), bytes: fc.constant(0) }),
    })),
  );
  await fc.assert(
    fc.asyncProperty(fc.array(event, { maxLength: 80 }), fc.integer({ min: 1, max: 3 }), async (events, size) => {
      const { threads, run, close } = pool({ threads: size, jobsMax: 20, bytesMax: 4 * LONG });
      const ends = new Map<string, string[]>();
      const leaving: AbortController[] = [];
      const running: Promise<void>[] = [];
      const long = new Set<string>();
      for (const [at, { kind, n, bytes }] of events.entries()) {
        const busy = threads.busy();
        const thread = busy[n % Math.max(busy.length, 1)];
        if (kind === "run") {
          const [name, controller] = [`${at}`, new AbortController()];
          if (bytes === LONG) long.add(name);
          leaving.push(controller);
          ends.set(name, []);
          const end = (how: string) => void ends.get(name)?.push(how);
          const job = run(ECHO, name, { tenant: `t${n}`, bytes, signal: controller.signal });
          running.push(job.then(end, (error) => end(error instanceof Fault ? error.kind : String(error))));
        } else if (kind === "leave") leaving[n % Math.max(leaving.length, 1)]?.abort("left");
        else if (thread !== undefined && kind === "die") threads.dies(thread);
        else if (thread !== undefined && kind === "fail") threads.answers(thread, { error: "failed", fault: null });
        else if (thread !== undefined) threads.answers(thread);
        await null;
        expect(threads.alive.length).toBeLessThanOrEqual(size);
        const longs = threads.busy().filter(({ job }) => long.has(job ?? ""));
        expect(longs.length).toBeLessThanOrEqual(Math.max(size - 1, 1));
      }
      for (let [next] = threads.busy(); next !== undefined; [next] = threads.busy()) threads.answers(next);
      await Promise.all(running);
      for (const [name, how] of ends) {
        expect(how.length).toBe(1);
        expect(["left", "failed", "unavailable", name]).toContain(how[0] ?? "");
      }
      // All shares are free again.
      const again = run(ECHO, "again", { tenant: "one", bytes: 3 * LONG });
      for (const each of threads.busy()) threads.answers(each);
      expect(await again).toBe("again");
      close();
      expect(threads.alive).toEqual([]);
    }),
    { numRuns: 500 },
  );
});

test("a tenant with much to do lets each other one go first with its next job", async () => {
  const { threads, run } = pool({ threads: 1 });
  const order: string[] = [];
  const all = ["loud", "loud", "loud", "loud", "quiet", "other", "quiet"].map((tenant) =>
    run(ECHO, tenant, short(tenant)).then((name) => order.push(name)),
  );
  for (let at = 0; at < all.length; at++) {
    threads.answers(threads.busy()[0]!);
    await null;
  }
  await Promise.all(all);
  expect(order).toEqual(["loud", "loud", "quiet", "other", "loud", "quiet", "loud"]);
});

test("long jobs leave a thread to the short ones", async () => {
  const { threads, run } = pool();
  const long = ["a", "b"].map((tenant) => run(ECHO, "long", { tenant, bytes: LONG }));
  const few = run(ECHO, "short", short("c"));
  expect(threads.busy().map(({ job }) => job)).toEqual(["long", "short"]);
  threads.answers(threads.busy()[1]!);
  expect(await few).toBe("short");
  expect(threads.busy().map(({ job }) => job)).toEqual(["long"]);
  for (const each of long) {
    threads.answers(threads.busy()[0]!);
    expect(await each).toBe("long");
  }
});

test("no thread starts before there is work, nor more than there is work for", async () => {
  const { threads, run } = pool();
  expect(threads.started()).toBe(0);
  for (let at = 0; at < 3; at++) {
    const job = run(ECHO, "a", short("t"));
    threads.answers(threads.busy()[0]!);
    await job;
  }
  expect(threads.started()).toBe(1);
});

test("no more waits than there is room for, and a tenant that asks for much leaves some to others", async () => {
  const { threads, run } = pool({ threads: 1, jobsMax: 64 });
  const loud = Array.from({ length: 100 }, () => run(ECHO, "loud", short("loud")));
  const quiet = run(ECHO, "quiet", short("quiet"));
  for (let [next] = threads.busy(); next !== undefined; [next] = threads.busy()) threads.answers(next);
  const ended = await Promise.allSettled(loud);
  const refused = ended.flatMap((result) => (result.status === "rejected" ? [result.reason] : []));
  expect(refused.length).toBe(100 - 56);
  for (const reason of refused) expect(reason).toMatchObject({ kind: "unavailable", retryAfterSeconds: 1 });
  expect(await quiet).toBe("quiet");
});

test("who has left is not waited for, and is not worked for if that has not begun", async () => {
  const { threads, run } = pool({ threads: 1 });
  const [first, second] = [new AbortController(), new AbortController()];
  const begun = run(ECHO, "begun", { ...short("t"), signal: first.signal });
  const waiting = run(ECHO, "waiting", { ...short("t"), signal: second.signal });
  const last = run(ECHO, "last", short("t"));
  second.abort("left");
  expect(await waiting.catch((reason) => reason)).toBe("left");
  first.abort("left");
  expect(await begun.catch((reason) => reason)).toBe("left");
  threads.answers(threads.busy()[0]!);
  expect(threads.busy().map(({ job }) => job)).toEqual(["last"]);
  threads.answers(threads.busy()[0]!);
  expect(await last).toBe("last");
  expect(await run(ECHO, "late", { ...short("t"), signal: second.signal }).catch((reason) => reason)).toBe("left");
});

test("a thread with nothing to do ends, and the next job has another one", async () => {
  const { threads, run } = pool({ idleMs: 1 });
  for (let round = 1; round <= 2; round++) {
    const job = run(ECHO, "a", short("t"));
    threads.answers(threads.busy()[0]!);
    await job;
    while (threads.alive.length > 0) await new Promise(setImmediate);
    expect(threads.started()).toBe(round);
  }
});

const script = (code: string) => URL.createObjectURL(new Blob([code]));
const ANSWERS = `self.onmessage = ({ data }) => postMessage({ output: data.input });`;

describe("its job fails, and the next one has another thread, with a thread that", () => {
  const deaths: [string, string][] = [
    ["can't be loaded", "./no-such-worker.ts"],
    ["throws while it loads", script(`throw new Error("planted")`)],
    ["throws at its work", script(`self.onmessage = () => { throw new Error("planted"); };`)],
    ["exits at its work", script(`self.onmessage = () => process.exit(1);`)],
    ["never answers", script(`self.onmessage = () => {};`)],
    ["hangs", script(`self.onmessage = () => { for (;;); };`)],
  ];
  test.each(deaths)("%s", async (_name, url) => {
    let isFirst = true;
    const spawn = () => {
      const worker = new Worker(isFirst ? url : script(ANSWERS));
      isFirst = false;
      return worker;
    };
    const { run, close } = computePool({ log: silentLog, spawn, threads: 1, stuckMs: 300 });
    const [lost, next] = [run(ECHO, "lost", short("t")), run(ECHO, "next", short("t"))];
    expect(await lost.catch((error) => error)).toMatchObject({ kind: "unavailable" });
    expect(await next).toBe("next");
    close();
  });
});

test("if no thread can be started, the job fails, and the next one tries again", async () => {
  let isBroken = true;
  const threads = standIns();
  const spawn = () => {
    if (isBroken) throw new Error("no threads left");
    return threads.spawn();
  };
  const { run } = computePool({ log: silentLog, spawn });
  expect(await run(ECHO, "a", short("t")).catch((error) => error)).toMatchObject({ kind: "unavailable" });
  isBroken = false;
  const job = run(ECHO, "b", short("t"));
  threads.answers(threads.busy()[0]!);
  expect(await job).toBe("b");
});

test("what waits when the pool is closed fails", async () => {
  const { run, close } = pool({ threads: 1 });
  const all = [run(ECHO, "a", short("t")), run(ECHO, "b", short("t"))];
  close();
  all.push(run(ECHO, "c", short("t")));
  for (const each of all) expect(await each.catch((error) => error)).toMatchObject({ kind: "unavailable" });
});
