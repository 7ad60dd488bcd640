import { expect, test } from "bun:test";
import fc from "fast-check";
import { MAX } from "../../kernel/limits.ts";
import { AgentQueue, CallQueues, type QueueEntry } from "./queue.ts";

/** More than there are slots. */
const AGENTS = ["a", "b", "c", "d", "e", "f", "g"] as const;
const settle = () => new Promise<void>((resolve) => setImmediate(resolve));

/** The body of a call that is not taken in a block. */
const LARGE = 6;

/** Lets what has ended give its slot back, and no more: a block that is being taken still is. */
async function tick(): Promise<void> {
  for (let i = 0; i < 10; i++) await Promise.resolve();
}

/** Queues over a database that is a list, with calls that end when the test says so. */
function world(limits: { agentSlots: number; slots: number }, isShared = false) {
  const pending: (QueueEntry & { agent: string })[] = [];
  const runs: { agent: string; hasSlot: boolean; made: () => void; end: () => void }[] = [];
  const started: string[] = [];
  let made = 0;
  let blocks = 0;
  /** What is being claimed by its ID. */
  const claiming = new Set<string>();
  const queues = new CallQueues<QueueEntry>({
    ...limits,
    bodyBytes: 1000,
    blockBodyBytes: LARGE - 1,
    async takeBlock(_tenant, agentId, slots, after) {
      blocks++;
      const leftOut = new Set(claiming);
      await settle();
      const isNext = ({ agent, id }: QueueEntry & { agent: string }) =>
        agent === agentId && id > after && !leftOut.has(id);
      const found = pending.filter(isNext).slice(0, slots);
      const end = found.findIndex(({ body_bytes }) => body_bytes === LARGE);
      const taken = end < 0 ? found : found.slice(0, end);
      for (const row of taken) pending.splice(pending.indexOf(row), 1);
      return { taken, large: found[taken.length] ?? null };
    },
    async readOwn(_tenant, agentId, after, limit) {
      await settle();
      if (isShared) return { own: [], isAll: false };
      const own = pending.filter(({ agent, id }) => agent === agentId && id > after).slice(0, limit);
      return { own, isAll: own.length < limit };
    },
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
      const at = pending.findIndex((row) => row.id === item.id);
      if (at >= 0) pending.splice(at, 1);
      await promise;
    },
  });
  return {
    queues,
    pending,
    runs,
    started,
    blocks: () => blocks,
    insert(agent: string): QueueEntry {
      const item = { tenant: "t", id: `${agent}${String(++made).padStart(5, "0")}`, body_bytes: made % (LARGE + 1) };
      pending.push({ ...item, agent });
      return item;
    },
  };
}

const actions = ["offer", "offer", "end", "turn"] as const;
const step = fc.record({
  action: fc.constantFrom(...actions, "insert unseen" as const, "made" as const),
  agent: fc.constantFrom(...AGENTS),
});

test("a call that has been made leaves its slot to the next, and the drain waits for its record", async () => {
  const { queues, runs, started, insert } = world({ agentSlots: 1, slots: 1 });
  for (const item of [insert("a"), insert("a"), insert("a")]) queues.offer("a", item, item);
  runs[0]?.made();
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
  const { queues, runs, insert } = world({ agentSlots: 1, slots: 1 });
  for (let i = 0; i < 600; i++) {
    const item = insert("a");
    queues.offer("a", item, item);
  }
  for (let at = 0; at < runs.length; at++) {
    runs[at]?.made();
    await settle();
  }
  expect(runs.length).toBe(257);
  // When one is recorded, there is room for another again, and the call that had to keep its slot gives it back.
  runs[256]?.end();
  for (let i = 0; i < 5; i++) await settle();
  expect(runs.length).toBe(258);
});

test("every pending call runs exactly once, within the limits, however calls come and end", async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(step, { minLength: 30, maxLength: 150 }), fc.boolean(), async (steps, isShared) => {
      const { queues, pending, runs, started, insert } = world({ agentSlots: 3, slots: 5 }, isShared);
      const all: string[] = [];
      for (const { action, agent } of steps) {
        if (action === "offer" || action === "insert unseen") {
          const item = insert(agent);
          all.push(item.id);
          if (action === "offer") queues.offer(agent, item, item);
          else queues.checkPending("t", agent);
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
        if (queues.running === 0) for (const agent of AGENTS) queues.checkPending("t", agent);
        runs.shift()?.end();
        await settle();
      }
      expect(started.toSorted()).toEqual(all.toSorted());
      expect(queues.running).toBe(0);
      const seen = steps.every(({ action }) => action !== "insert unseen");
      if (seen) for (const agent of AGENTS) expect(ofAgent(started, agent)).toEqual(ofAgent(all, agent));
    }),
    { numRuns: 200 },
  );
});

const ofAgent = (ids: readonly string[], agent: string) => ids.filter((id) => id.startsWith(agent));

test("calls run oldest first, also when the queue runs dry and the rest is taken from the database", async () => {
  const mix = fc.constantFrom("offer", "end", "end", "tick", "turn", "turn", "turn");
  await fc.assert(
    fc.asyncProperty(fc.array(mix, { minLength: 2500, maxLength: 3000 }), fc.boolean(), async (steps, isShared) => {
      const { queues, runs, started, insert } = world({ agentSlots: 2, slots: 5 }, isShared);
      const all: string[] = [];
      for (const action of [...Array.from({ length: 300 }, () => "offer"), ...steps]) {
        if (action === "offer") {
          const item = insert("a");
          all.push(item.id);
          queues.offer("a", item, item);
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

test("a burst beyond what a queue keeps in memory runs whole, in order, without being offered again", async () => {
  const { queues, runs, started, insert, blocks } = world({ agentSlots: 2, slots: 5 });
  const all: string[] = [];
  for (let i = 0; i < 2000; i++) {
    const item = insert("a");
    all.push(item.id);
    queues.offer("a", item, item);
  }
  while (started.length < 2000) {
    runs.shift()?.end();
    await settle();
  }
  expect(started).toEqual(all);
  // At most one for each call that was not in memory, and one that finds nothing more.
  expect(blocks()).toBeLessThanOrEqual(2000 - 256 + 1);
});

test("a queue is served from memory as long as it fits, also after very many calls", async () => {
  const { queues, runs, started, insert, blocks } = world({ agentSlots: 1, slots: 5 });
  for (let i = 0; i < 21_000; i++) {
    const item = insert("a");
    queues.offer("a", item, item);
    if (i % 100 !== 99) continue;
    while (started.length < i + 1) {
      runs.shift()?.end();
      await settle();
    }
  }
  expect(blocks()).toBe(0);
}, 20_000);

test("a call that finds a slot at once keeps what is in memory, and one that waits does not", async () => {
  const inHand: boolean[] = [];
  const queues = new CallQueues<QueueEntry & { body?: string }>({
    slots: 5,
    agentSlots: 1,
    bodyBytes: 1000,
    blockBodyBytes: 1,
    takeBlock: async () => ({ taken: [], large: null }),
    readOwn: async () => ({ own: [], isAll: true }),
    run: async (_agent, item) => void inHand.push(item.body !== undefined),
  });
  for (const id of ["1", "2"]) {
    const item = { tenant: "t", id, body_bytes: 1 };
    queues.offer("a", item, { ...item, body: "held" });
  }
  await settle();
  expect(inHand).toEqual([true, false]);
});

test("however many agents have many calls pending, few of these are kept in memory, and all run", async () => {
  const [agents, each] = [120, 300];
  let [kept, most] = [0, 0];
  const left = new Map<string, number>();
  const ends: (() => void)[] = [];
  const items = (agent: string, count: number) =>
    Array.from({ length: count }, () => {
      const n = left.get(agent) ?? 0;
      left.set(agent, n - 1);
      return { tenant: "t", id: `${agent} ${each - n + 1000}`, body_bytes: 1 };
    });
  const queues = new CallQueues<QueueEntry>({
    agentSlots: 1,
    slots: 4096,
    bodyBytes: 1_000_000,
    blockBodyBytes: 1,
    takeBlock: async (_tenant, agent, slots) => ({
      taken: items(agent, Math.min(slots, left.get(agent) ?? 0)),
      large: null,
    }),
    async readOwn(_tenant, agent, _after, limit) {
      const own = items(agent, Math.min(limit, left.get(agent) ?? 0));
      kept += own.length;
      most = Math.max(most, kept);
      return { own, isAll: left.get(agent) === 0 };
    },
    async run() {
      await new Promise<void>((resolve) => ends.push(resolve));
      kept--;
    },
  });
  for (let at = 0; at < agents; at++) {
    left.set(`a${at}`, each);
    queues.checkPending("t", `a${at}`);
  }
  for (let i = 0; i < 10; i++) await settle();
  expect(ends).toHaveLength(agents);
  expect(most).toBeLessThanOrEqual(20_000);
  let ran = 0;
  for (let idle = 0; idle < 20; idle++) {
    for (const end of ends.splice(0)) {
      idle = 0;
      ran++;
      end();
    }
    await settle();
  }
  expect(ran).toBe(agents * each);
});

test("no call starts while the queues are paused", async () => {
  const { queues, started, insert } = world({ agentSlots: 2, slots: 5 });
  await queues.pause();
  const item = insert("a");
  queues.offer("a", item, item);
  queues.checkPending("t", "a");
  await settle();
  expect(started).toEqual([]);
});

test("a tenant whose calls never end leaves slots to others, however many agents it has", async () => {
  const ends = new Map<string, () => void>();
  const queues = new CallQueues<QueueEntry>({
    slots: 64,
    agentSlots: 8,
    bodyBytes: 1_000_000,
    blockBodyBytes: 1,
    takeBlock: async () => ({ taken: [], large: null }),
    readOwn: async () => ({ own: [], isAll: true }),
    run: (_agent, { id }) => new Promise<void>((resolve) => ends.set(id, resolve)),
  });
  const offer = (tenant: string, agent: string, id: string, body_bytes = 0) => {
    const item = { tenant, id, body_bytes };
    queues.offer(`${tenant}-${agent}`, item, item);
  };
  const startedOf = (tenant: string) => [...ends.keys()].filter((id) => id.startsWith(tenant)).length;
  for (let at = 0; at < 200; at++) offer("stuck", String(at % 40), `stuck-${at}`);
  expect(startedOf("stuck")).toBeGreaterThan(48);
  offer("good", "1", "good-1");
  expect(startedOf("good")).toBe(1);
  // What is given back goes to who holds less, until both hold the same.
  for (let at = 0; at < 100; at++) offer("good", String(at % 40), `good-${at + 2}`);
  for (const [id, end] of [...ends]) if (id.startsWith("stuck")) end();
  await settle();
  await settle();
  const ended = 56;
  expect(startedOf("good")).toBeGreaterThanOrEqual(24);
  expect(startedOf("stuck") - ended).toBeGreaterThanOrEqual(24);
});

test("large bodies weigh on their own tenant only", () => {
  const started: string[] = [];
  const queues = new CallQueues<QueueEntry>({
    slots: 64,
    agentSlots: 8,
    bodyBytes: 800,
    blockBodyBytes: 1,
    takeBlock: async () => ({ taken: [], large: null }),
    readOwn: async () => ({ own: [], isAll: true }),
    run: (_agent, { id }) => {
      started.push(id);
      return new Promise<void>(() => {});
    },
  });
  for (let at = 0; at < 20; at++) {
    const item = { tenant: "heavy", id: `heavy-${at}`, body_bytes: 100 };
    queues.offer(`heavy-${at}`, item, item);
  }
  expect(started.length).toBe(7);
  const light = { tenant: "light", id: "light", body_bytes: 60 };
  queues.offer("light", light, light);
  expect(started.at(-1)).toBe("light");
});

test("a large body of a tenant that holds none runs beside what others hold, and only one of it", async () => {
  const ends = new Map<string, () => void>();
  const queues = new CallQueues<QueueEntry>({
    slots: 64,
    agentSlots: 8,
    bodyBytes: 900,
    blockBodyBytes: 1,
    takeBlock: async () => ({ taken: [], large: null }),
    readOwn: async () => ({ own: [], isAll: true }),
    run: (_agent, { id }) => new Promise<void>((resolve) => ends.set(id, resolve)),
  });
  const offer = (tenant: string, id: string, body_bytes: number) => {
    const item = { tenant, id, body_bytes };
    queues.offer(`${tenant}-${id}`, item, item);
  };
  for (const [at, bytes] of [300, 300, 180].entries()) offer("stuck", `stuck-${at}`, bytes);
  expect(ends.size).toBe(3);
  offer("good", "good-1", 300);
  offer("good", "good-2", 300);
  expect([...ends.keys()].slice(3)).toEqual(["good-1"]);
  ends.get("good-1")?.();
  await settle();
  expect([...ends.keys()].slice(4)).toEqual(["good-2"]);
  // What ran beside is given back beside: the share is whole again when all have ended.
  for (const end of ends.values()) end();
  await settle();
  offer("stuck", "again", 900);
  expect(ends.has("again")).toBe(true);
});

test("thousands of queues that wait for room are all served in the end, also when no call ends any more", async () => {
  const started = new Set<string>();
  let free = () => {};
  const queues = new CallQueues<QueueEntry>({
    slots: 4096,
    agentSlots: 8,
    bodyBytes: 1000,
    blockBodyBytes: 1,
    takeBlock: async () => ({ taken: [], large: null }),
    readOwn: async () => ({ own: [], isAll: true }),
    run: (_agent, { id }) => {
      started.add(id);
      return id === "first" ? new Promise<void>((resolve) => (free = resolve)) : Promise.resolve();
    },
  });
  const offer = (id: string, body_bytes: number) => {
    const item = { tenant: "t", id, body_bytes };
    queues.offer(`agent-${id}`, item, item);
  };
  offer("first", 1000);
  for (let at = 0; at < 3000; at++) offer(String(at), at % 2 === 0 ? 800 : 1);
  expect(started.size).toBe(1);
  free();
  for (let turns = 0; started.size < 3001 && turns < 20_000; turns++) await settle();
  expect(started.size).toBe(3001);
});

const call = (id: number): QueueEntry => ({ tenant: "t", id: String(id).padStart(4, "0"), body_bytes: 0 });

const BLOCK = 3;

/** A queue over a database that is a list. */
function agentWorld() {
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
      queue.endTaking([], taken.length === BLOCK);
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

const agentStep = fc.constantFrom(
  ...["offer", "offer", "no room", "unseen"],
  ...["ask early", "ask late", "answer", "start", "end"],
);

test("every call is started once, in whatever order calls come, and blocks are asked for and answered", () => {
  const order = fc.uniqueArray(fc.nat(999), { minLength: 80, maxLength: 80 });
  fc.assert(
    fc.property(order, fc.array(agentStep, { minLength: 30, maxLength: 80 }), (ids, steps) => {
      const { queue, pending, started, ask, answer, startNext } = agentWorld();
      const all: string[] = [];
      for (const [at, action] of steps.entries()) {
        const item = call(ids[at] ?? 0);
        if (action === "offer" || action === "no room" || action === "unseen") {
          all.push(item.id);
          pending.set(item.id, item);
          if (action === "unseen") queue.checkAgain();
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
  for (let id = 0; id < MAX.agentQueuedCalls; id++) expect(queue.keep(call(id), true)).toBe(true);
  expect(queue.keep(call(300), true)).toBe(false);
  expect([queue.length, queue.wantsMore, queue.isDry]).toEqual([MAX.agentQueuedCalls, true, false]);
  // Calls before those that are in memory may have been left out, too.
  expect(queue.beginTaking()).toBe("");
  expect(queue.wantsMore).toBe(false);
  queue.took([call(301)]);
  queue.endTaking([], true);
  expect(queue.beginTaking()).toBe("0301");
});

test("a look while a block is taken begins from the oldest, after that block", () => {
  const queue = new AgentQueue<QueueEntry>("t", "a");
  queue.isShared = true;
  queue.checkAgain();
  expect([queue.beginTaking(), queue.isShared]).toEqual(["", false]);
  queue.checkAgain();
  expect(queue.wantsMore).toBe(false);
  queue.took([call(7)]);
  queue.endTaking([], false);
  expect([queue.wantsMore, queue.beginTaking()]).toEqual([true, ""]);
});

test("what is still pending after a block waits in order, without what has been started meanwhile", () => {
  const queue = new AgentQueue<QueueEntry>("t", "a");
  queue.checkAgain();
  queue.beginTaking();
  queue.keep(call(9), true);
  queue.start(call(2));
  queue.took([call(1)]);
  queue.endTaking([call(2), call(3)], false);
  const order: (string | undefined)[] = [];
  for (; queue.next !== undefined; queue.startNext()) order.push(queue.next.id);
  expect(order).toEqual(["0003", "0009"]);
});

test("a call that finds no room while a block is taken, and is older than what that brings, is looked for again", () => {
  const queue = new AgentQueue<QueueEntry>("t", "a");
  queue.checkAgain();
  queue.beginTaking();
  queue.keep(call(6), false);
  queue.keep(call(9), false);
  queue.took([call(5), call(7)]);
  queue.endTaking([], false);
  expect([queue.wantsMore, queue.beginTaking()]).toEqual([true, ""]);
  queue.keep(call(8), false);
  queue.took([call(6)]);
  queue.endTaking([], false);
  // What came later than the block's last is behind it.
  expect([queue.wantsMore, queue.beginTaking()]).toEqual([true, "0006"]);
});
