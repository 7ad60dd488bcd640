import { expect, test } from "bun:test";
import fc from "fast-check";
import { createFairQueue, createFairShare, enter, type Waiter } from "./share.ts";

/** Each tenant asks for `asks` places over `agents` agents; gives what each has now, and a way to end one of them. */
function world(size: number, agentMax: number) {
  const share = createFairShare({ size, agentMax });
  const queue = createFairQueue(share);
  const held: Waiter[] = [];
  const ask = (tenant: string, agent: string | null) => {
    const waiter: Waiter = { tenant, agent, amount: 1, enter: () => void held.push(waiter) };
    queue.add(waiter);
    return waiter;
  };
  const end = (at: number) => {
    const [one] = held.splice(at, 1);
    if (one !== undefined) queue.giveBack(one.tenant, one.agent, one.amount);
    return one;
  };
  return { share, queue, held, ask, end };
}

test("of tenants that ask for more than there is, none has less than its share less one, once what was held has ended", () => {
  const asked = fc.record({
    size: fc.integer({ min: 8, max: 300 }),
    tenants: fc.integer({ min: 1, max: 8 }),
    agents: fc.integer({ min: 0, max: 5 }),
    seed: fc.infiniteStream(fc.nat()),
  });
  fc.assert(
    fc.property(asked, ({ size, tenants, agents, seed }) => {
      const { share, held, ask, end } = world(size, size);
      const names = Array.from({ length: tenants }, (_, at) => `t${at}`);
      // The first one takes all that it may before the others come, and everyone asks again when one of its own ends.
      for (const name of names)
        for (let at = 0; at < 2 * size; at++) ask(name, agents === 0 ? null : `${name}-${at % agents}`);
      const pick = seed[Symbol.iterator]();
      for (let ended = 0; ended < 6 * size; ended++) {
        const one = end(ended < 2 * size ? 0 : (pick.next().value ?? 0) % held.length);
        if (one !== undefined) ask(one.tenant, one.agent);
      }
      // Within a tenant the same rule keeps something free for its next agent.
      const kept = agents === 0 ? 7 / 8 : (7 / 8) ** 2;
      const most = Math.floor((size * kept) / tenants);
      for (const name of names) expect(share.heldBy(name)).toBeGreaterThanOrEqual(most - 1);
    }),
    { numRuns: 60 },
  );
});

test("nobody waits while it could have its share, and nobody enters twice or after it was removed", () => {
  const step = fc.record({
    action: fc.constantFrom("ask", "ask", "end", "remove"),
    tenant: fc.constantFrom("a", "b", "c"),
    agent: fc.constantFrom("x", "y"),
    at: fc.nat(),
  });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 300 }), (steps) => {
      const { share, queue, held, ask, end } = world(12, 4);
      const asked = new Set<Waiter>();
      const removed = new Set<Waiter>();
      for (const { action, tenant, agent, at } of steps) {
        const waiting = [...asked].filter((one) => !held.includes(one));
        if (action === "ask") asked.add(ask(tenant, `${tenant}-${agent}`));
        else if (action === "end" && held.length > 0) {
          const one = end(at % held.length);
          if (one !== undefined) asked.delete(one);
        } else if (action === "remove" && waiting.length > 0) {
          const one = waiting[at % waiting.length];
          if (one === undefined) continue;
          queue.remove(one);
          asked.delete(one);
          removed.add(one);
        }
        expect(new Set(held).size).toBe(held.length);
        expect(held.some((one) => removed.has(one))).toBe(false);
        expect(queue.size).toBe(asked.size - held.length);
        // Whoever waits, waits for a reason.
        for (const one of asked) {
          if (held.includes(one)) continue;
          expect(share.take(one.tenant, one.agent)).not.toBeNull();
        }
      }
    }),
  );
});

test("the first come is the first served of one agent, also when it is asked who could take at once", () => {
  const { queue, held, ask, end } = world(8, 2);
  const [first, second, third, fourth] = [1, 2, 3, 4].map(() => ask("a", "x"));
  expect(held).toEqual([first, second] as Waiter[]);
  expect(queue.takeNow("a", "x", 1)).toBe(false);
  end(0);
  expect(held).toEqual([second, third] as Waiter[]);
  end(0);
  expect(held).toEqual([third, fourth] as Waiter[]);
});

test("tenants that hold the same take turns, however many of one wait", () => {
  const { held, ask, end } = world(1, 1);
  for (let at = 0; at < 10; at++) ask("greedy", "x");
  for (let at = 0; at < 3; at++) ask("modest", "x");
  const served: string[] = [];
  for (let at = 0; at < 8; at++) {
    served.push(held[0]?.tenant ?? "");
    end(0);
  }
  expect(served.slice(1, 7)).toEqual(["greedy", "modest", "greedy", "modest", "greedy", "modest"]);
});

test("who may have no more is asked about when that changes, and not whenever anything is given back", () => {
  let [agentMax, asked] = [1, 0];
  const counted = () => {
    asked += 1;
    return agentMax;
  };
  const queue = createFairQueue(createFairShare({ size: 4096, agentMax: counted }));
  const entered: string[] = [];
  const agents = Array.from({ length: 1_000 }, (_, at) => `a${at}`);
  const wait = (agent: string) => queue.add({ tenant: "t", agent, amount: 1, enter: () => void entered.push(agent) });
  for (const agent of [...agents, "free"]) queue.takeNow("t", agent, 1);
  for (const agent of agents) wait(agent);
  for (let at = 0; at < 100; at++) wait("free");
  queue.giveBack("t", "free", 1);
  asked = 0;
  for (let at = 1; at < 100; at++) queue.giveBack("t", "free", 1);
  agentMax = 2;
  for (const agent of agents.slice(0, 100)) queue.serveAgent("t", agent);
  expect(entered).toEqual([...Array(100).fill("free"), ...agents.slice(0, 100)]);
  expect(asked).toBeLessThan(1_000);
});

test("who gives up at the head of a line lets in those behind who want less", async () => {
  const queue = createFairQueue(createFairShare({ size: 16 }));
  const ask = (amount: number, signal?: AbortSignal) => enter(queue, { tenant: "t", agent: "a", amount }, signal);
  expect(ask(8)).toBeUndefined();
  const ending = new AbortController();
  const large = ask(8, ending.signal);
  const small = ask(1);
  ending.abort(new Error("given up"));
  await expect(large).rejects.toThrow("given up");
  await small;
});
