import { expect, test } from "bun:test";
import fc from "fast-check";
import { Commons, type Stake } from "./share.ts";

const never = new AbortController().signal;

/** A promise that is settled by now has told so. */
async function tick(): Promise<void> {
  for (let i = 0; i < 10; i++) await Promise.resolve();
}

/** Somebody's stake, as the test sees it. */
interface Held {
  readonly tenant: string;
  readonly stake: Stake;
  /** In how many rounds it gives back what it was asked for. */
  roundsLeft: number;
  isAsked: boolean;
}

/** A commons in which nobody waits for long, and time goes by in rounds. */
function world(size: number) {
  let look: (() => void) | null = null;
  const commons = new Commons({
    size,
    patienceMs: 0,
    later: (next) => {
      look = next;
    },
  });
  const holders = new Set<Held>();
  const waiting = new Map<string, number>();
  const asked: string[] = [];
  const heldBy = (tenant: string) =>
    [...holders].reduce((sum, one) => sum + (one.tenant === tenant ? one.stake.amount : 0), 0);
  const keeps = (tenant: string) =>
    [...holders].reduce((sum, one) => sum + (one.tenant === tenant && !one.isAsked ? one.stake.amount : 0), 0);
  const part = () => {
    const tenants = new Set(waiting.keys());
    for (const { tenant, stake } of holders) if (stake.amount > 0) tenants.add(tenant);
    return Math.floor(size / tenants.size);
  };

  function take(tenant: string, amount: number, { agent = null as string | null, slowness = 0 } = {}) {
    const stake = commons.stake(tenant, agent);
    const held: Held = { tenant, stake, roundsLeft: slowness, isAsked: false };
    stake.giveWay = () => {
      expect(keeps(tenant)).toBeGreaterThan(part());
      expect(held.isAsked).toBe(false);
      held.isAsked = true;
      asked.push(tenant);
    };
    const wait = stake.take(amount, never);
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

  async function round(): Promise<void> {
    const now = look;
    look = null;
    now?.();
    await tick();
    for (const held of holders) {
      if (!held.isAsked || held.roundsLeft-- > 0) continue;
      held.stake.giveBack();
      holders.delete(held);
    }
    await tick();
    const all = [...holders].reduce((sum, { stake }) => sum + stake.amount, 0);
    expect(all).toBeLessThanOrEqual(size);
  }

  return { commons, take, round, heldBy, waiting, holders, asked, part };
}

const SIZE = 1000;

test("whoever asks for no more than its equal part has it within few rounds, whatever the others hold", async () => {
  const demand = fc.record({
    tenant: fc.nat({ max: 5 }),
    amount: fc.integer({ min: 1, max: 400 }),
    slowness: fc.nat({ max: 2 }),
    agent: fc.constantFrom("x", "y", "z"),
    rounds: fc.nat({ max: 2 }),
  });
  await fc.assert(
    fc.asyncProperty(fc.array(demand, { maxLength: 60 }), fc.integer({ min: 2, max: 6 }), async (demands, count) => {
      const { take, round, heldBy, waiting } = world(SIZE);
      for (const { tenant, amount, rounds, ...rest } of demands) {
        take(`t${tenant % count}`, Math.min(amount, Math.floor(SIZE / (count + 1))), rest);
        for (let at = 0; at < rounds; at++) await round();
      }
      // One more comes, or who is there asks for its first.
      const unit = Math.floor(SIZE / (count + 1));
      const last = take("last", unit, {});
      for (let at = 0; at < 60 && last.stake.amount === 0; at++) await round();
      expect(last.stake.amount).toBe(unit);
      // And so it is with each that waits.
      for (let at = 0; at < 200; at++) await round();
      for (const tenant of waiting.keys()) expect(heldBy(tenant)).toBeGreaterThan(0);
    }),
    { numRuns: 150 },
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

test("nobody gives way for another of its own tenant, nor where nobody else waits", async () => {
  const { take, round, asked } = world(SIZE);
  for (let unit = 0; unit < 120; unit++) take("a", 10, { agent: `x${unit % 7}` });
  for (let at = 0; at < 20; at++) await round();
  expect(asked).toEqual([]);
  take("b", 10);
  for (let at = 0; at < 20; at++) await round();
  expect(asked).toEqual([]);
});

test("who was heard of longest ago gives way first, and no more of them than are needed", async () => {
  const { take, round, asked } = world(SIZE);
  const [first, second, third] = [take("a", 200), take("a", 200), take("a", 200)];
  take("a", 200);
  first?.stake.heard();
  take("b", 350);
  await round();
  expect(asked.length).toBe(1);
  expect(second?.isAsked).toBe(true);
  await round();
  await round();
  expect([first?.isAsked, third?.isAsked]).toEqual([false, false]);
});

test("a share whose holder can't be ended is passed over", async () => {
  const { take, round } = world(SIZE);
  const [first, second] = [take("a", 400), take("a", 400)];
  first.stake.giveWay = null;
  const other = take("b", 400);
  for (let at = 0; at < 3; at++) await round();
  expect([first.isAsked, second.isAsked, other.stake.amount]).toEqual([false, true, 400]);
});

test("a share that is given back while its holder is being asked goes to who waits", async () => {
  let look = () => {};
  const commons = new Commons({
    size: SIZE,
    patienceMs: 0,
    later: (next) => {
      look = next;
    },
  });
  let ended = 0;
  for (let unit = 0; unit < 8; unit++) {
    const stake = commons.stake("a", null);
    stake.takeNow(100);
    stake.giveWay = () => {
      ended++;
      stake.giveBack();
      stake.giveBack();
    };
  }
  const other = commons.stake("b", null);
  const wait = other.take(450, never);
  look();
  await wait;
  expect([other.amount, ended]).toEqual([450, 3]);
});

test("it is worth waiting for what others hold beyond their part, and for nothing else", () => {
  const { commons, take } = world(SIZE);
  expect(commons.worthWaiting("a", 10, 500)).toBe(null);
  take("a", 800);
  // Its own doing.
  expect(commons.worthWaiting("a", 200, 500)).toBe(null);
  expect(commons.worthWaiting("b", 10, 300)).toBe(300);
  expect(commons.worthWaiting("b", 10, 900)).toBe(500);
  expect(commons.worthWaiting("b", 600, 900)).toBe(600);
  expect(commons.worthWaiting("b", 800, 900)).toBe(null);
});

test("somebody who waits for a second is given way to, by the clock that is never set", async () => {
  const commons = new Commons({ size: SIZE });
  const hoard = commons.stake("a", null);
  hoard.takeNow(800);
  hoard.giveWay = () => hoard.giveBack();
  const began = performance.now();
  await commons.stake("b", null).take(300, never);
  expect(performance.now() - began).toBeWithin(900, 5000);
  expect(hoard.amount).toBe(0);
});

test("of holders of little, of which thousands are needed, few are asked at once, and all that are needed soon", () => {
  const looks: (() => void)[] = [];
  const commons = new Commons({ size: 10_000, patienceMs: 0, later: (look) => looks.push(look) });
  let ended = 0;
  for (let unit = 0; unit < 8000; unit++) {
    const stake = commons.stake("a", null);
    stake.takeNow(1);
    stake.giveWay = () => {
      ended++;
      stake.giveBack();
    };
  }
  const other = commons.stake("b", null);
  void other.take(4000, never);
  let rounds = 0;
  for (let look = looks.shift(); look !== undefined && other.amount === 0; look = looks.shift()) {
    const before = ended;
    look();
    expect(ended - before).toBeLessThanOrEqual(64);
    rounds++;
  }
  expect(other.amount).toBe(4000);
  expect(rounds).toBeLessThan(40);
});
