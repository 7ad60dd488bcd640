import { expect, test } from "bun:test";
import fc from "fast-check";
import { AgentQueue, LENGTH_MAX, type QueueEntry } from "./agent-queue.ts";

const call = (id: number): QueueEntry => ({ tenant: "t", id: String(id).padStart(4, "0"), body_bytes: 0 });

const BLOCK = 3;

/** A queue over a database that is a list. */
function world() {
  const queue = new AgentQueue<QueueEntry>("t", "a");
  const pending = new Map<string, QueueEntry>();
  const started: string[] = [];
  let asked: { after: string; found: readonly QueueEntry[] | null } | null = null;
  const find = (after: string) =>
    [...pending.values()]
      .filter(({ id }) => id > after)
      .sort((a, b) => (a.id < b.id ? -1 : 1))
      .slice(0, BLOCK);
  return {
    queue,
    pending,
    started,
    /** @param isEarly whether the database looks before the calls come that are offered meanwhile */
    ask(isEarly: boolean) {
      // What is in memory starts first.
      if (!queue.wantsMore || queue.next !== undefined) return;
      const after = queue.beginTaking();
      asked = { after, found: isEarly ? find(after) : null };
      // What has been taken is nobody else's any more.
      for (const { id } of asked.found ?? []) pending.delete(id);
    },
    answer() {
      if (asked === null) return;
      const taken = asked.found ?? find(asked.after);
      asked = null;
      queue.took(taken);
      for (const item of taken) {
        pending.delete(item.id);
        started.push(item.id);
        queue.start(item);
      }
      queue.goOn([], taken.length === BLOCK);
    },
    startNext() {
      const { next } = queue;
      if (next === undefined) return;
      queue.startNext();
      pending.delete(next.id);
      started.push(next.id);
    },
  };
}

const step = fc.constantFrom(
  ...["offer", "offer", "no room", "unseen"],
  ...["ask early", "ask late", "answer", "start", "end"],
);

test("every call is started once, in whatever order calls come, and blocks are asked for and answered", () => {
  const order = fc.uniqueArray(fc.nat(999), { minLength: 80, maxLength: 80 });
  fc.assert(
    fc.property(order, fc.array(step, { minLength: 30, maxLength: 80 }), (ids, steps) => {
      const { queue, pending, started, ask, answer, startNext } = world();
      const all: string[] = [];
      for (const [at, action] of steps.entries()) {
        const item = call(ids[at] ?? 0);
        if (action === "offer" || action === "no room" || action === "unseen") {
          all.push(item.id);
          pending.set(item.id, item);
          if (action === "unseen") queue.lookAgain();
          else queue.keep(item, action === "offer");
        } else if (action === "answer") answer();
        else if (action === "start") startNext();
        else if (action === "end") for (const id of started) queue.end({ ...item, id });
        else ask(action === "ask early");
      }
      for (let rounds = 0; rounds < 200 && !queue.isDry; rounds++) {
        startNext();
        ask(true);
        answer();
      }
      expect(started.toSorted()).toEqual(all.toSorted());
      expect(queue.length).toBe(0);
      for (const id of started) queue.end({ tenant: "t", id, body_bytes: 0 });
      expect(queue.empty).toBe(true);
    }),
    { numRuns: 1000 },
  );
});

test("more than it keeps in memory is left to the database, and looked for behind what was taken last", () => {
  const queue = new AgentQueue<QueueEntry>("t", "a");
  for (let id = 0; id < LENGTH_MAX; id++) expect(queue.keep(call(id), true)).toBe(true);
  expect(queue.keep(call(300), true)).toBe(false);
  expect([queue.length, queue.wantsMore, queue.isDry]).toEqual([LENGTH_MAX, true, false]);
  // Calls before those that are in memory may have been left out, too.
  expect(queue.beginTaking()).toBe("");
  expect(queue.wantsMore).toBe(false);
  queue.took([call(301)]);
  queue.goOn([], true);
  expect(queue.beginTaking()).toBe("0301");
});

test("a look while a block is taken begins from the oldest, after that block", () => {
  const queue = new AgentQueue<QueueEntry>("t", "a");
  queue.isShared = true;
  queue.lookAgain();
  expect([queue.beginTaking(), queue.isShared]).toEqual(["", false]);
  queue.lookAgain();
  expect(queue.wantsMore).toBe(false);
  queue.took([call(7)]);
  queue.goOn([], false);
  expect([queue.wantsMore, queue.beginTaking()]).toEqual([true, ""]);
});

test("what is still pending after a block waits in order, without what has been started meanwhile", () => {
  const queue = new AgentQueue<QueueEntry>("t", "a");
  queue.lookAgain();
  queue.beginTaking();
  queue.keep(call(9), true);
  queue.start(call(2));
  queue.took([call(1)]);
  queue.goOn([call(2), call(3)], false);
  const order: (string | undefined)[] = [];
  for (; queue.next !== undefined; queue.startNext()) order.push(queue.next.id);
  expect(order).toEqual(["0003", "0009"]);
});

test("a call that finds no room while a block is taken, and is older than what that brings, is looked for again", () => {
  const queue = new AgentQueue<QueueEntry>("t", "a");
  queue.lookAgain();
  queue.beginTaking();
  queue.keep(call(6), false);
  queue.keep(call(9), false);
  queue.took([call(5), call(7)]);
  queue.goOn([], false);
  expect([queue.wantsMore, queue.beginTaking()]).toEqual([true, ""]);
  queue.keep(call(8), false);
  queue.took([call(6)]);
  queue.goOn([], false);
  // What came later than the block's last is behind it.
  expect([queue.wantsMore, queue.beginTaking()]).toEqual([true, "0006"]);
});
