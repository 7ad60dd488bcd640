import { expect, jest, test } from "bun:test";
import { createShortQueues } from "./short-queues.ts";

interface Queue {
  readonly tenant: string;
  readonly name: string;
}

/** Queues that each want one place, of which there are so many. */
function world(free: number) {
  const held = new Map<string, number>();
  const tried: string[] = [];
  const room = { free };
  const blocked = new Set<string>();
  const short = createShortQueues<Queue>(
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
