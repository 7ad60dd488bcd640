import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { type Bucket, createRateLimiter, take } from "./rate-limit.ts";

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
    const takes = (fields: object = {}) => limiter.take("acme", { ...agent, ...fields });
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
    for (let call = 0; call < 100; call++) expect(limiter.take("acme", unlimited)).toBeNull();
    expect(limiter.take("acme", { ...agent, invocation_burst: 1 })).toBeNull();
  });
});
