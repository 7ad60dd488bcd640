import { expect, jest, test } from "bun:test";
import fc from "fast-check";
import { CallQueues, type CallQueuesOptions, type QueueEntry } from "./queue.ts";

/** More than there are slots. */
const AGENTS = ["a", "b", "c", "d", "e", "f", "g"] as const;
const settle = () => new Promise<void>((resolve) => setImmediate(resolve));

/** The body of a call that is not taken in a block. */
const LARGE = 6;

/** Lets what has ended give its slot back, and no more: a block that is being taken still is. */
async function tick(): Promise<void> {
  for (let i = 0; i < 10; i++) await Promise.resolve();
}

type PendingEntry = QueueEntry & { readonly agent: string };

/** A database that is a list, from which blocks are taken, and from which a call goes whose body is large when it is run. */
function listOf(largeFrom: number) {
  const pending: PendingEntry[] = [];
  /** What is being claimed by its ID. */
  const claiming = new Set<string>();
  return {
    pending,
    claiming,
    remove(id: string) {
      const at = pending.findIndex((row) => row.id === id);
      if (at >= 0) pending.splice(at, 1);
    },
    async takeBlock(_tenant: string, agentId: string, slots: number, after: string) {
      const leftOut = new Set(claiming);
      await settle();
      const isNext = ({ agent, id }: PendingEntry) => agent === agentId && id > after && !leftOut.has(id);
      const inOrder = pending.filter(isNext).sort((a, b) => (a.id < b.id ? -1 : 1));
      const found = inOrder.slice(0, slots);
      const end = found.findIndex(({ body_bytes }) => body_bytes >= largeFrom);
      const taken = end < 0 ? found : found.slice(0, end);
      for (const row of taken) pending.splice(pending.indexOf(row), 1);
      return { taken, large: found[taken.length] ?? null };
    },
  };
}

/** Queues over such a list, with calls that end when the test says so. */
function world(limits: { agentSlots: number; slots: number }) {
  const list = listOf(LARGE);
  const { pending, claiming } = list;
  const runs: { agent: string; hasSlot: boolean; made: () => void; end: () => void }[] = [];
  const started: string[] = [];
  let [made, late] = [10_000, 10_000];
  const queues = new CallQueues<QueueEntry>({
    ...limits,
    bodyBytes: 1000,
    blockBodyBytes: LARGE - 1,
    takeBlock: list.takeBlock,
    async run(agentId, item, isMade) {
      started.push(item.id);
      const { promise, resolve } = Promise.withResolvers<void>();
      const call = { agent: agentId, hasSlot: true, end: resolve, made: () => {} };
      call.made = () => {
        call.hasSlot = false;
        isMade();
      };
      runs.push(call);
      // Claiming by ID takes longer than a block; until then the call is pending as others see it.
      claiming.add(item.id);
      await settle();
      await settle();
      claiming.delete(item.id);
      list.remove(item.id);
      await promise;
    },
  });
  return {
    queues,
    pending,
    runs,
    started,
    /** @param isLate whether its ID is older than those of calls that were stored before */
    insert(agent: string, isLate = false): QueueEntry {
      const n = isLate ? --late : ++made;
      const item = { tenant: "t", id: `${agent}${n}`, body_bytes: n % (LARGE + 1) };
      pending.push({ ...item, agent });
      return item;
    },
    /** As a call is accepted: it starts at once, or waits in the database. */
    offer(agent: string, item: QueueEntry) {
      const slot = queues.reserve(agent, item);
      if (slot === null) {
        queues.offer("t", agent, item.id);
        return;
      }
      list.remove(item.id);
      slot.run(item);
    },
  };
}

const actions = ["offer", "offer", "end", "turn"] as const;
const step = fc.record({
  action: fc.constantFrom(...actions, "insert unseen" as const, "offer late" as const, "made" as const),
  agent: fc.constantFrom(...AGENTS),
});

test("a call that has been made leaves its slot to the next, and the drain waits for its record", async () => {
  const { queues, runs, started, insert, offer } = world({ agentSlots: 1, slots: 1 });
  for (const item of [insert("a"), insert("a"), insert("a")]) offer("a", item);
  runs[0]?.made();
  await settle();
  await settle();
  expect(started.length).toBe(2);
  let isIdle = false;
  void queues.pause().then(() => {
    isIdle = true;
  });
  runs[1]?.made();
  runs[1]?.end();
  await settle();
  await settle();
  await settle();
  expect([started.length, isIdle]).toEqual([2, false]);
  runs[0]?.end();
  await settle();
  expect(isIdle).toBe(true);
});

test("while nothing can be recorded, few more calls are made than there are slots", async () => {
  const { runs, insert, offer } = world({ agentSlots: 1, slots: 1 });
  for (let i = 0; i < 600; i++) offer("a", insert("a"));
  for (let at = 0; at < runs.length; at++) {
    runs[at]?.made();
    for (let i = 0; i < 5; i++) await settle();
  }
  expect(runs.length).toBe(257);
  // When one is recorded, there is room for another again, and the call that had to keep its slot gives it back.
  runs[256]?.end();
  for (let i = 0; i < 5; i++) await settle();
  expect(runs.length).toBe(258);
});

test("every pending call runs exactly once, within the limits, however calls come and end", async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(step, { minLength: 30, maxLength: 150 }), async (steps) => {
      const { queues, pending, runs, started, insert, offer } = world({ agentSlots: 3, slots: 5 });
      const all: string[] = [];
      for (const { action, agent } of steps) {
        if (action === "offer" || action === "offer late" || action === "insert unseen") {
          const item = insert(agent, action === "offer late");
          all.push(item.id);
          if (action === "insert unseen") queues.offer("t", agent);
          else offer(agent, item);
        } else if (action === "end") {
          runs.shift()?.end();
        } else if (action === "made") {
          runs.find(({ hasSlot }) => hasSlot)?.made();
        } else {
          await settle();
        }
        const placed = runs.filter(({ hasSlot }) => hasSlot);
        expect(placed.length).toBeLessThanOrEqual(5);
        for (const name of AGENTS) {
          expect(placed.filter((run) => run.agent === name).length).toBeLessThanOrEqual(3);
        }
      }
      for (let turns = 0; turns < 1000 && (pending.length > 0 || queues.running > 0); turns++) {
        // Only an idle queue is looked at again: what it holds must start without help.
        if (queues.running === 0) for (const agent of AGENTS) queues.offer("t", agent);
        runs.shift()?.end();
        await settle();
      }
      expect(started.toSorted()).toEqual(all.toSorted());
      expect(queues.running).toBe(0);
      const isInOrder = steps.every(({ action }) => action !== "insert unseen" && action !== "offer late");
      if (isInOrder) for (const agent of AGENTS) expect(ofAgent(started, agent)).toEqual(ofAgent(all, agent));
    }),
    { numRuns: 200 },
  );
});

const ofAgent = (ids: readonly string[], agent: string) => ids.filter((id) => id.startsWith(agent));

test("calls run oldest first, also when the queue runs dry and the rest is taken from the database", async () => {
  const mix = fc.constantFrom("offer", "end", "end", "tick", "turn", "turn", "turn");
  await fc.assert(
    fc.asyncProperty(fc.array(mix, { minLength: 2500, maxLength: 3000 }), async (steps) => {
      const { runs, started, insert, offer } = world({ agentSlots: 2, slots: 5 });
      const all: string[] = [];
      for (const action of [...Array.from({ length: 300 }, () => "offer"), ...steps]) {
        if (action === "offer") {
          const item = insert("a");
          all.push(item.id);
          offer("a", item);
        } else if (action === "end") runs.shift()?.end();
        else if (action === "turn") await settle();
        else await tick();
      }
      while (started.length < all.length) {
        runs.shift()?.end();
        await settle();
      }
      expect(started).toEqual(all);
    }),
    { numRuns: 20 },
  );
});

test("a burst runs whole, in order, without being offered again", async () => {
  const { runs, started, insert, offer } = world({ agentSlots: 2, slots: 5 });
  const all: string[] = [];
  for (let i = 0; i < 2000; i++) {
    const item = insert("a");
    all.push(item.id);
    offer("a", item);
  }
  while (started.length < 2000) {
    runs.shift()?.end();
    await settle();
  }
  expect(started).toEqual(all);
});

test("a store that was away is asked again", async () => {
  jest.useFakeTimers();
  try {
    const started: string[] = [];
    let tries = 0;
    const queues = new CallQueues<QueueEntry>({
      ...{ slots: 5, agentSlots: 2, bodyBytes: 1000, blockBodyBytes: 1 },
      async takeBlock(tenant) {
        if (++tries === 1) throw new Error("the store is away");
        return { taken: [{ tenant, id: "1", body_bytes: 1 }], large: null };
      },
      run: async (_agent, { id }) => void started.push(id),
    });
    queues.offer("t", "a", "1");
    await tick();
    expect([queues.running, started]).toEqual([0, []]);
    jest.advanceTimersByTime(1_000);
    await tick();
    expect([queues.running, started]).toEqual([0, ["1"]]);
  } finally {
    jest.useRealTimers();
  }
});

test("no call starts while the queues are paused", async () => {
  const { queues, started, insert, offer } = world({ agentSlots: 2, slots: 5 });
  await queues.pause();
  offer("a", insert("a"));
  queues.offer("t", "a");
  await settle();
  expect(started).toEqual([]);
});

/** Queues whose calls start as they are offered, and end when the test says so. */
function started(options: Pick<CallQueuesOptions<QueueEntry>, "slots" | "agentSlots" | "bodyBytes">) {
  const list = listOf(2);
  const ends = new Map<string, () => void>();
  const queues = new CallQueues<QueueEntry>({
    ...options,
    blockBodyBytes: 1,
    takeBlock: list.takeBlock,
    run(_agent, { id }) {
      list.remove(id);
      return new Promise<void>((resolve) => ends.set(id, resolve));
    },
  });
  return {
    ends,
    async offer(tenant: string, agent: string, id: string, body_bytes: number) {
      const item = { tenant, id, body_bytes };
      const slot = queues.reserve(agent, item);
      if (slot === null) list.pending.push({ ...item, agent });
      if (slot === null) queues.offer(tenant, agent, id);
      else slot.run(item);
      await settle();
    },
  };
}

test("a tenant whose calls never end leaves slots to others, however many agents it has", async () => {
  const { ends, offer } = started({ slots: 64, agentSlots: 8, bodyBytes: 1_000_000 });
  const startedOf = (tenant: string) => [...ends.keys()].filter((id) => id.startsWith(tenant)).length;
  for (let at = 0; at < 200; at++) await offer("stuck", `stuck-${at % 40}`, `stuck-${String(at).padStart(3, "0")}`, 0);
  expect(startedOf("stuck")).toBeGreaterThan(48);
  await offer("good", "good-1", "good-1", 0);
  expect(startedOf("good")).toBe(1);
  // What is given back goes to who holds less, until both hold the same.
  for (let at = 0; at < 100; at++) await offer("good", `good-${at % 40}`, `good-${at + 100}`, 0);
  for (const [id, end] of [...ends]) if (id.startsWith("stuck")) end();
  for (let turns = 0; turns < 10; turns++) await settle();
  const ended = 56;
  expect(startedOf("good")).toBeGreaterThanOrEqual(24);
  expect(startedOf("stuck") - ended).toBeGreaterThanOrEqual(24);
});

test("large bodies weigh on their own tenant only", async () => {
  const { ends, offer } = started({ slots: 64, agentSlots: 8, bodyBytes: 800 });
  for (let at = 0; at < 20; at++) await offer("heavy", `heavy-${at}`, `heavy-${at}`, 100);
  expect(ends.size).toBe(7);
  await offer("light", "light", "light", 60);
  expect([...ends.keys()].at(-1)).toBe("light");
});

test("a large body of a tenant that holds none runs beside what others hold, and only one of it", async () => {
  const { ends, offer } = started({ slots: 64, agentSlots: 8, bodyBytes: 900 });
  for (const [at, bytes] of [300, 300, 180].entries()) await offer("stuck", `stuck-${at}`, `stuck-${at}`, bytes);
  expect(ends.size).toBe(3);
  await offer("good", "good-1", "good-1", 300);
  await offer("good", "good-2", "good-2", 300);
  expect([...ends.keys()].slice(3)).toEqual(["good-1"]);
  ends.get("good-1")?.();
  for (let turns = 0; turns < 5; turns++) await settle();
  expect([...ends.keys()].slice(4)).toEqual(["good-2"]);
  // What ran beside is given back beside: the share is whole again when all have ended.
  for (const end of ends.values()) end();
  await settle();
  await offer("stuck", "again", "again", 900);
  expect(ends.has("again")).toBe(true);
});

test("thousands of agents that wait for room are all served in the end, also when no call ends any more", async () => {
  const { ends, offer } = started({ slots: 4096, agentSlots: 8, bodyBytes: 1000 });
  await offer("t", "first", "first", 1000);
  const offered = Array.from({ length: 3000 }, (_, at) => offer("t", `agent-${at}`, `${at}`, at % 2 === 0 ? 800 : 1));
  await Promise.all(offered);
  expect(ends.size).toBe(1);
  const ended = new Set<string>();
  for (let turns = 0; ends.size < 3001 && turns < 20_000; turns++) {
    for (const [id, end] of ends) {
      if (!ended.has(id)) end();
      ended.add(id);
    }
    await settle();
  }
  expect(ends.size).toBe(3001);
});
