import { afterEach, beforeEach, describe, expect, jest, test } from "bun:test";
import fc from "fast-check";
import { settled } from "../../test/support/simulated-clock.ts";
import { Fault } from "../core/fault.ts";
import { MAX } from "./limits.ts";
import {
  createFairQueue,
  createFairShare,
  createLimiter,
  createReservedShare,
  enter,
  type FairShare,
  leastFirst,
  type Waiter,
} from "./share.ts";
import { createRoundRobin } from "./turns.ts";

describe("a fair share", () => {
  /** Takes one by one, each time for another agent if there are any, until the tenant gets no more. */
  function takeAll(share: FairShare, tenant: string, agents = 0): number {
    let taken = 0;
    if (agents === 0) {
      while (share.take(tenant) === null) taken++;
      return taken;
    }
    for (let misses = 0, next = 0; misses < agents; next++) {
      if (share.take(tenant, `${tenant}-${next % agents}`) === null) [taken, misses] = [taken + 1, 0];
      else misses++;
    }
    return taken;
  }

  describe("a tenant alone", () => {
    test("gets seven eighths of everything, but always one", () => {
      fc.assert(
        fc.property(fc.integer({ min: 1, max: 10_000 }), (size) => {
          const share = createFairShare({ size });
          expect(takeAll(share, "a")).toBe(Math.max(1, size - Math.ceil(size / 8)));
        }),
      );
    });

    test("gets what is too much for anybody's share, while nobody holds anything", () => {
      const share = createFairShare({ size: 100, least: 0 });
      expect(share.take("a", "x", 101)).not.toBeNull();
      expect(share.take("a", "x", 100)).toBeNull();
      expect(share.take("b", "y", 1)).not.toBeNull();
    });

    test("shares among its agents in the same way: many of them that are stuck leave something for the next", () => {
      const share = createFairShare({ size: 4096, agentMax: 64 });
      takeAll(share, "a", 500);
      expect(share.heldBy("a")).toBeGreaterThan(3500);
      for (let agent = 0; agent < 500; agent++) expect(share.heldBy("a", `a-${agent}`)).toBeGreaterThan(0);
      expect(share.take("a", "next")).toBeNull();
      const one = createFairShare({ size: 4096 });
      takeAll(one, "a", 1);
      expect(one.heldBy("a")).toBeGreaterThan(3000);
      expect(one.take("a", "next")).toBeNull();
    });
  });

  describe("the next one", () => {
    test("finds something, when so many tenants as a process serves hold all that they may", () => {
      const share = createFairShare({ size: 4096, agentMax: 64 });
      const got = Array.from({ length: 20 }, (_, tenant) => takeAll(share, `t${tenant}`, 100));
      expect(got[0]).toBeGreaterThan(3500);
      expect(got[1]).toBeGreaterThan(300);
      expect(got[2]).toBeGreaterThan(60);
      expect(Math.min(...got)).toBeGreaterThan(0);
      expect(share.take("next", "only")).toBeNull();
    });

    test("finds bytes too", () => {
      const share = createFairShare({ size: 256 * 1024 * 1024, least: 0 });
      const body = 1024 * 1024;
      for (const tenant of ["a", "b"]) while (share.take(tenant, "x", body) === null);
      expect(share.take("next", "x", body)).toBeNull();
    });
  });

  test("those that wait are ordered by what they hold, and each is looked at once however many there are", () => {
    fc.assert(
      fc.property(fc.array(fc.integer({ min: 0, max: 5 }), { maxLength: 100, size: "max" }), (amounts) => {
        let looks = 0;
        const names = [...amounts.keys()];
        const held = (name: number) => amounts[name] ?? 0;
        const ordered = leastFirst(names, (name) => {
          looks++;
          return held(name);
        });
        expect(ordered).toEqual(names.toSorted((a, b) => held(a) - held(b)));
        expect(looks).toBe(names.length);
      }),
    );
  });
});

describe("a fair queue", () => {
  test("by any sequence each who waits has its share once, in the order of its agent's line, and as soon as there is one; nobody holds more than it may", async () => {
    const step = fc.record({
      action: fc.constantFrom("ask", "ask", "takeNow", "end", "giveUp"),
      tenant: fc.constantFrom("a", "b", "c"),
      agent: fc.constantFrom("x", "y"),
      amount: fc.integer({ min: 1, max: 3 }),
      at: fc.nat(),
    });
    const plan = fc.record({
      steps: fc.array(step, { maxLength: 120, size: "max" }),
      size: fc.integer({ min: 1, max: 30 }),
      agentMax: fc.integer({ min: 3, max: 12 }),
      hasAmounts: fc.boolean(),
    });
    await fc.assert(
      fc.asyncProperty(plan, async ({ steps, size, agentMax, hasAmounts }) => {
        const share = createFairShare({ size, agentMax });
        const queue = createFairQueue(share);
        interface One {
          readonly tenant: string;
          readonly agent: string;
          readonly amount: number;
          readonly stop: AbortController;
          outcome: "waits" | "holds" | "gave up";
        }
        const all: One[] = [];
        const of = (outcome: One["outcome"]) => all.filter((one) => one.outcome === outcome);
        const sum = (ones: readonly One[]) => ones.reduce((total, { amount }) => total + amount, 0);
        const firstInLine = (one: One) =>
          of("waits").find(({ tenant, agent }) => tenant === one.tenant && agent === one.agent) === one;
        const enters = (one: One) => {
          expect([one.outcome, firstInLine(one)]).toEqual(["waits", true]);
          one.outcome = "holds";
        };
        for (const { action, at, ...wanted } of steps) {
          const agent = `${wanted.tenant}-${wanted.agent}`;
          const amount = hasAmounts ? Math.min(wanted.amount, size) : 1;
          if (action === "ask" || action === "takeNow") {
            const one: One = { ...wanted, agent, amount, stop: new AbortController(), outcome: "waits" };
            const isBehind = of("waits").some((other) => other.agent === agent);
            if (action === "takeNow") {
              if (!queue.takeNow(one.tenant, agent, amount)) continue;
              expect(isBehind).toBe(false);
              one.outcome = "holds";
              all.push(one);
              continue;
            }
            all.push(one);
            const wait = enter(queue, one, one.stop.signal, () => enters(one));
            if (wait === undefined) {
              expect(isBehind).toBe(false);
              one.outcome = "holds";
            } else
              void wait.then(
                () => expect(one.outcome).toBe("holds"),
                (reason) => expect([reason, one.outcome]).toEqual(["given up", "gave up"]),
              );
          } else if (action === "end") {
            const [one] = of("holds").slice(at % Math.max(of("holds").length, 1));
            if (one === undefined) continue;
            all.splice(all.indexOf(one), 1);
            queue.giveBack(one.tenant, one.agent, one.amount);
          } else {
            const [one] = of("waits").slice(at % Math.max(of("waits").length, 1));
            if (one === undefined) continue;
            one.outcome = "gave up";
            one.stop.abort("given up");
            await Promise.resolve();
          }
          const held = of("holds");
          expect(queue.size).toBe(of("waits").length);
          expect([share.free, share.inUse]).toEqual([size - sum(held), sum(held)]);
          expect(share.free).toBeGreaterThanOrEqual(0);
          for (const { tenant, agent: name } of all) {
            const own = held.filter((one) => one.agent === name);
            expect(share.heldBy(tenant)).toBe(sum(held.filter((one) => one.tenant === tenant)));
            expect(share.heldBy(tenant, name)).toBe(sum(own));
            expect(sum(own)).toBeLessThanOrEqual(agentMax);
          }
          // Of amounts a large one at the head of a line may be waited for. Each single one waits for a reason.
          if (!hasAmounts) for (const one of of("waits")) expect(share.take(one.tenant, one.agent)).not.toBeNull();
        }
        for (let [one] = of("holds"); one !== undefined; [one] = of("holds")) {
          all.splice(all.indexOf(one), 1);
          queue.giveBack(one.tenant, one.agent, one.amount);
        }
        expect(all.filter(({ outcome }) => outcome !== "gave up")).toEqual([]);
      }),
    );
  });

  /** A queue whose waiters hold one place each. */
  function placesOf(size: number, agentMax: number) {
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
        const { share, held, ask, end } = placesOf(size, size);
        const names = Array.from({ length: tenants }, (_, at) => `t${at}`);
        // The first one takes all that it may before the others come, and each asks again when one of its own ends.
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

  test("tenants that hold the same take turns, however many of one wait", () => {
    const { held, ask, end } = placesOf(1, 1);
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
});

describe("by a simulated clock, a limiter", () => {
  beforeEach(() => void jest.useFakeTimers());
  afterEach(() => void jest.useRealTimers());

  test("runs few at once, lets few wait and none for long, and gives each place back, however the work ends", async () => {
    const work = fc.record({
      tenant: fc.constantFrom("a", "b", "c"),
      after: fc.nat(30),
      takes: fc.nat(120),
      fails: fc.boolean(),
    });
    const plan = fc.record({
      works: fc.array(work, { maxLength: 40, size: "max" }),
      size: fc.integer({ min: 1, max: 4 }),
      waitingMax: fc.integer({ min: 1, max: 8 }),
    });
    await fc.assert(
      fc.asyncProperty(plan, async ({ works, size, waitingMax }) => {
        const few = createLimiter({ size, waitingMax, tooMany: "too many" });
        let [time, running] = [0, 0];
        /** Of those who wait, since when. */
        const waiting = new Map<number, number>();
        const isOver = () => waiting.values().some((since) => time - since >= MAX.limiterWaitMs);
        const pass = async (tenths: number) => {
          for (let left = tenths; left > 0; left--) {
            time += 100;
            jest.advanceTimersByTime(100);
            // Where several waits end together, their callers are told in turns of the event loop: on a busy machine, one in each.
            for (let turns = 0; turns === 0 || (isOver() && turns < 1_000); turns++) {
              await new Promise((resolve) => setImmediate(resolve));
              await settled();
            }
          }
        };
        const starts = works.map(() => Promise.withResolvers<void>());
        const outcomes = works.map(async ({ tenant, takes, fails }, at) => {
          await starts[at]?.promise;
          const asked = time;
          let begun: number | null = null;
          waiting.set(at, asked);
          const outcome = await few(tenant, async () => {
            waiting.delete(at);
            begun = time;
            expect(++running).toBeLessThanOrEqual(size);
            await new Promise((resolve) => setTimeout(resolve, 100 * takes));
            running--;
            if (fails) throw new Error("failed");
            return at;
          }).catch((error: unknown) => error);
          if (begun === null) {
            waiting.delete(at);
            expect(outcome).toBeInstanceOf(Fault);
            expect(outcome).toMatchObject({ kind: "unavailable", message: "too many", retryAfterSeconds: 1 });
            // At once where others wait, else after the whole wait.
            if (time > asked) expect(time - asked).toBe(MAX.limiterWaitMs);
            return;
          }
          expect(begun - asked).toBeLessThanOrEqual(MAX.limiterWaitMs);
          if (fails) expect(outcome).toMatchObject({ message: "failed" });
          else expect(outcome).toBe(at);
        });
        for (const [at, { after }] of works.entries()) {
          await pass(after);
          starts[at]?.resolve();
          await settled();
          expect(waiting.size).toBeLessThanOrEqual(waitingMax);
          if (waiting.size > 0) expect(running).toBeGreaterThan(0);
        }
        await pass(400);
        await Promise.all(outcomes);
        const last = few("a", async () => "free");
        await settled();
        expect([await last, running, waiting.size]).toEqual(["free", 0, 0]);
      }),
      { numRuns: 60 },
    );
  });
});

describe("a reserved share", () => {
  const totals = fc.integer({ min: 1, max: 3_000 });
  const accounts = (count: number) => Array.from({ length: count }, (_, n) => `account ${n}`);

  /** Takes until it is refused, and says how many it got. */
  function takePlaces(shares: ReturnType<typeof createReservedShare>, name: string): number {
    let count = 0;
    while (shares.take(name)) count++;
    return count;
  }

  test("one alone may have nearly all: seven of eight", () => {
    expect([1, 2, 3, 8, 2_000, 4_096].map((total) => takePlaces(createReservedShare(total), "alone"))).toEqual([
      1, 1, 2, 7, 1_750, 3_584,
    ]);
  });

  test("however many flood, the next one gets a place, and the one after it", () => {
    const shares = createReservedShare(2_000);
    for (const name of accounts(5)) takePlaces(shares, name);
    for (const name of ["next", "one more"]) expect(shares.take(name)).toBe(true);
  });

  test("of what one leaves free, each of those who come gets a first place, however much it wants", () => {
    const shares = createReservedShare(2_000);
    takePlaces(shares, "flooder");
    const got = accounts(100).map((name) => takePlaces(shares, name));
    expect(Math.min(...got)).toBeGreaterThanOrEqual(1);
  });

  test("one who holds all it may, however long, keeps nobody from a first place", () => {
    fc.assert(
      fc.property(totals, (total) => {
        const shares = createReservedShare(total);
        takePlaces(shares, "flooder");
        expect(shares.take("other")).toBe(total > 1);
      }),
    );
  });

  test("there are never more taken than there are, and what is given back can be taken again", () => {
    const steps = fc.array(fc.record({ name: fc.constantFrom(...accounts(5)), takes: fc.boolean() }), {
      maxLength: 100,
      size: "max",
    });
    fc.assert(
      fc.property(fc.integer({ min: 1, max: 20 }), steps, (total, sequence) => {
        const shares = createReservedShare(total);
        const held: string[] = [];
        for (const { name, takes } of sequence) {
          const at = held.indexOf(name);
          if (takes) {
            if (shares.take(name)) held.push(name);
          } else if (at >= 0) {
            held.splice(at, 1);
            shares.giveBack(name);
          }
          expect(held.length).toBeLessThanOrEqual(total);
        }
        for (const name of held) shares.giveBack(name);
        expect(takePlaces(shares, "alone")).toBe(takePlaces(createReservedShare(total), "alone"));
      }),
    );
  });

  describe("when so many want more than there is", () => {
    /** Places are given back one by one, in any order, and each that still wants one asks at once. */
    function sharesAfterAWhile(total: number, count: number, seed: number): number[] {
      const shares = createReservedShare(total);
      const held = new Map(accounts(count).map((name) => [name, takePlaces(shares, name)]));
      let random = seed;
      const next = (most: number) => {
        random = (random * 48_271) % 2_147_483_647;
        return random % most;
      };
      for (let turn = 0; turn < 2 * total * count; turn++) {
        const name = `account ${next(count)}`;
        const own = held.get(name) ?? 0;
        if (own === 0) continue;
        shares.giveBack(name);
        held.set(name, own - 1);
        const first = next(count);
        for (let at = 0; at < count; at++) {
          const asks = `account ${(first + at) % count}`;
          held.set(asks, (held.get(asks) ?? 0) + takePlaces(shares, asks));
        }
      }
      return [...held.values()];
    }

    test("none ends up with less than its share of seven eighths, less one", () => {
      fc.assert(
        fc.property(
          fc.integer({ min: 20, max: 300 }),
          fc.integer({ min: 2, max: 12 }),
          fc.integer({ min: 1, max: 2_000_000_000 }),
          (total, count, seed) => {
            const least = Math.min(...sharesAfterAWhile(total, count, seed));
            expect(least).toBeGreaterThanOrEqual(Math.floor((total * 7) / 8 / count) - 1);
          },
        ),
        { numRuns: 50 },
      );
    });
  });
});

describe("a round robin", () => {
  test("each who waits has its turn after at most one of each other tenant, and its own in their order", () => {
    const arrivals = fc.array(fc.integer({ min: 0, max: 4 }), { maxLength: 60, size: "max" });
    fc.assert(
      fc.property(arrivals, (tenants) => {
        const robin = createRoundRobin<number>();
        const left = new Map<string, number[]>();
        for (const [item, tenant] of tenants.entries()) {
          robin.add(`${tenant}`, item);
          left.set(`${tenant}`, [...(left.get(`${tenant}`) ?? []), item]);
        }
        expect(robin.size).toBe(tenants.length);
        const since = new Map<string, Set<string>>();
        for (let next = robin.next(); next !== undefined; next = robin.next()) {
          const { tenant, item } = next;
          expect(left.get(tenant)?.shift()).toBe(item);
          for (const [other, items] of left) {
            if (other === tenant || items.length === 0) continue;
            const served = since.get(other) ?? new Set<string>();
            // Nobody twice while this one waits.
            expect(served.has(tenant)).toBe(false);
            since.set(other, served.add(tenant));
          }
          since.delete(tenant);
        }
        expect(robin.size).toBe(0);
        expect([...left.values()].flat()).toEqual([]);
      }),
    );
  });

  test("a tenant that waits already is not there twice, and can be passed over", () => {
    const robin = createRoundRobin<string>();
    robin.add("a", "first");
    robin.add("a", "first");
    robin.add("b", "second");
    expect(robin.size).toBe(2);
    expect(robin.next(new Set(["a"]))).toEqual({ tenant: "b", item: "second" });
    expect(robin.next(new Set(["a"]))).toBeUndefined();
    expect(robin.next()).toEqual({ tenant: "a", item: "first" });
    expect(robin.next()).toBeUndefined();
  });
});
