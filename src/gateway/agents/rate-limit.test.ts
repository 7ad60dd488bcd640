import { describe, expect, test } from "bun:test";
import { SQL } from "bun";
import fc from "fast-check";
import { useStore } from "../../../test/support/stores/one-store.ts";
import { eachPostgres } from "../../../test/support/stores/postgres-kinds.ts";
import { addAgent, type Place, postgresPlace } from "../../../test/support/stores/stores.ts";
import type { Store } from "../../storage/store.ts";
import { type Bucket, createRateLimiter, removeFullBuckets, type TokensWanted, take, takeTokens } from "./store.ts";

const rates = fc.oneof(fc.double({ min: 1e-4, max: 1e4, noNaN: true }), fc.constantFrom(0.1, 1 / 3, 1, 7));
const bursts = fc.integer({ min: 1, max: 50 });
const gaps = fc.array(fc.oneof(fc.integer({ min: 0, max: 5_000 }), fc.double({ min: 0, max: 50, noNaN: true })), {
  maxLength: 200,
  size: "max",
});

/** Takes after each of the gaps: how many got a token, and the state that is left. */
function run(rate: number, burst: number, waits: readonly number[]) {
  let bucket: Bucket | null = null;
  let now = 1e6;
  let taken = 0;
  for (const wait of waits) {
    now += wait;
    const result = take(bucket, now, rate, burst);
    bucket = result.bucket;
    if (result.retryAfterSeconds === null) taken += 1;
  }
  return { bucket, now, taken };
}

describe("the rate limit", () => {
  test("never gives more than the burst and what came in since", () => {
    fc.assert(
      fc.property(rates, bursts, gaps, (rate, burst, waits) => {
        const { now, taken } = run(rate, burst, waits);
        expect(taken).toBeLessThanOrEqual(burst + (rate * (now - 1e6)) / 1000 + 1e-3);
      }),
    );
  });

  test("gives the burst of a full bucket at once, and then nothing", () => {
    fc.assert(
      fc.property(rates, bursts, (rate, burst) => {
        expect(run(rate, burst, Array(burst + 5).fill(0)).taken).toBe(burst);
      }),
    );
  });

  test("gives the burst and no more after a rest, however long", () => {
    fc.assert(
      fc.property(rates, bursts, gaps, (rate, burst, waits) => {
        const history = run(rate, burst, waits).taken;
        expect(run(rate, burst, [...waits, 1e12, ...Array(burst + 5).fill(0)]).taken).toBe(history + burst);
      }),
    );
  });

  test("lets in whoever waits as told, unless the wait was capped at a minute", () => {
    fc.assert(
      fc.property(rates, bursts, gaps, (rate, burst, waits) => {
        const { bucket, now } = run(rate, burst, [...waits, ...Array(burst).fill(0)]);
        const refused = take(bucket, now, rate, burst).retryAfterSeconds;
        fc.pre(refused !== null);
        expect(refused).toBeInteger();
        expect(refused).toBeWithin(1, 61);
        fc.pre(refused < 60);
        expect(take(bucket, now + refused * 1000, rate, burst).retryAfterSeconds).toBeNull();
        // And no whole second earlier.
        if (refused > 1) expect(take(bucket, now + (refused - 1) * 1000, rate, burst).retryAfterSeconds).toBe(1);
      }),
    );
  });

  test("never refuses a caller at the very rate", () => {
    fc.assert(
      fc.property(rates, bursts, (rate, burst) => {
        expect(run(rate, burst, Array(300).fill(1000 / rate)).taken).toBe(300);
      }),
    );
  });

  test("gives nothing when a clock stands or goes back", () => {
    const { bucket } = run(1000, 1, [0]);
    expect(take(bucket, 0, 1000, 1).retryAfterSeconds).toBe(1);
  });

  test.each([
    ["neither: unlimited", null, null, 1_000, 1_000],
    ["only the rate: burst 20", 1e-9, null, 1_000, 20],
    ["only the burst: rate 1", null, 3, 10, 3],
    ["huge numbers", Number.MAX_VALUE, Number.MAX_SAFE_INTEGER, 1_000, 1_000],
  ])("takes the fields that are set: %s", (_what, rate, burst, calls, expected) => {
    let bucket: Bucket | null = null;
    let taken = 0;
    for (let call = 0; call < calls; call++) {
      const result = take(bucket, 5, rate, burst);
      bucket = result.bucket;
      if (result.retryAfterSeconds === null) taken += 1;
    }
    expect(taken).toBe(expected);
  });

  test.each([
    [1, 1],
    [0.5, 2],
    [0.1, 10],
    [1 / 60, 60],
    [0.001, 60],
    [5e-324, 60],
    [100, 1],
  ])("has an empty bucket at rate %p say %p seconds", (rate, seconds) => {
    expect(take({ tokens: 0, at: 9 }, 9, rate, 1).retryAfterSeconds).toBe(seconds);
  });
});

describe("the rate limits of all agents", () => {
  const agent = { id: "a", invocation_rate_limit: 1, invocation_burst: 2, rate_revision: 0 };

  test("are a bucket per agent, and a full one with each revision", () => {
    let now = 0;
    const limiter = createRateLimiter(() => now);
    const takes = (fields: object = {}) => limiter.takeNow("acme", { ...agent, ...fields });
    expect([takes(), takes(), takes()]).toEqual([null, null, 1]);
    expect([takes({ id: "b" }), takes({ id: "b" }), takes({ id: "b" })]).toEqual([null, null, 1]);
    expect([takes({ rate_revision: 1 }), takes({ rate_revision: 1 }), takes({ rate_revision: 1 })]).toEqual([
      null,
      null,
      1,
    ]);
    now = 1_000;
    expect([takes({ rate_revision: 1 }), takes({ rate_revision: 1 })]).toEqual([null, 1]);
  });

  test("keep nothing of an unlimited agent", () => {
    const limiter = createRateLimiter(() => 0);
    const unlimited = { ...agent, invocation_rate_limit: null, invocation_burst: null };
    for (let call = 0; call < 100; call++) expect(limiter.takeNow("acme", unlimited)).toBeNull();
    expect(limiter.takeNow("acme", { ...agent, invocation_burst: 1 })).toBeNull();
  });
});

// The bucket in the database against the one in memory, which is the rule.

const START = 1_790_000_000_000_000;
const SECOND = 1_000_000;
const HOUR = 3_600 * SECOND;
let serial = 0;

/** An agent's bucket at times of the test's choosing, in microseconds. */
function bucketOf(store: Store, fields: Partial<TokensWanted> = {}) {
  const asked = { tenant: "acme", agentId: `agt_${++serial}`, revision: 0, perSecond: 1, depth: 5, ...fields };
  return {
    ...asked,
    at: (now: number, count = 1, changes: Partial<TokensWanted> = {}) =>
      store.execute(takeTokens(`${now}::bigint`), {
        ...asked,
        count,
        ...changes,
      }),
  };
}

/** How many tokens the bucket in memory gives. */
function granted(bucket: Bucket | null, now: number, perSecond: number, depth: number, count: number) {
  let current = bucket;
  let tokens = 0;
  while (tokens < count) {
    const taken = take(current, now / 1000, perSecond, depth);
    current = taken.bucket;
    if (taken.retryAfterSeconds !== null) break;
    tokens += 1;
  }
  return { bucket: current, tokens };
}

describe("the bucket in the database", () => {
  let store: Store;
  useStore("postgres", (opened) => {
    store = opened.store;
  });

  const rates = fc.oneof(fc.double({ min: 1e-4, max: 1e4, noNaN: true }), fc.constantFrom(0.1, 1 / 3, 1, 7));
  const steps = fc.array(
    fc.record({
      gap: fc.oneof(fc.nat(5 * SECOND), fc.nat(2_000), fc.constantFrom(0, SECOND, 1e12)),
      count: fc.integer({ min: 1, max: 40 }),
    }),
    { minLength: 1, maxLength: 40 },
  );

  test("gives what the one in memory gives, to within a token, and a token to whoever waits as told", async () => {
    await fc.assert(
      fc.asyncProperty(rates, fc.integer({ min: 1, max: 50 }), steps, async (perSecond, depth, asked) => {
        const { at } = bucketOf(store, { perSecond, depth });
        let now = START;
        let [inMemory, here] = [0, 0];
        let bucket: Bucket | null = null;
        let waitMs = 0;
        for (const { gap, count } of asked) {
          now += gap;
          const rule = granted(bucket, now, perSecond, depth, count);
          bucket = rule.bucket;
          inMemory += rule.tokens;
          const given = await at(now, count);
          here += given.count;
          expect(Math.abs(here - inMemory)).toBeLessThanOrEqual(1);
          waitMs = given.waitMs;
        }
        const waited = now + Math.ceil(waitMs * 1000);
        expect((await at(waited)).count).toBe(1);
      }),
      { numRuns: 200 },
    );
  });

  test("gives nothing for a clock that is set back, and fills up from there", async () => {
    const { at } = bucketOf(store, { perSecond: 10, depth: 5 });
    expect((await at(START, 9)).count).toBe(5);
    expect(await at(START - HOUR, 9)).toEqual({ count: 0, waitMs: 100 });
    expect((await at(START - HOUR + SECOND / 10, 9)).count).toBe(1);
    expect((await at(START - HOUR + 10 * SECOND, 9)).count).toBe(5);
  });

  test("gives no more than a full one for a clock that is set ahead", async () => {
    const { at } = bucketOf(store, { perSecond: 10, depth: 5 });
    expect((await at(START, 9)).count).toBe(5);
    expect((await at(START + HOUR, 9)).count).toBe(5);
    expect((await at(START, 9)).count).toBe(0);
  });

  test("is a full one with each PATCH, once for all replicas, also for one that does not know of it yet", async () => {
    const { at } = bucketOf(store, { perSecond: 1e-9, depth: 3 });
    expect((await at(START, 5)).count).toBe(3);
    const patched = { revision: 1, depth: 4 };
    expect((await at(START, 1)).count).toBe(0);
    expect((await at(START, 1, patched)).count).toBe(1);
    expect((await at(START, 2)).count).toBe(2);
    expect((await at(START, 9, patched)).count).toBe(1);
    expect((await at(START, 9)).count).toBe(0);
  });

  test.each([5e-324, 1e-300, 1e300, Number.MAX_VALUE])("takes a rate of %p", async (perSecond) => {
    const { at } = bucketOf(store, { perSecond, depth: Number.MAX_SAFE_INTEGER });
    expect((await at(START, 7)).count).toBe(7);
    expect((await at(START + 1, 7)).count).toBe(7);
    expect((await at(START + HOUR, 7)).count).toBe(7);
  });

  test("of many agents is taken from in one go, each its own", async () => {
    const buckets = Array.from({ length: 100 }, (_, i) => bucketOf(store, { depth: i + 1 }));
    const statement = takeTokens(`${START}::bigint`);
    const { execute } = store;
    const given = await Promise.all(buckets.map(({ at: _, ...asked }) => execute(statement, { ...asked, count: 60 })));
    expect(given.map((one) => one?.count)).toEqual(buckets.map(({ depth }) => Math.min(depth, 60)));
  });
});

eachPostgres((kind) => {
  let place: Place;
  let store: Store;
  useStore(
    async () => postgresPlace(await kind.freshDatabase()),
    (opened) => ({ place, store } = opened),
  );

  test("gives its tokens once to two replicas that take them all the time, beside those who clean up", async () => {
    const other = await place.open();
    try {
      const statement = takeTokens();
      const asked = { tenant: "acme", revision: 0, perSecond: 1e-9, depth: 100, count: 1 };
      const agents = Array.from({ length: 10 }, (_, i) => `agt_busy_${i}`);
      const cleaning = Promise.all([removeFullBuckets(store), removeFullBuckets(other)]);
      const given = await Promise.all(
        [store, other].flatMap(({ execute }) =>
          agents.flatMap((agentId) =>
            Array.from({ length: 80 }, async () => (await execute(statement, { ...asked, agentId })).count),
          ),
        ),
      );
      await cleaning;
      expect(given.reduce((sum, count) => sum + count)).toBe(100 * agents.length);
    } finally {
      await other.close();
    }
  });
});

describe("clean-up", () => {
  test("removes buckets that are full again or of deleted agents, and no other", async () => {
    const place = await postgresPlace();
    const store = await place.open();
    await using client = new SQL(place.url, { max: 1 });
    const longAgo = Date.now() * 1000 - HOUR;
    const full = bucketOf(store, { perSecond: 1 });
    const empty = bucketOf(store, { perSecond: 1e-9 });
    const orphan = bucketOf(store, { perSecond: 1e-9 });
    const fresh = bucketOf(store, { perSecond: 1e9 });
    for (const { agentId } of [full, empty, fresh]) await store.write((tx) => addAgent(tx, agentId));
    for (const { at } of [full, empty, orphan]) await at(longAgo, 5);
    await fresh.at(Date.now() * 1000, 5);
    await removeFullBuckets(store);
    const left = await client`select agent_id from agent_buckets order by agent_id`;
    await store.close();
    expect([...left]).toEqual([{ agent_id: empty.agentId }, { agent_id: fresh.agentId }]);
  });
});
