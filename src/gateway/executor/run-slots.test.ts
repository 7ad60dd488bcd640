import { expect, jest, test } from "bun:test";
import fc from "fast-check";
import { createRunSlots, createStarvedQueues } from "./queue.ts";

const call = (tenant: string, id: string, body_bytes = 0) => ({ tenant, id, body_bytes });

test("of slots an agent has its own limit, and what its calls give back is free for the next", () => {
  const slots = createRunSlots({ slots: 64, agentSlots: 2, bodyBytes: 1000 });
  for (const id of ["1", "2"]) expect(slots.take("a", call("t", id))).toBeNull();
  expect(slots.take("a", call("t", "3"))).toBe("own");
  expect(slots.take("b", call("t", "4"))).toBeNull();
  expect([slots.heldBy("t"), slots.heldBy("t", "a")]).toEqual([3, 2]);
  slots.giveBack("a", call("t", "1"));
  expect(slots.take("a", call("t", "3"))).toBeNull();
});

test("a call whose body finds no memory takes no slot either", () => {
  const slots = createRunSlots({ slots: 64, agentSlots: 8, bodyBytes: 900 });
  expect(slots.take("a", call("t", "1", 700))).toBeNull();
  expect(slots.take("b", call("t", "2", 700))).toBe("tenant");
  expect([slots.heldBy("t"), slots.heldBy("t", "b")]).toEqual([1, 0]);
});

test("of a tenant that holds no memory one large body runs beside the limit, and is given back beside it", () => {
  const slots = createRunSlots({ slots: 64, agentSlots: 8, bodyBytes: 900 });
  expect(slots.take("a", call("stuck", "1", 780))).toBeNull();
  const [first, second] = [call("good", "2", 300), call("good", "3", 300)];
  expect(slots.take("b", first)).toBeNull();
  expect(slots.take("b", second)).not.toBeNull();
  slots.giveBack("b", first);
  expect(slots.take("b", second)).toBeNull();
  slots.giveBack("b", second);
  slots.giveBack("a", call("stuck", "1", 780));
  // Whole again: an amount above anybody's share can be had only while nobody holds anything.
  expect(slots.take("a", call("stuck", "4", 900))).toBeNull();
});

test("whatever is taken and given back, in the end all of it is there again", () => {
  const someCall = fc.record({
    tenant: fc.constantFrom("a", "b", "c"),
    agent: fc.constantFrom("1", "2"),
    body_bytes: fc.nat(900),
    gives: fc.boolean(),
  });
  fc.assert(
    fc.property(fc.array(someCall, { maxLength: 60 }), (steps) => {
      const slots = createRunSlots({ slots: 16, agentSlots: 3, bodyBytes: 900 });
      const held: { agent: string; item: ReturnType<typeof call> }[] = [];
      for (const [at, { tenant, agent, body_bytes, gives }] of steps.entries()) {
        const given = gives ? held.shift() : undefined;
        if (given !== undefined) slots.giveBack(given.agent, given.item);
        const item = call(tenant, String(at), body_bytes);
        if (slots.take(`${tenant}${agent}`, item) === null) held.push({ agent: `${tenant}${agent}`, item });
        expect(held.length).toBeLessThanOrEqual(16);
      }
      for (const { agent, item } of held) slots.giveBack(agent, item);
      for (const tenant of ["a", "b", "c"]) expect(slots.heldBy(tenant)).toBe(0);
      for (const id of ["x", "y", "z"]) {
        const whole = call("a", id, 900);
        expect(slots.take("a1", whole)).toBeNull();
        slots.giveBack("a1", whole);
      }
    }),
  );
});

interface Queue {
  readonly tenant: string;
  readonly name: string;
}

/** Queues that each want one slot, of which there are so many. */
function world(free: number) {
  const held = new Map<string, number>();
  const tried: string[] = [];
  const room = { free };
  const blocked = new Set<string>();
  const short = createStarvedQueues<Queue>(
    { heldBy: (tenant) => held.get(tenant) ?? 0, roomOf: () => room.free },
    (queue) => {
      tried.push(queue.name);
      if (room.free === 0 || blocked.has(queue.name)) {
        short.add(queue);
        return false;
      }
      room.free--;
      held.set(queue.tenant, (held.get(queue.tenant) ?? 0) + 1);
      return true;
    },
  );
  return { short, held, room, blocked, tried };
}

test("the queues of the tenant that holds the least are served first, in the order in which they fell short", () => {
  const { short, held, room, tried } = world(0);
  held.set("much", 5);
  for (const name of ["m1", "m2"]) short.add({ tenant: "much", name });
  for (const name of ["l1", "l2"]) short.add({ tenant: "little", name });
  room.free = 3;
  short.serve();
  expect(tried).toEqual(["l1", "l2", "m1"]);
  room.free = 1;
  short.serve();
  expect(tried).toEqual(["l1", "l2", "m1", "m2"]);
  short.stop();
});

test("a tenant's queues that can't start anything go to the end, and after sixteen of them others are tried", () => {
  jest.useFakeTimers();
  try {
    const { short, blocked, tried } = world(10);
    for (let at = 0; at < 20; at++) {
      blocked.add(`s${at}`);
      short.add({ tenant: "a", name: `s${at}` });
    }
    const last = { tenant: "b", name: "last" };
    short.add(last);
    short.serve();
    expect(tried).toEqual([...Array.from({ length: 16 }, (_, at) => `s${at}`), "last"]);
    tried.length = 0;
    // No call ends, and yet the rest is tried.
    jest.advanceTimersByTime(250);
    expect(tried.slice(0, 5)).toEqual(["s16", "s17", "s18", "s19", "s0"]);
    tried.length = 0;
    short.stop();
    jest.advanceTimersByTime(1_000);
    expect(tried).toEqual([]);
  } finally {
    jest.useRealTimers();
  }
});

test("however many tenants have queues that can't start anything, few are tried in one turn of the event loop, and all in time", async () => {
  const { short, blocked, tried } = world(10);
  for (let at = 0; at < 2_000; at++) {
    blocked.add(`q${at}`);
    short.add({ tenant: `t${at}`, name: `q${at}` });
  }
  short.add({ tenant: "neighbour", name: "last" });
  short.serve();
  expect(tried.length).toBeLessThanOrEqual(64);
  // As many as end meanwhile begin no further round of tries.
  for (let ends = 0; ends < 100; ends++) short.serve();
  expect(tried.length).toBeLessThanOrEqual(64);
  let turns = 0;
  for (; !tried.includes("last"); turns++) await new Promise(setImmediate);
  expect(turns).toBeLessThan(100);
  expect(tried.length).toBeGreaterThanOrEqual(2_001);
  short.stop();
});

test("what is given back during a round of tries is offered again to those who were tried before", async () => {
  const { short, blocked, tried } = world(10);
  const names = Array.from({ length: 500 }, (_, at) => `q${at}`);
  for (const name of names) {
    blocked.add(name);
    short.add({ tenant: name, name });
  }
  short.serve();
  expect(tried).toContain("q0");
  tried.length = 0;
  blocked.delete("q0");
  short.serve();
  let turns = 0;
  for (; !tried.includes("q0") && turns < 1_000; turns++) await new Promise(setImmediate);
  expect(turns).toBeLessThan(50);
  short.stop();
});
