// By a simulated clock, on which all waits of this file pass.
import { afterEach, beforeEach, expect, jest, test } from "bun:test";
import fc from "fast-check";
import { settled } from "../../test/support/simulated-clock.ts";
import { type Holding, ReclaimableShare } from "./share.ts";

const never = new AbortController().signal;

beforeEach(() => void jest.useFakeTimers());
afterEach(() => void jest.useRealTimers());

/** A holder, as the test sees it. */
interface Held {
  readonly tenant: string;
  readonly holding: Holding;
  /** In how many rounds after its eviction it gives all back. */
  roundsLeft: number;
  isEvicted: boolean;
}

/** Memory whose time goes by in rounds, in each of which those who wait have waited for long. */
function world(size: number) {
  const memory = new ReclaimableShare(size);
  const holders = new Set<Held>();
  const waiting = new Map<string, number>();
  const evicted: string[] = [];
  const heldBy = (tenant: string) =>
    [...holders].reduce((sum, one) => sum + (one.tenant === tenant ? one.holding.amount : 0), 0);
  const keeps = (tenant: string) =>
    [...holders].reduce((sum, one) => sum + (one.tenant === tenant && !one.isEvicted ? one.holding.amount : 0), 0);
  const part = () => {
    const tenants = new Set(waiting.keys());
    for (const { tenant, holding } of holders) if (holding.amount > 0) tenants.add(tenant);
    return Math.floor(size / tenants.size);
  };

  function take(tenant: string, amount: number, { agent = null as string | null, slowness = 0 } = {}) {
    const holding = memory.hold(tenant, agent);
    const held: Held = { tenant, holding, roundsLeft: slowness, isEvicted: false };
    holding.evict = () => {
      expect(keeps(tenant)).toBeGreaterThan(part());
      expect(held.isEvicted).toBe(false);
      held.isEvicted = true;
      evicted.push(tenant);
    };
    const wait = holding.take(amount, never);
    holders.add(held);
    if (wait === undefined) return held;
    waiting.set(tenant, (waiting.get(tenant) ?? 0) + 1);
    void wait
      .catch(() => {})
      .then(() => {
        const left = (waiting.get(tenant) ?? 0) - 1;
        if (left === 0) waiting.delete(tenant);
        else waiting.set(tenant, left);
      });
    return held;
  }

  async function round(ms = 1_000): Promise<void> {
    jest.advanceTimersByTime(ms);
    await settled();
    for (const held of holders) {
      if (!held.isEvicted || held.roundsLeft-- > 0) continue;
      held.holding.giveBack();
      holders.delete(held);
    }
    await settled();
    const all = [...holders].reduce((sum, { holding }) => sum + holding.amount, 0);
    expect(all).toBeLessThanOrEqual(size);
  }

  return { memory, take, round, heldBy, waiting, holders, evicted, part };
}

const SIZE = 1_000;

test("each that asks for no more than its equal part has it within few rounds, whatever the others hold", async () => {
  const demand = fc.record({
    tenant: fc.nat({ max: 5 }),
    amount: fc.integer({ min: 1, max: 400 }),
    slowness: fc.nat({ max: 2 }),
    agent: fc.constantFrom("x", "y", "z"),
    ms: fc.constantFrom(0, 100, 1_000, 2_000),
  });
  await fc.assert(
    fc.asyncProperty(
      fc.array(demand, { maxLength: 60, size: "max" }),
      fc.integer({ min: 2, max: 6 }),
      async (demands, count) => {
        const { take, round, heldBy, waiting } = world(SIZE);
        for (const { tenant, amount, ms, ...rest } of demands) {
          take(`t${tenant % count}`, Math.min(amount, Math.floor(SIZE / (count + 1))), rest);
          if (ms > 0) await round(ms);
        }
        // One more comes, or who is there asks for its first.
        const unit = Math.floor(SIZE / (count + 1));
        const last = take("last", unit, {});
        for (let at = 0; at < 60 && last.holding.amount === 0; at++) await round(at === 0 ? 1_000 : 100);
        expect(last.holding.amount).toBe(unit);
        // And so it is with each that waits.
        for (let at = 0; at < 60 && waiting.size > 0; at++) await round(100);
        for (const tenant of waiting.keys()) expect(heldBy(tenant)).toBeGreaterThan(0);
      },
    ),
    { numRuns: 25 },
  );
});

test("tenants that want more than there is end up with equal parts, and one agent of each with nearly that", async () => {
  for (const agent of [null, "x"]) {
    const { take, round, heldBy } = world(SIZE);
    for (const tenant of ["a", "b", "c", "d"]) {
      for (let unit = 0; unit < 100; unit++) take(tenant, 10, { agent });
      for (let at = 0; at < 3; at++) await round();
    }
    for (let at = 0; at < 200; at++) await round();
    for (const tenant of ["b", "c", "d"]) expect(heldBy(tenant)).toBeWithin(agent === null ? 250 : 210, 251);
    expect(heldBy("a")).toBeLessThan(SIZE - 3 * 210 + 1);
  }
});

test("nobody is evicted for another of its own tenant, nor where nobody else waits", async () => {
  const { take, round, evicted } = world(SIZE);
  for (let unit = 0; unit < 120; unit++) take("a", 10, { agent: `x${unit % 7}` });
  for (let at = 0; at < 20; at++) await round();
  expect(evicted).toEqual([]);
  take("b", 10);
  for (let at = 0; at < 20; at++) await round();
  expect(evicted).toEqual([]);
});

test("who made progress longest ago is evicted first, and no more of them than are needed", async () => {
  const { take, round, evicted } = world(SIZE);
  const [first, second, third] = [take("a", 200), take("a", 200), take("a", 200)];
  take("a", 200);
  first?.holding.progressed();
  take("b", 350);
  await round();
  expect(evicted.length).toBe(1);
  expect(second?.isEvicted).toBe(true);
  await round();
  await round();
  expect([first?.isEvicted, third?.isEvicted]).toEqual([false, false]);
});

test("a holder that can't be ended is passed over", async () => {
  const { take, round } = world(SIZE);
  const [first, second] = [take("a", 400), take("a", 400)];
  first.holding.evict = null;
  const other = take("b", 400);
  for (let at = 0; at < 3; at++) await round();
  expect([first.isEvicted, second.isEvicted, other.holding.amount]).toEqual([false, true, 400]);
});

test("it is worth waiting for what others hold beyond their part, and for nothing else", () => {
  const { memory, take } = world(SIZE);
  expect(memory.worthWaiting("a", 10, 500)).toBe(null);
  take("a", 800);
  // Its own doing.
  expect(memory.worthWaiting("a", 200, 500)).toBe(null);
  expect(memory.worthWaiting("b", 10, 300)).toBe(300);
  expect(memory.worthWaiting("b", 10, 900)).toBe(500);
  expect(memory.worthWaiting("b", 600, 900)).toBe(600);
  expect(memory.worthWaiting("b", 800, 900)).toBe(null);
});

test("nobody is evicted before somebody has waited for a second; a share that is given back at once goes to who waits", async () => {
  const memory = new ReclaimableShare(SIZE);
  let ended = 0;
  for (let unit = 0; unit < 8; unit++) {
    const holding = memory.hold("a", null);
    holding.takeNow(100);
    holding.evict = () => {
      ended++;
      holding.giveBack();
      holding.giveBack();
    };
  }
  const other = memory.hold("b", null);
  const wait = other.take(450, never);
  jest.advanceTimersByTime(999);
  expect([other.amount, ended]).toEqual([0, 0]);
  jest.advanceTimersByTime(1);
  await wait;
  expect([other.amount, ended, memory.inUse]).toEqual([450, 3, 950]);
});

test("each who waits has to wait for a second itself, though others have done so", async () => {
  const memory = new ReclaimableShare(SIZE);
  const ended: number[] = [];
  for (let unit = 0; unit < 8; unit++) {
    const holding = memory.hold("a", null);
    holding.takeNow(100);
    holding.evict = () => {
      ended.push(unit);
      holding.giveBack();
    };
  }
  const [first, second] = [memory.hold("b", null), memory.hold("c", null)];
  void first.take(250, never);
  jest.advanceTimersByTime(950);
  void second.take(250, never);
  jest.advanceTimersByTime(100);
  expect([first.amount, second.amount, ended]).toEqual([250, 0, [0]]);
  jest.advanceTimersByTime(1_000);
  expect(second.amount).toBe(250);
});

test("one who gives up while it waits gets nothing, and costs nobody its share", async () => {
  const { memory, take, round, evicted } = world(SIZE);
  take("a", 800);
  const [stop, other] = [new AbortController(), memory.hold("b", null)];
  const wait = other.take(300, stop.signal)?.catch(String);
  stop.abort("given up");
  expect(await wait).toBe("given up");
  for (let at = 0; at < 5; at++) await round();
  expect([other.amount, evicted]).toEqual([0, []]);
});

test("of holders of little, of which thousands are needed, few are evicted at once, and all that are needed soon", async () => {
  const memory = new ReclaimableShare(10_000);
  let ended = 0;
  for (let unit = 0; unit < 8_000; unit++) {
    const holding = memory.hold("a", null);
    holding.takeNow(1);
    holding.evict = () => {
      ended++;
      holding.giveBack();
    };
  }
  const other = memory.hold("b", null);
  void other.take(4_000, never);
  jest.advanceTimersByTime(990);
  for (let rounds = 0; rounds < 40; rounds++) {
    const before = ended;
    jest.advanceTimersByTime(10);
    expect(ended - before).toBeLessThanOrEqual(64);
  }
  expect(other.amount).toBe(4_000);
});
